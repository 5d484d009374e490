"""Checkpoints: what is read from headers, and how every kind of damage is named before a weight is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel_core.checkpoint import check_loadable, check_shapes, read_checkpoint
from parallel_core.errors import UserError

TENSORS = {"a.weight": torch.zeros(4, 3), "b.bias": torch.zeros(5, dtype=torch.bfloat16)}
CONFIG = {"_class_name": "FluxTransformer2DModel"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A pipeline folder with one transformer."""
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    (folder / "transformer" / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def weights(model: Path) -> Path:
    return model / "transformer" / "diffusion_pytorch_model.safetensors"


def refusal(model: Path) -> str:
    with pytest.raises(UserError) as error:
        read_checkpoint(model, "transformer")
    return str(error.value)


def test_names_shapes_dtypes_and_bytes(model: Path) -> None:
    checkpoint = read_checkpoint(model, "transformer")
    assert {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items()} == {
        "a.weight": ((4, 3), "float32"),
        "b.bias": ((5,), "bfloat16"),
    }
    assert (checkpoint.num_bytes, checkpoint.num_elements, checkpoint.dtype) == (48 + 10, 17, "float32")


def test_a_bare_transformer_folder_is_a_model_too(model: Path) -> None:
    assert read_checkpoint(model / "transformer", "transformer").class_name == "FluxTransformer2DModel"


def test_shards_are_read_through_their_index(model: Path) -> None:
    folder = model / "transformer"
    weights(model).unlink()
    weight_map = {}
    for index, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, folder / f"part-{index}.safetensors")
        weight_map[name] = f"part-{index}.safetensors"
    index_file = folder / "diffusion_pytorch_model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    assert set(read_checkpoint(model, "transformer").tensors) == set(TENSORS)
    (folder / "part-1.safetensors").unlink()
    assert "part-1.safetensors is missing" in refusal(model)


def test_an_index_cannot_name_files_elsewhere(model: Path) -> None:
    index_file = model / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": {"a.weight": "../../elsewhere.safetensors"}}))
    assert "outside the model's folder" in refusal(model)


def test_a_replaced_file_has_another_fingerprint(model: Path) -> None:
    before = read_checkpoint(model, "transformer").fingerprint
    save_file({**TENSORS, "c": torch.zeros(1)}, weights(model))
    assert read_checkpoint(model, "transformer").fingerprint != before


def test_a_folder_without_transformer(model: Path) -> None:
    with pytest.raises(UserError, match="no 'vae' folder"):
        read_checkpoint(model, "vae")


def test_a_folder_without_config(model: Path) -> None:
    (model / "transformer" / "config.json").unlink()
    assert "config.json is missing" in refusal(model)


def test_a_config_that_is_not_json(model: Path) -> None:
    (model / "transformer" / "config.json").write_text("{")
    assert "not valid json" in refusal(model)


def test_a_config_without_class(model: Path) -> None:
    (model / "transformer" / "config.json").write_text("{}")
    assert "no _class_name" in refusal(model)


@pytest.mark.parametrize("length", [0, 5, 30])
def test_a_cut_header(model: Path, length: int) -> None:
    weights(model).write_bytes(weights(model).read_bytes()[:length])
    assert "not a whole safetensors file" in refusal(model)


def test_a_header_that_is_not_json(model: Path) -> None:
    weights(model).write_bytes(struct.pack("<Q", 8) + b"notjson!" + bytes(100))
    assert "damaged safetensors header" in refusal(model)


def test_a_cut_body_says_how_much_is_missing(model: Path) -> None:
    whole = weights(model).read_bytes()
    weights(model).write_bytes(whole[:-4])
    assert f"describes {len(whole)} bytes, the file has {len(whole) - 4}" in refusal(model)


def test_a_header_whose_numbers_disagree(model: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 8]}}).encode()
    weights(model).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert "claims shape [9, 9] of F32 but 8 bytes; expected 324" in refusal(model)


def test_pickled_weights_are_not_opened(model: Path) -> None:
    weights(model).rename(weights(model).with_suffix(".bin"))
    assert "only pickled weights (diffusion_pytorch_model.bin)" in refusal(model)


def test_no_weights_at_all(model: Path) -> None:
    weights(model).unlink()
    assert "no .safetensors file" in refusal(model)


def test_two_files_without_an_index(model: Path) -> None:
    folder = model / "transformer"
    weights(model).rename(folder / "one.safetensors")
    save_file(TENSORS, folder / "two.safetensors")
    assert "2 safetensors files and no index" in refusal(model)


def test_wrong_shapes_are_listed_with_both_numbers(model: Path) -> None:
    checkpoint = read_checkpoint(model, "transformer")
    with pytest.raises(UserError) as error:
        check_shapes(checkpoint, {"a.weight": (4, 4), "c.weight": (1,)})
    assert "c.weight is missing" in str(error.value)
    assert "a.weight has shape [4, 3], expected [4, 4]" in str(error.value)
    assert "b.bias is not part of a FluxTransformer2DModel" in str(error.value)


def test_quantised_weights_are_refused(model: Path) -> None:
    save_file({"a": torch.zeros(4).to(torch.float8_e4m3fn)}, weights(model))
    with pytest.raises(UserError, match="float8_e4m3fn weights"):
        check_loadable(read_checkpoint(model, "transformer"))
