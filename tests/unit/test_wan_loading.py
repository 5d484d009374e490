"""Loading a Wan folder: what stays float32 in a 16-bit model, and weights that no model reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel_core.errors import UserError
from parallel_core.families.wan import FAMILY
from parallel_core.model_file import ModelSource
from parallel_core.storage import Storage
from parallel_core.worker.loading import LoadedTransformer, load_transformer
from tests.tiny_wan import add_unused_norms, build_transformer, write_transformer

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype) -> LoadedTransformer:
    return load_transformer(ModelSource(folder), FAMILY, Storage(str(dtype).removeprefix("torch.")), CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_some_weights_keep_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load(write_transformer(tmp_path, "flf2v"), dtype)
    whole = build_transformer("flf2v").state_dict()
    wide = torch.promote_types(dtype, torch.float32)
    for name, tensor in loaded.model.state_dict().items():
        expected = whole[name].to(wide if FAMILY.is_fp32(name) else dtype)
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inputs_and_outputs_have_the_models_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load(write_transformer(tmp_path, "i2v"), dtype).model
    rows = {
        "x": torch.randn(1, 36, 2, 4, 4).to(dtype),
        "times": torch.tensor([900.0]),
        "context": torch.randn(1, 3, 32).to(dtype),
        "clip_fea": torch.randn(1, 5, 1280).to(dtype),
    }
    with torch.inference_mode():
        output = FAMILY.finish(model(**FAMILY.prepare(rows, {"rope": torch.randn(8, 8, 2)})))
    assert output.dtype == dtype and output.isfinite().all()


def test_weights_that_no_model_reads_are_left_in_the_file(tmp_path: Path) -> None:
    folder = write_transformer(tmp_path, "i2v")
    plain = load(folder, torch.float32)
    add_unused_norms(folder)
    loaded = load(folder, torch.float32)
    assert loaded.bytes_read == plain.bytes_read
    assert loaded.model.state_dict().keys() == plain.model.state_dict().keys()


def test_a_weight_that_is_merely_unknown_is_refused(tmp_path: Path) -> None:
    folder = write_transformer(tmp_path, "i2v")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 1'))
    with pytest.raises(UserError, match=r"blocks\.1\..* is not part of a WanTransformer3DModel"):
        load(folder, torch.float32)
