"""Files that hold no transformer that runs here, or a damaged one: each is refused with what it is and what is wrong.

All by header alone: the weights of most of these files are not even there.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel_core.errors import UserError
from parallel_core.model_file import ModelSource, read_transformer
from tests.tiny_files import new_scaled_fp8, old_scaled_fp8, original_weights, write_file
from tests.tiny_models import TINY_MODELS, family_of
from tests.unit.file_soup import write_header, write_names

Weights = dict[str, Tensor]


def refusal(file: Path, config_from: Path | None = None) -> str:
    """The message, which names the file."""
    with pytest.raises(UserError) as caught:
        read_transformer(ModelSource(file, config_from))
    assert file.name in str(caught.value)
    return str(caught.value)


def assert_refused(file: Path, *fragments: str, config_from: Path | None = None) -> None:
    text = refusal(file, config_from)
    assert [fragment for fragment in fragments if fragment not in text] == [], text


# ----- foreign models -----

FOREIGN: dict[str, tuple[str, ...]] = {
    "SD 1.x": (
        "model.diffusion_model.input_blocks.0.0.weight",
        "model.diffusion_model.middle_block.1.proj_in.weight",
        "cond_stage_model.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight",
        "first_stage_model.decoder.conv_in.weight",
    ),
    "SDXL": (
        "model.diffusion_model.input_blocks.0.0.weight",
        "model.diffusion_model.label_emb.0.0.weight",
        "conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1.weight",
    ),
    "U-Net": ("down_blocks.0.resnets.0.conv1.weight", "mid_block.attentions.0.proj_in.weight", "conv_in.weight"),
    "Stable Diffusion 3": (
        "model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight",
        "model.diffusion_model.x_embedder.proj.weight",
        "model.diffusion_model.context_embedder.weight",
    ),
    "FLUX.2": (
        "double_stream_modulation_img.lin.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "img_in.weight",
        "txt_in.weight",
    ),
    "Chroma": (
        "distilled_guidance_layer.in_proj.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "double_blocks.0.txt_attn.norm.query_norm.scale",
        "single_blocks.0.norm.query_norm.scale",
        "img_in.weight",
        "txt_in.weight",
    ),
    "HunyuanVideo": (
        "txt_in.individual_token_refiner.blocks.0.norm1.weight",
        "double_blocks.0.img_attn_q_norm.weight",
        "img_in.proj.weight",
    ),
    "LTX": ("model.diffusion_model.adaln_single.linear.weight", "model.diffusion_model.patchify_proj.weight"),
    "Z-Image": ("cap_embedder.0.weight", "noise_refiner.0.attention.qkv.weight", "x_embedder.weight"),
    "HiDream": ("caption_projection.0.linear.weight", "double_stream_blocks.0.block.attn1.to_q.weight"),
    "language model": (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ),
    "CLIP": ("text_model.encoder.layers.0.self_attn.q_proj.weight", "text_model.embeddings.position_embedding.weight"),
    "CLIP vision": ("vision_model.encoder.layers.0.self_attn.q_proj.weight", "visual_projection.weight"),
    "T5": ("encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"),
    "LoRA": (
        "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",
        "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight",
        "lora_unet_double_blocks_0_img_attn_qkv.alpha",
    ),
    "a LoRA": (
        "transformer.transformer_blocks.0.attn.to_q.lora_A.weight",
        "transformer.transformer_blocks.0.attn.to_q.lora_B.weight",
    ),
    "LoRA (LoKr)": ("lycoris_transformer_blocks_0_attn_to_q.lokr_w1", "lycoris_transformer_blocks_0_attn_to_q.lokr_w2"),
    "VAE": ("decoder.up.0.block.0.conv1.weight", "encoder.down.0.block.0.conv1.weight", "quant_conv.weight"),
    "Wan or Qwen-Image VAE": ("decoder.middle.0.residual.0.gamma", "encoder.downsamples.0.residual.2.weight"),
    "ControlNet": ("control_model.input_blocks.0.0.weight", "control_model.zero_convs.0.0.weight"),
    "ControlNet (FLUX)": (
        "controlnet_x_embedder.weight",
        "controlnet_blocks.0.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "context_embedder.weight",
        "x_embedder.weight",
    ),
    "upscaler": ("conv_first.weight", "body.0.rdb1.conv1.weight"),
    "embedding": ("emb_params",),
    "Nunchaku": ("transformer_blocks.0.qkv_proj.qweight", "transformer_blocks.0.qkv_proj.wscales"),
    "such as": ("layer.weight", "other.weight"),
}
"""What the message calls it -> names from such files."""


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_model_is_called_by_its_name(tmp_path: Path, kind: str) -> None:
    file = write_names(tmp_path / "flux1-dev.safetensors", *FOREIGN[kind])
    assert_refused(file, kind.partition(" (")[0].partition(" 1.x")[0])


RELATIVES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "VACE": ("wan", "VACE", ("vace_blocks.0.after_proj.weight", "vace_patch_embedding.weight")),
    "Fun Camera": ("wan-i2v", "Fun Camera", ("control_adapter.conv.weight",)),
    "Fun Control": ("wan-i2v", "Fun Control", ("ref_conv.weight",)),
    "Animate": ("wan-i2v", "Animate", ("face_adapter.fuser_blocks.0.linear1_kv.weight", "pose_patch_embedding.weight")),
    "S2V": ("wan", "S2V", ("casual_audio_encoder.encoder.final_linear.weight",)),
    "HuMo": ("wan-i2v", "HuMo", ("audio_proj.proj1.weight",)),
    "Layered": ("qwen", "Layered", ("time_text_embed.addition_t_embedding.weight",)),
    "Chroma": ("flux", "Chroma", ("distilled_guidance_layer.in_proj.weight",)),
    "FLUX.2": ("flux", "FLUX.2", ("double_stream_modulation_img.lin.weight",)),
}
"""Models that have all the weights of one that runs here, and more: model -> (it, its name, what more)."""


# ----- sound files that are damaged -----


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("folders")

    def make(name: str) -> Path:
        if not (root / name).exists():
            TINY_MODELS[name].write(root / name)
        return root / name

    return make


@pytest.fixture
def edited(tmp_path: Path, folders: Callable[[str], Path]) -> Callable[..., Path]:
    """A file of a tiny Flux after `edit` has changed its weights, by original names."""

    def make(edit: Callable[[Weights], Weights | None], name: str = "flux", **metadata: str) -> Path:
        weights = original_weights(folders(name), family_of(name))
        weights = edit(weights) or weights
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "m.safetensors", metadata)
        return tmp_path / "m.safetensors"

    return make


@pytest.mark.parametrize("model", RELATIVES)
def test_a_relative_that_has_more_weights(
    edited: Callable[..., Path], folders: Callable[[str], Path], model: str
) -> None:
    name, called, more = RELATIVES[model]
    file = edited(lambda weights: {**weights, **{key: torch.zeros(4) for key in more}}, name)
    assert_refused(file, called, "Load Diffusion Model", config_from=folders(name))


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if name not in names}


def with_tensor(name: str, tensor: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, name: tensor}


def both_layouts(weights: Weights) -> Weights:
    return {**weights, "single_transformer_blocks.0.attn.to_q.weight": torch.zeros(64, 64)}


def a_gap(weights: Weights) -> Weights:
    """The first and the third block are there, the second is not."""
    return {name.replace("single_blocks.1.", "single_blocks.2."): tensor for name, tensor in weights.items()}


FUSED = "double_blocks.0.img_attn.qkv.weight"
DAMAGED: dict[str, tuple[Callable[[Weights], Weights | None], tuple[str, ...]]] = {
    "one tensor missing": (without("final_layer.linear.bias"), ("final_layer.linear.bias is missing",)),
    "an entrance missing": (without("img_in.weight"), ("flux", "'img_in.weight' is missing")),
    "a block missing": (a_gap, ("single_blocks.1.linear1.weight is missing",)),
    "an extra tensor": (with_tensor("double_blocks.0.img_attn.extra.weight", torch.zeros(4)), ("extra.weight",)),
    "an extra half block": (with_tensor("single_blocks.2.linear1.weight", torch.zeros(4, 4)), ("single_blocks.2",)),
    "a block too far": (
        with_tensor("single_blocks.999999999.norm.query_norm.scale", torch.zeros(16)),
        ("single_blocks.999999999", "not part of"),
    ),
    "another size in one layer": (
        with_tensor("double_blocks.1.img_mlp.0.weight", torch.zeros(256, 48)),
        ("[256, 48]", "[256, 64]"),
    ),
    "no fusion": (with_tensor(FUSED, torch.zeros(64, 64)), (FUSED, "[64, 64]", "192 rows")),
    "half a modulation": (
        with_tensor("final_layer.adaLN_modulation.1.weight", torch.zeros(64, 64)),
        ("final_layer.adaLN_modulation.1.weight", "128 rows"),
    ),
    "an entrance of another rank": (with_tensor("img_in.weight", torch.zeros(64)), ("shapes that no such model has",)),
    "nothing in a tensor": (with_tensor("img_in.weight", torch.zeros(0, 64)), ("'img_in.weight' is empty",)),
    "no width": (with_tensor("img_in.weight", torch.zeros(8, 64)), ("m.safetensors", "num_attention_heads")),
    "names of both layouts": (both_layouts, ("a second single_transformer_blocks.0.attn.to_q.weight", "not part of")),
    "integers": (with_tensor("img_in.weight", torch.zeros(64, 64, dtype=torch.int8)), ("int8", "GGUF")),
    "nf4": (
        with_tensor("img_in.weight.quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8)),
        ("bitsandbytes NF4", "GGUF"),
    ),
    "gptq": (with_tensor("double_blocks.0.img_mlp.0.qweight", torch.zeros(4, 4, dtype=torch.int32)), ("GPTQ",)),
    "quanto": (with_tensor("double_blocks.0.img_mlp.0.weight._data", torch.zeros(4, dtype=torch.int8)), ("quanto",)),
    "svdquant": (with_tensor("double_blocks.0.img_mlp.0.smooth_factor", torch.zeros(4)), ("SVDQuant",)),
    "bnb int8": (with_tensor("double_blocks.0.img_mlp.0.SCB", torch.zeros(4)), ("bitsandbytes",)),
    "block scales": (with_tensor("double_blocks.0.img_mlp.0.weight_scale_inv", torch.zeros(4)), ("per block",)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_model(edited: Callable[..., Path], folders: Callable[[str], Path], damage: str) -> None:
    edit, fragments = DAMAGED[damage]
    assert_refused(edited(edit), *fragments, config_from=None if damage == "a block missing" else folders("flux"))


def test_mixed_dtypes_are_fine(edited: Callable[..., Path], folders: Callable[[str], Path]) -> None:
    """fp8 in the blocks, bfloat16 and float32 around them: what people merge by hand."""

    def mixed(weights: Weights) -> Weights:
        kinds = {"double": torch.float8_e4m3fn, "single": torch.float8_e5m2, "img_in": torch.bfloat16}
        return {name: tensor.to(kinds.get(name.partition("_blocks")[0].partition(".")[0], tensor.dtype))
                for name, tensor in weights.items()}  # fmt: skip

    checkpoint, _ = read_transformer(ModelSource(edited(mixed), folders("flux")))
    assert {info.dtype for info in checkpoint.tensors.values()} == {
        "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"
    }  # fmt: skip


# ----- scales -----

LAYER = "double_blocks.0.img_mlp.0"


def _quant(entry: bytes) -> Callable[[Weights], Weights]:
    text = torch.tensor(list(entry), dtype=torch.uint8)
    return lambda weights: {**new_scaled_fp8(weights), f"{LAYER}.comfy_quant": text}


def _old(**tensors: Tensor | None) -> Callable[[Weights], Weights]:
    changed = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    return lambda weights: {
        name: tensor for name, tensor in {**old_scaled_fp8(weights), **changed}.items() if tensor is not None
    }


def _new(**tensors: Tensor | None) -> Callable[[Weights], Weights]:
    changed = {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    return lambda weights: {
        name: tensor for name, tensor in {**new_scaled_fp8(weights), **changed}.items() if tensor is not None
    }


def _unmarked(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in old_scaled_fp8(weights).items() if name != "scaled_fp8"}


SCALES: dict[str, tuple[Callable[[Weights], Weights], tuple[str, ...]]] = {
    "old, missing": (_old(scale_weight=None), (f"{LAYER}.weight", "no scale_weight")),
    "old, a vector": (_old(scale_weight=torch.ones(256)), (f"{LAYER}.scale_weight", "[256]", "one floating-point")),
    "old, an integer": (_old(scale_weight=torch.ones(1, dtype=torch.int32)), (f"{LAYER}.scale_weight", "int32")),
    "old, of nothing": (_old(weight=None), ("belong to no weight", f"{LAYER}.scale_weight")),
    "old, no marker": (_unmarked, ("has scales", "scaled_fp8", "comfy_quant")),
    "new, missing": (_new(weight_scale=None), (f"{LAYER}.weight", "no weight_scale")),
    "new, a vector": (_new(weight_scale=torch.ones(256, 1)), (f"{LAYER}.weight_scale", "[256, 1]")),
    "new, no entry": (_new(comfy_quant=None), ("belong to no weight", f"{LAYER}.weight_scale")),
    "new, of nothing": (_new(weight=None), (LAYER,)),
    "new, 16 bits": (_new(weight=torch.zeros(256, 64, dtype=torch.bfloat16)), ("float8_e4m3fn", "bfloat16")),
    "nvfp4": (_quant(b'{"format": "nvfp4"}'), (LAYER, "nvfp4", "GGUF")),
    "mxfp8": (_quant(b'{"format": "mxfp8"}'), (LAYER, "mxfp8")),
    "int8": (_quant(b'{"format": "int8_tensorwise"}'), (LAYER, "int8_tensorwise")),
    "no format": (_quant(b"{}"), (LAYER, "None")),
    "a list for a format": (_quant(b'{"format": ["float8_e4m3fn"]}'), (LAYER, "float8_e4m3fn")),
    "no json": (_quant(b"\xff\x00garbage"), (f"{LAYER}.comfy_quant", "json")),
    "json of another kind": (_quant(b"[1]"), (f"{LAYER}.comfy_quant", "json")),
    "json without an end": (_quant(b"[" * 9000), (f"{LAYER}.comfy_quant", "json")),
    "json in floats": (_new(comfy_quant=torch.zeros(9)), (f"{LAYER}.comfy_quant", "json")),
}


@pytest.mark.parametrize("fault", SCALES)
def test_faulty_scales(edited: Callable[..., Path], folders: Callable[[str], Path], fault: str) -> None:
    edit, fragments = SCALES[fault]
    assert_refused(edited(edit), *fragments, config_from=folders("flux"))


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"layers": []}', '{"layers": {"a": 1}}'])
def test_faulty_metadata(edited: Callable[..., Path], folders: Callable[[str], Path], text: str) -> None:
    file = edited(lambda weights: weights, _quantization_metadata=text)
    assert_refused(file, "_quantization_metadata", config_from=folders("flux"))


# ----- files that are not what their name says -----


class Payload:
    """Would write a file if it were unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._target),)


