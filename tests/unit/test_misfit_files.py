"""Weights that do not fit one another, and configs that do not fit the weights, are refused from headers and json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel_core.errors import UserError
from tests import wrong_files as wrong
from tests.unit.test_wrong_files import flux, read, refused, wan
from tests.wrong_files import Tensors

# ----- weights that do not fit one another -----

STRUCTURE: dict[str, tuple[Tensors, tuple[str, ...]]] = {
    "one-missing": (
        {k: v for k, v in flux().items() if k != "final_layer.linear.bias"}, ("final_layer.linear.bias", "missing")
    ),
    "embedder-missing": (
        {k: v for k, v in flux().items() if k != "vector_in.in_layer.weight"}, ("vector_in.in_layer.weight", "missing")
    ),
    "block-missing-in-the-middle": (
        {k: v for k, v in flux().items() if not k.startswith("double_blocks.1.")}, ("double_blocks.1.", "missing")
    ),
    "extra": (flux("double_blocks.0.img_attn.extra.weight"), ("double_blocks.0.img_attn.extra.weight", "not part of")),
    "other-width-in-one-layer": (
        flux() | {"double_blocks.1.img_mlp.0.weight": ("BF16", (1280, 256))},
        ("double_blocks.1.img_mlp.0.weight", "[1280, 256]", "[1024, 256]"),
    ),
    "other-width-in-a-fused-layer": (
        flux() | {"double_blocks.1.img_attn.qkv.weight": ("BF16", (800, 256))},
        ("double_blocks.1.img_attn.qkv.weight", "[800, 256]", "[768, 256]"),
    ),
    "both-layouts": (flux() | wrong.diffusers_tensors("flux"), ("not part of", "x_embedder")),
    "no-rows": (flux() | {"img_in.weight": ("BF16", (0, 64))}, ("shapes that no such model has",)),
    "no-heads": (
        flux() | {"double_blocks.0.img_attn.norm.query_norm.scale": ("BF16", (0,))}, ("shapes that no such model has",)
    ),
    "scalar": (flux() | {"img_in.weight": ("BF16", ())}, ("shapes that no such model has",)),
    "empty-fused": (flux() | {"double_blocks.0.img_attn.qkv.weight": ("BF16", (768, 0))}, ("[768, 0]", "[768, 256]")),
    "wan-width": (wan() | {"patch_embedding.weight": ("BF16", (100, 16, 1, 2, 2))}, ("width", "100", "128",
                                                                                      "config_from")),
    "heads-of-another-size": (
        wrong.diffusers_tensors("qwen-image")
        | {f"transformer_blocks.0.attn.norm_{kind}.weight": ("BF16", (64,)) for kind in ("q", "k")},
        ("heads of 64", "128", "config_from"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURE)
def test_weights_that_do_not_fit_one_another(tmp_path: Path, name: str) -> None:
    tensors, fragments = STRUCTURE[name]
    refused(wrong.write(tmp_path / f"{name}.safetensors", tensors), *fragments)


# ----- config_from -----


def folder_with(tmp_path: Path, family: str, **changes: object) -> Path:
    """A transformer folder that has a config and no weights: config_from needs no more."""
    folder = tmp_path / f"folder-{family}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**wrong.config_of(family), **changes}))
    return folder


def test_a_config_from_that_fits(tmp_path: Path) -> None:
    file = wrong.write(tmp_path / "m.safetensors", wan())
    assert read(file, folder_with(tmp_path, "wan", eps=1e-5)).config["eps"] == 1e-5


CONFIG_FROM: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "other-family": ("qwen-image", {}, ("config_from", "QwenImageTransformer2DModel", "FluxTransformer2DModel")),
    "no-class": ("flux", {"_class_name": None}, ("config_from", "None", "FluxTransformer2DModel")),
    "other-depth": ("flux", {"num_layers": 19}, ("config_from", "num_layers = 19", "show 3")),
    "other-heads": ("flux", {"num_attention_heads": 24}, ("num_attention_heads = 24", "show 2")),
    "other-guidance": ("flux", {"guidance_embeds": False}, ("guidance_embeds = False", "show True")),
    "other-axes": ("flux", {"axes_dims_rope": [4, 6, 6]}, ("heads of 128", "[4, 6, 6]")),
    "depth-is-text": ("flux", {"num_layers": "three"}, ("num_layers = 'three'",)),
    "axes-are-text": ("flux", {"axes_dims_rope": "16, 56, 56"}, ("config_from 'folder-flux'",)),
    "empty-name": ("flux", {"": 3, "num_layers": 19}, ("num_layers = 19",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIG_FROM)
def test_a_config_from_that_does_not_fit(tmp_path: Path, name: str) -> None:
    family, changes, fragments = CONFIG_FROM[name]
    file = wrong.write(tmp_path / "m.safetensors", flux())
    refused(file, *fragments, config_from=folder_with(tmp_path, family, **changes))


def test_a_head_size_of_nothing(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "wan", attention_head_dim=0)
    refused(wrong.write(tmp_path / "m.safetensors", wan()), "config_from 'folder-wan'", config_from=folder)


def test_config_from_beside_a_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "flux")
    refused(folder, "config_from", "a config of its own", config_from=folder)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"num_layers": 10**9}, ("num_layers is 1000000000",)),
        ({"num_layers": "two"}, ("wrong kind", "two")),
        ({"num_layers": None}, ("wrong kind",)),
        ({"num_attention_heads": [2]}, ("wrong kind",)),
        ({"num_layers": 2}, ("not part of",)),
    ],
)
def test_a_folder_with_a_config_that_no_model_has(
    tmp_path: Path, changes: dict[str, object], fragments: tuple[str, ...]
) -> None:
    folder = folder_with(tmp_path, "flux", **changes)
    wrong.write(folder / "diffusion_pytorch_model.safetensors", wrong.diffusers_tensors("flux"))
    refused(folder, *fragments)


@pytest.mark.parametrize(
    "text", ["[" * 50_000, "9" * 9000, "\x00", "[]", '{"architectures": 3}', '{"architectures": {}}']
)
def test_a_folder_with_a_config_that_is_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="config.json"):
        read(tmp_path)
