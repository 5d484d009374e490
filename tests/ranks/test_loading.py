"""Loading a transformer: all of it or a tensor rank's slices and no more, and one clear error for what does not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_core.errors import UserError
from parallel_core.families.flux import FAMILY
from parallel_core.model_file import ModelSource
from parallel_core.storage import Storage
from parallel_core.worker.loading import LoadedTransformer, Part, load_transformer
from tests.ranks.gloo import run_on_ranks
from tests.tiny_flux import build_transformer, write_pipeline, write_transformer

WEIGHTS = "diffusion_pytorch_model.safetensors"
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32, rank: int = 0, degree: int = 1) -> LoadedTransformer:
    part = Part(tensor_rank=rank, tensor_degree=degree)
    return load_transformer(ModelSource(folder), FAMILY, Storage(str(dtype).removeprefix("torch.")), CPU, part)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_transformer(tmp_path / "transformer")


def test_all_weights_arrive_as_they_were_written(folder: Path) -> None:
    loaded = load(folder)
    expected = build_transformer().state_dict()
    assert loaded.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())
    assert loaded.bytes_read == sum(tensor.nbytes for tensor in expected.values())
    assert not loaded.shards


def test_a_pipeline_folder_with_several_files_works_too(tmp_path: Path) -> None:
    write_pipeline(tmp_path, max_shard_size="500KB")
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 1
    expected = build_transformer().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(tmp_path).model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_cast_and_own_their_memory(folder: Path, dtype: torch.dtype) -> None:
    loaded = load(folder, dtype)
    with (folder / WEIGHTS).open("r+b") as file:  # in place: a memory map would show it
        file.write(bytes((folder / WEIGHTS).stat().st_size))
    expected = build_transformer(dtype=dtype).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())


@pytest.mark.parametrize("degree", [2, 4])
def test_slices_put_together_are_the_whole(folder: Path, degree: int) -> None:
    whole = build_transformer().state_dict()
    ranks = [load(folder, rank=rank, degree=degree) for rank in range(degree)]
    for name, expected in whole.items():
        parts = [dict(loaded.model.named_parameters()).get(name) for loaded in ranks]
        spec = ranks[0].shards.get(name)
        if spec is None:
            assert all(part is not None and torch.equal(part, expected) for part in parts), name
        elif spec.dim is None:
            assert parts[0] is not None and torch.equal(parts[0], expected) and parts[1:] == [None] * (degree - 1), name
        else:  # block by block: rank 0's part, rank 1's part, ...
            pieces = [part.split([block // degree for block in spec.blocks], spec.dim) for part in parts]
            joined = torch.cat([piece for block in zip(*pieces, strict=True) for piece in block], spec.dim)
            assert torch.equal(joined, expected), name


def test_a_tensor_rank_holds_and_needs_little_more_than_its_slices(tmp_path: Path) -> None:
    config = {"attention_head_dim": 64, "num_attention_heads": 8, "axes_dims_rope": [16, 24, 24], "num_layers": 1}
    run_on_ranks(1, "transformer_ranks:write_models", name="flux", models={str(tmp_path): config})
    size = (tmp_path / WEIGHTS).stat().st_size
    whole = run_on_ranks(1, "transformer_ranks:load_slices", folder=str(tmp_path), dtype="float32")[0]
    assert whole["bytes"] == whole["read"] == pytest.approx(size, rel=1e-3)
    for rank in run_on_ranks(2, "transformer_ranks:load_slices", folder=str(tmp_path), dtype="float32"):
        assert rank["bytes"] <= 0.55 * whole["bytes"]
        assert rank["read"] == rank["bytes"]
        assert rank["peak"] <= rank["bytes"] + 2 * whole["largest"]
        assert rank["mapped"] == []
        assert not rank["training"] and not rank["requires_grad"]


def test_a_degree_that_heads_cannot_serve_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"tensor 3 does not divide the 4 attention heads.*degree that works is [24]"):
        load(folder, degree=3)


def test_weights_that_do_not_fit_the_config_are_one_error(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["proj_out.bias"] = tensors["proj_out.bias"][:-1].clone()
    tensors["surprise"] = tensors.pop("x_embedder.bias")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError) as refused:
        load(folder)
    for text in ("x_embedder.bias is missing", "proj_out.bias has shape [63], expected [64]", "surprise is not part"):
        assert text in str(refused.value)


def test_a_truncated_file_is_refused_by_name(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1000)
    with pytest.raises(UserError, match=f"{WEIGHTS} is cut off"):
        load(folder)


def test_the_config_decides_not_the_file(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_layers": 1}))
    with pytest.raises(UserError, match="transformer_blocks.1"):
        load(folder)


@pytest.mark.parametrize("name", ["flux", "wan-i2v"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_on_ranks_make_the_whole_again(tmp_path: Path, name: str, dtype: str) -> None:
    """Also where some weights of a 16-bit model keep float32."""
    folder = str(tmp_path)
    run_on_ranks(1, "transformer_ranks:write_models", name=name, models={folder: {}})
    assert run_on_ranks(2, "transformer_ranks:divide_anew", name=name, folder=folder, dtype=dtype) == [[], []]