STARTS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "nothing": (b"", ("0 bytes", "download")),
    "seven bytes": (b"\x01" * 7, ("7 bytes",)),
    "a page": (b"<!DOCTYPE html><html><body>Log in</body></html>", ("web page",)),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", ("git-lfs",)),
    "a zip": (b"PK\x03\x04" + bytes(100), ("pickled",)),
    "zeros": (bytes(1000), ("1000 bytes", "claims 0")),
    "gguf": (b"GGUF" + bytes(100), (".gguf",)),
    "a header too long": (struct.pack("<Q", 2**63) + b"{}" * 50, (str(2**63),)),
    "no json": (struct.pack("<Q", 20) + b"x" * 100, ("not json",)),
    "a list": (struct.pack("<Q", 2) + b"[]", ("not json",)),
    "deep json": (struct.pack("<Q", 90000) + b"[" * 90000, ("not json",)),
    "no text": (struct.pack("<Q", 20) + b"\xff" * 100, ("not json",)),
    "half a letter": (struct.pack("<Q", 13) + b'{"\\ud800": {}}'[:13] + b"}", ("not json",)),
    "no tensors": (struct.pack("<Q", 2) + b"{}", ("no tensors at all",)),
}


@pytest.mark.parametrize("start", STARTS)
def test_no_safetensors_file(tmp_path: Path, start: str) -> None:
    data, fragments = STARTS[start]
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    assert_refused(file, *fragments)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    for protocol in (2, 4):
        file = tmp_path / "model.safetensors"
        file.write_bytes(pickle.dumps({"x": Payload(tmp_path / "ran")}, protocol=protocol))
        assert_refused(file, "pickled")
    assert not (tmp_path / "ran").exists()


