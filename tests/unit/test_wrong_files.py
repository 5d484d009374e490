"""Foreign, broken and half-downloaded single files are refused from their headers, in words that help."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from parallel_core.checkpoint import Checkpoint
from parallel_core.errors import UserError
from parallel_core.model_file import ModelSource, read_transformer
from parallel_core.storage import choose_storage
from tests import wrong_files as wrong
from tests.wrong_files import CONFIGS, Tensors

FAMILIES = tuple(CONFIGS)


def read(file: Path, config_from: Path | None = None) -> Checkpoint:
    """Everything that is done before a rank starts."""
    checkpoint, _ = read_transformer(ModelSource(file, config_from))
    choose_storage(checkpoint, "default")
    return checkpoint


def refused(file: Path, *fragments: str, config_from: Path | None = None) -> None:
    with pytest.raises(UserError) as caught:
        read(file, config_from)
    message = str(caught.value)
    for fragment in (file.name, *fragments):
        assert fragment.lower() in message.lower(), f"{fragment!r} is not in: {message}"


# ----- sound files, of which the others are made -----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["original", "diffusers", "prefixed", "old-scaled", "new-scaled", "fp8", "gguf"])
def test_sound_files_are_read(tmp_path: Path, family: str, layout: str) -> None:
    file = tmp_path / "sound.safetensors"
    tensors: Tensors
    if layout == "gguf":
        file = wrong.write_gguf(tmp_path / "sound.gguf", wrong.original_tensors(family))
    else:
        prefix = "model.diffusion_model." if layout in ("prefixed", "old-scaled") else ""
        tensors = wrong.original_tensors(family, "F8_E5M2" if layout == "fp8" else "BF16", prefix)
        if layout == "diffusers":
            tensors = wrong.diffusers_tensors(family)
        if layout.endswith("scaled"):
            tensors = wrong.scaled(tensors, new=layout == "new-scaled", prefix=prefix)
        wrong.write(file, tensors)
        with safe_open(file, framework="np"):
            pass
    checkpoint = read(file)
    assert checkpoint.config["num_layers"] == 3
    assert bool(checkpoint.tensors["transformer_blocks.0.attn.to_q.weight" if family != "wan" else
                                   "blocks.0.attn1.to_q.weight"].scale) == layout.endswith("scaled")  # fmt: skip