def entry(begin: Any, end: Any, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [1] if shape is None else shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "overlapping": ({"a": entry(0, 8, [2]), "b": entry(4, 8)}, ("'b'", "byte 4", "8")),
    "a hole": ({"a": entry(0, 4), "b": entry(8, 12)}, ("'b'", "byte 8")),
    "negative": ({"a": entry(-4, 0)}, ("'a'", "damaged")),
    "backwards": ({"a": entry(4, 0)}, ("'a'", "-4")),
    "a fraction": ({"a": entry(0, 4, [1.0])}, ("'a'", "damaged")),
    "words": ({"a": entry("0", "4")}, ("'a'", "damaged")),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, ("'a'", "damaged")),
    "a shape in words": ({"a": entry(0, 4, "")}, ("'a'", "damaged")),
    "a dtype of lists": ({"a": entry(0, 4, dtype=["F32"])}, ("'a'", "damaged")),
    "an unknown dtype": ({"a": entry(0, 4, dtype="F4")}, ("'a'", "F4", "BF16")),
    "no entry": ({"a": None}, ("'a'", "damaged")),
    "more numbers than bytes": ({"a": entry(0, 4, [2**40, 2**40])}, ("'a'", "claims")),
    "beyond the end": ({"a": entry(0, 4000, [1000])}, ("cut off", "missing")),
    "before the end": ({"a": entry(0, 4)}, ("12 bytes", "describes")),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry(0, 12, [3])}, ("__metadata__",)),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_faulty_header(tmp_path: Path, fault: str) -> None:
    header, fragments = HEADERS[fault]
    file = write_header(tmp_path / "model.safetensors", header, bytes(12))
    if fault == "before the end":
        fragments = fragments[1:]
    assert_refused(file, *fragments)


def test_a_file_cut_off(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    for layout in ("original", "gguf"):
        file = tmp_path / f"model.{'gguf' if layout == 'gguf' else 'safetensors'}"
        write_file(file, folders("flux"), family_of("flux"), layout)
        os.truncate(file, file.stat().st_size * 2 // 3)
        assert_refused(file, "cut off", "missing", config_from=folders("flux"))


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_a_link_that_leads_nowhere(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"model.{suffix}").symlink_to(tmp_path / "gone")
    assert_refused(tmp_path / f"model.{suffix}", "cannot be read")


def test_a_link_out_of_the_folder_is_followed(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    for layout in ("original", "gguf"):
        suffix = "gguf" if layout == "gguf" else "safetensors"
        (tmp_path / "link").mkdir(exist_ok=True)
        link = tmp_path / "link" / f"model.{suffix}"
        link.symlink_to(write_file(tmp_path / f"model.{suffix}", folders("flux"), family_of("flux"), layout))
        assert read_transformer(ModelSource(link, folders("flux")))[1].name == "flux"


def test_a_folder_with_a_suffix(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    assert_refused(tmp_path / "x.safetensors", "model_index.json")


# ----- GGUF -----


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf(
    num_tensors: int = 0, entries: bytes = b"", num_entries: int = 0, tensors: bytes = b"", version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + entries + tensors


def gguf_tensor(name: str, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


NESTED = _text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
ALIGNMENT = _text("general.alignment")
SHAPE = _text("comfy.gguf.orig_shape.a")
GGUFS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "nothing": (b"", ("no GGUF file",)),
    "magic alone": (b"GGUF", ("damaged GGUF",)),
    "safetensors": (struct.pack("<Q", 40) + b'{"a": {}}' + bytes(40), ("safetensors",)),
    "a page": (b"<html>" + bytes(100), ("web page",)),
    "version 1": (gguf(version=1), ("version 1", "2 or 3")),
    "big-endian": (gguf(version=3 << 24), ("little-endian",)),
    "10^9 tensors": (gguf(10**9), ("1000000000 tensors",)),
    "10^18 entries": (gguf(0, num_entries=10**18), ("entries",)),
    "an endless text": (gguf(num_entries=1, entries=struct.pack("<Q", 2**60)), ("a text of",)),
    "an endless array": (
        gguf(num_entries=1, entries=_text("a") + struct.pack("<IIQ", 9, 4, 2**60)), ("an array of",)
    ),
    "arrays in arrays": (gguf(num_entries=1, entries=NESTED), ("damaged GGUF",)),
    "an entry of no type": (gguf(num_entries=1, entries=_text("a") + struct.pack("<I", 99)), ("type 99",)),
    "a name that is no text": (gguf(num_entries=1, entries=struct.pack("<Q", 2) + b"\xff\xff"), ("damaged GGUF",)),
    "an alignment in words": (
        gguf(num_entries=1, entries=ALIGNMENT + struct.pack("<I", 8) + _text("x")), ("alignment", "'x'")
    ),
    "no alignment": (gguf(num_entries=1, entries=ALIGNMENT + struct.pack("<II", 4, 0)), ("alignment is 0",)),
    "a packing of tomorrow": (gguf(1, tensors=gguf_tensor("a", (32,), 77) + bytes(64)), ("'a'", "type 77", "Q4_K")),
    "an unread packing": (gguf(1, tensors=gguf_tensor("a", (256,), 16) + bytes(256)), ("IQ2_XXS", "Q4_K")),
    "half a block": (gguf(1, tensors=gguf_tensor("a", (40,), 8) + bytes(64)), ("'a'", "[40]", "32")),
    "a packed number": (gguf(1, tensors=gguf_tensor("a", (), 8) + bytes(64)), ("'a'", "32")),
    "too many dimensions": (gguf(1, tensors=gguf_tensor("a", (1,) * 9, 0) + bytes(64)), ("9 dimensions",)),
    "a name twice": (gguf(2, tensors=gguf_tensor("a", (4,), 0) * 2 + bytes(64)), ("same name",)),
    "overlapping": (
        gguf(2, tensors=gguf_tensor("a", (8,), 0) + gguf_tensor("b", (8,), 0, 16) + bytes(99)), ("'b'", "over another")
    ),
    "beyond the end": (gguf(1, tensors=gguf_tensor("a", (2**40, 2**40), 0)), ("cut off",)),
    "an original shape in words": (
        gguf(1, num_entries=1, entries=SHAPE + struct.pack("<I", 8) + _text("2x2"),
             tensors=gguf_tensor("a", (4,), 0) + bytes(64)), ("'a'", "2x2"),
    ),
    "a negative original shape": (
        gguf(1, num_entries=1, entries=SHAPE + struct.pack("<IIQii", 9, 5, 2, -2, -2),
             tensors=gguf_tensor("a", (4,), 0) + bytes(64)), ("'a'", "-2"),
    ),
    "a shape across blocks": (
        gguf(1, num_entries=1, entries=SHAPE + struct.pack("<IIQii", 9, 5, 2, 32, 2),
             tensors=gguf_tensor("a", (64,), 8) + bytes(128)), ("'a'", "[32, 2]"),
    ),
    "no tensors": (gguf(), ("no tensors at all",)),
    "a language model": (
        gguf(2, tensors=gguf_tensor("token_embd.weight", (4,), 0) + gguf_tensor("blk.0.attn_q.weight", (4,), 0, 32)
             + bytes(128)), ("language model",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", GGUFS)
def test_a_faulty_gguf_file(tmp_path: Path, fault: str) -> None:
    data, fragments = GGUFS[fault]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    started = time.monotonic()
    tracemalloc.start()
    try:
        assert_refused(file, *fragments)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5


def test_an_endless_header_is_not_read_to_its_end(tmp_path: Path) -> None:
    """A large file whose every byte reads as one more entry: the limit comes first."""
    file = tmp_path / "model.gguf"
    text = "x" * 999_000
    entries = (_text("k{}") + struct.pack("<I", 8) + _text(text)) * 60
    file.write_bytes(gguf(num_entries=60, entries=entries))
    assert_refused(file, "longer than")


# ----- config_from -----


def test_a_config_of_another_family(edited: Callable[..., Path], folders: Callable[[str], Path]) -> None:
    file = edited(lambda weights: weights)
    with pytest.raises(
        UserError, match="config_from 'qwen' holds a QwenImageTransformer2DModel, but 'm.safetensors' is a Flux"
    ):
        read_transformer(ModelSource(file, folders("qwen")))


def test_a_config_of_another_size(tmp_path: Path, edited: Callable[..., Path]) -> None:
    other = TINY_MODELS["flux"].write(tmp_path / "other", num_layers=1)
    assert_refused(edited(lambda weights: weights), "num_layers = 1", "2", "config_from", config_from=other)


def test_a_config_for_a_folder_that_has_one(folders: Callable[[str], Path]) -> None:
    assert_refused(folders("flux"), "config_from", config_from=folders("flux"))


def test_no_config_in_config_from(tmp_path: Path, edited: Callable[..., Path]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="'empty' has neither model_index.json nor config.json"):
        read_transformer(ModelSource(edited(lambda weights: weights), tmp_path / "empty"))


def test_names_say_nothing(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """The file's own name decides nothing: the tensors' names do."""
    for name, called in (("flux", "qwen_image_fp8.safetensors"), ("wan", "flux1-dev.safetensors"), ("qwen", "x.sft")):
        file = write_file(tmp_path / called, folders(name), family_of(name), "original")
        assert read_transformer(ModelSource(file, folders(name)))[1].name == family_of(name).name
