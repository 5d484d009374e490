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


# ----- files of something else -----

W = ("BF16", (8, 8))
"""Some weight: of foreign files only the names are looked at."""


def some(*names: str, tensor: tuple[str, tuple[int, ...]] = W) -> Tensors:
    return dict.fromkeys(names, tensor)


def flux(*more: str, without: tuple[str, ...] = (), tensor: tuple[str, tuple[int, ...]] = W) -> Tensors:
    kept = {name: info for name, info in wrong.original_tensors("flux").items() if not name.startswith(without or "-")}
    return kept | some(*more, tensor=tensor)


def wan(*more: str) -> Tensors:
    return wrong.original_tensors("wan") | some(*more)


FOREIGN: dict[str, tuple[Tensors, tuple[str, ...]]] = {
    "sd15-unet": (some("down_blocks.0.resnets.0.conv1.weight", "mid_block.attentions.0.proj_in.weight"), ("U-Net",)),
    "sdxl-checkpoint": (
        some("model.diffusion_model.input_blocks.1.0.in_layers.2.weight", "first_stage_model.decoder.conv_in.weight",
             "conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1.weight"),
        ("SDXL", "U-Net"),
    ),
    "sd3": (some("model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight"), ("Stable Diffusion 3",)),
    "sd35-diffusers": (
        some("pos_embed.pos_embed", "context_embedder.weight", "transformer_blocks.0.attn.norm_q.weight",
             "transformer_blocks.0.attn.norm_added_q.weight", "transformer_blocks.0.attn.to_q.weight"),
        ("Stable Diffusion 3",),
    ),
    "flux2": (
        flux("double_stream_modulation_img.lin.weight", "single_stream_modulation.lin.weight"),
        ("is FLUX.2", "Load Diffusion Model"),
    ),
    "flux2-diffusers": (
        wrong.diffusers_tensors("flux") | some("double_stream_modulation_img.linear.weight"), ("is FLUX.2",)
    ),
    "chroma": (flux("distilled_guidance_layer.layers.0.in_layer.weight"), ("is Chroma",)),
    "hunyuan-video": (
        flux("txt_in.individual_token_refiner.blocks.0.adaLN_modulation.1.weight", "img_in.proj.weight",
             without=("img_in", "txt_in")),
        ("HunyuanVideo",),
    ),
    "ltx": (some("model.diffusion_model.patchify_proj.weight", "model.diffusion_model.adaln_single.linear.weight"),
            ("LTX-Video",)),
    "z-image": (some("cap_embedder.0.weight", "noise_refiner.0.attention.qkv.weight", "layers.0.attention.qkv.weight"),
                ("Z-Image",)),
    "hidream": (some("double_stream_blocks.0.block.attn1.to_q.weight", "caption_projection.0.linear.weight"),
                ("HiDream",)),
    "llm": (some("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"),
            ("language model",)),
    "clip": (some("text_model.encoder.layers.0.self_attn.q_proj.weight"), ("CLIP text encoder",)),
    "t5": (some("encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"), ("T5",)),
    "lora-kohya": (
        some("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "lora_unet_double_blocks_0_img_attn_qkv.alpha"),
        ("a LoRA",),
    ),
    "lora-peft": (some("transformer.transformer_blocks.0.attn.to_q.lora_A.weight"), ("a LoRA",)),
    "lora-lokr": (some("lycoris_transformer_blocks_0_attn_to_q.lokr_w1"), ("a LoRA",)),
    "vae-ldm": (some("decoder.up.0.block.0.conv1.weight", "encoder.down.0.block.0.conv1.weight"), ("a VAE",)),
    "vae-wan": (some("decoder.middle.0.residual.0.gamma", "encoder.downsamples.0.residual.0.gamma"), ("Wan", "VAE")),
    "controlnet-sd": (some("control_model.input_hint_block.0.weight", "control_model.zero_convs.0.0.weight"),
                      ("a ControlNet",)),
    "controlnet-flux": (
        wrong.diffusers_tensors("flux") | some("controlnet_blocks.0.weight", "controlnet_x_embedder.weight"),
        ("a ControlNet for FLUX",),
    ),
    "controlnet-flux-xlabs": (
        flux("input_hint_block.0.weight", "controlnet_blocks.0.weight", without=("single_blocks",)),
        ("a ControlNet",),
    ),
    "wan-vace": (wan("vace_blocks.0.self_attn.q.weight", "vace_patch_embedding.weight"), ("Wan VACE",)),
    "wan-fun-control": (wan("ref_conv.weight"), ("Wan Fun Control",)),
    "wan-fun-camera": (wan("control_adapter.conv.weight"), ("Wan Fun Camera",)),
    "wan-animate": (wan("face_adapter.fuser_blocks.0.linear1_q.weight"), ("Wan Animate",)),
    "wan-s2v": (wan("casual_audio_encoder.encoder.conv1.weight"), ("Wan S2V",)),
    "wan21-fun-control": (
        wan() | {"patch_embedding.weight": ("BF16", (256, 48, 1, 2, 2))}, ("unknown kind", "in_channels 48")
    ),
    "qwen-layered": (
        wrong.diffusers_tensors("qwen-image") | some("time_text_embed.addition_t_embedding.weight"),
        ("Qwen-Image-Layered",),
    ),
    "nothing": ({}, ("no tensors",)),
    "unheard-of": (some("spaghetti.0.weight"), ("1 tensors such as 'spaghetti.0.weight'", "flux", "qwen-image", "wan")),
    "a-part": (flux(without=("img_in", "txt_in", "double_blocks.0")), ("flux",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_other_models_are_named(tmp_path: Path, name: str) -> None:
    tensors, fragments = FOREIGN[name]
    refused(wrong.write(tmp_path / f"{name}.safetensors", tensors), *fragments)


FOREIGN_GGUF: dict[str, tuple[Tensors, str, tuple[str, ...]]] = {
    "llm": (some("token_embd.weight", "blk.0.attn_q.weight"), "llama", ("language model",)),
    "t5": (some("enc.blk.0.attn_q.weight", "token_embd.weight"), "t5encoder", ("T5",)),
    "ltx": (some("patchify_proj.weight", "adaln_single.linear.weight"), "ltxv", ("LTX-Video",)),
}


@pytest.mark.parametrize("name", FOREIGN_GGUF)
def test_other_gguf_models_are_named(tmp_path: Path, name: str) -> None:
    tensors, architecture, fragments = FOREIGN_GGUF[name]
    refused(wrong.write_gguf(tmp_path / f"{name}.gguf", tensors, architecture=architecture), *fragments)


def test_a_language_model_in_blocks_that_no_one_reads_here(tmp_path: Path) -> None:
    tensors = {"blocks.0.attn_q.weight": ("BF16", (256, 256))}
    file = wrong.write_gguf(tmp_path / "m.gguf", tensors, kind="IQ2_XXS", architecture="llama")
    refused(file, "IQ2_XXS", "Q4_K", "'llama'")


# ----- quantisations that are not read -----

NF4 = "double_blocks.0.img_mod.lin.weight"
QUANTISED: dict[str, tuple[Tensors, tuple[str, ...]]] = {
    "svdquant": (
        {"x_embedder.weight": W, "context_embedder.weight": W}
        | some("transformer_blocks.0.qkv_proj.qweight", "transformer_blocks.0.qkv_proj.smooth_factor",
               "transformer_blocks.0.qkv_proj.wscales", "transformer_blocks.0.norm_q.weight"),
        ("SVDQuant", "GGUF"),
    ),
    "bitsandbytes": (
        flux(f"{NF4}.absmax", f"{NF4}.quant_map", f"{NF4}.quant_state.bitsandbytes__nf4", tensor=("U8", (64, 1))),
        ("bitsandbytes", "fp8", "GGUF"),
    ),
    "gptq": (
        wrong.diffusers_tensors("qwen-image")
        | some("transformer_blocks.0.attn.to_q.qweight", "transformer_blocks.0.attn.to_q.qzeros", tensor=("I32", (8,))),
        ("GPTQ",),
    ),
    "quanto": (
        {f"{name}._data" if name.endswith(".weight") and len(shape) == 2 else name: (dtype, shape)
         for name, (dtype, shape) in wrong.diffusers_tensors("flux").items()},
        ("quanto",),
    ),
    "compressed-tensors": (
        wrong.diffusers_tensors("wan") | some("blocks.0.attn1.to_q.weight_packed"), ("compressed-tensors",)
    ),
    "block-fp8": (
        wrong.original_tensors("wan", "F8_E4M3") | some("blocks.0.ffn.0.weight_scale_inv"), ("scale per block",)
    ),
    "int8": (wrong.original_tensors("flux", "I8"), ("int8", "fp8_e4m3fn")),
    "uint8": (wrong.diffusers_tensors("qwen-image", "U8"), ("uint8", "8 bits")),
    "int64-among-others": (flux() | {"img_in.weight": ("I64", (256, 64))}, ("img_in.weight", "int64")),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_quantisations_that_are_not_read_are_named(tmp_path: Path, name: str) -> None:
    tensors, fragments = QUANTISED[name]
    refused(wrong.write(tmp_path / f"{name}.safetensors", tensors), *fragments)


# ----- scales -----

KEY = "double_blocks.1.img_mlp.0"


def old(**changes: tuple[str, tuple[int, ...]] | None) -> Tensors:
    return _changed(wrong.scaled(wrong.original_tensors("flux"), new=False), changes)


def new(**changes: tuple[str, tuple[int, ...]] | None) -> Tensors:
    return _changed(wrong.scaled(wrong.original_tensors("flux"), new=True), changes)


def _changed(tensors: Tensors, changes: dict[str, tuple[str, tuple[int, ...]] | None]) -> Tensors:
    found: Tensors = {**tensors}
    for name, info in changes.items():
        key = name if name == "scaled_fp8" or "." in name else f"{KEY}.{name}"
        if info is None:
            del found[key]
        else:
            found[key] = info
    return found


SCALES: dict[str, tuple[Tensors, tuple[str, ...]]] = {
    "old-scale-missing": (old(scale_weight=None), (f"{KEY}.weight", "no scale_weight")),
    "new-scale-missing": (new(weight_scale=None), (f"{KEY}.weight", "no weight_scale")),
    "marker-missing": (old(scaled_fp8=None), ("scale_weight", "scaled_fp8", "comfy_quant")),
    "new-without-entries": (
        {name: info for name, info in new().items() if not name.endswith("comfy_quant")},
        ("weight_scale", "comfy_quant"),
    ),
    "one-entry-missing": (new(comfy_quant=None), ("belong to no weight", f"{KEY}.weight_scale")),
    "old-stray": (old(**{"double_blocks.9.lin.scale_weight": ("F32", ())}), ("belong to no", "double_blocks.9.lin")),
    "new-stray": (new(**{"double_blocks.9.lin.weight_scale": ("F32", ())}), ("belong to no", "double_blocks.9.lin")),
    "entry-without-weight": (
        new(**{"double_blocks.9.lin.comfy_quant": ("U8", (len(wrong.QUANT),))}),
        ("without weights", "double_blocks.9.lin"),
    ),
    "old-per-row": (old(scale_weight=("F32", (1024, 1))), (f"{KEY}.scale_weight", "[1024, 1]", "one floating-point")),
    "new-per-row": (new(weight_scale=("F32", (1024, 1))), (f"{KEY}.weight_scale", "[1024, 1]", "one floating-point")),
    "empty-scale": (new(weight_scale=("F32", (0,))), (f"{KEY}.weight_scale", "[0]")),
    "integer-scale": (old(scale_weight=("I32", ())), (f"{KEY}.scale_weight", "int32")),
    "said-fp8-is-bf16": (new(weight=("BF16", (1024, 256))), (f"{KEY}.weight", "float8_e4m3fn", "bfloat16")),
    "said-e4m3-is-e5m2": (new(weight=("F8_E5M2", (1024, 256))), (f"{KEY}.weight", "float8_e4m3fn", "float8_e5m2")),
    "nvfp4-scales": (new(weight_scale_2=("F32", ())), ("nvfp4",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALES)
def test_scales_that_do_not_fit(tmp_path: Path, name: str) -> None:
    tensors, fragments = SCALES[name]
    refused(wrong.write(tmp_path / f"{name}.safetensors", tensors), *fragments)


ENTRIES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "nvfp4": (b'{"format": "nvfp4"}', ("quantised as nvfp4", "GGUF")),
    "mxfp8": (b'{"format": "mxfp8"}', ("quantised as mxfp8",)),
    "int8": (b'{"format": "int8_tensorwise"}', ("quantised as int8_tensorwise",)),
    "no-format": (b'{"bits": 8}', ("quantised as None",)),
    "format-is-a-list": (b'{"format": ["float8_e4m3fn"]}', ("quantised as ['float8_e4m3fn']",)),
    "a-list": (b"[1, 2]", ("not a json object",)),
    "garbage": (b'{"format": \xff\xfe', ("not a json object",)),
    "not-json": (b"float8_e4m3fn", ("not a json object",)),
    "deep": (b"[" * 5000, ("not a json object",)),
    "long": (b" " * 70_000, ("not a json object",)),
    "empty": (b"", ("not a json object",)),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("where", ["tensor", "metadata"])
def test_quantisation_entries_that_are_not_known(tmp_path: Path, name: str, where: str) -> None:
    text, fragments = ENTRIES[name]
    file = tmp_path / f"{name}.safetensors"
    if where == "tensor":
        tensors = new(comfy_quant=("U8", (len(text),)))
        refused(wrong.write(file, tensors, contents={f"{KEY}.comfy_quant": text}), *fragments)
        return
    tensors = {name: info for name, info in new().items() if not name.endswith("comfy_quant")}
    entry = text.decode("utf-8", errors="replace")
    layers = "{" + f'"layers": {{"{KEY}": {entry}}}' + "}"
    fragments = fragments if entry.startswith('{"') and entry.endswith("}") else ("_quantization_metadata",)
    refused(wrong.write(file, tensors, metadata={"_quantization_metadata": layers}), *fragments)


@pytest.mark.parametrize("text", ["[]", '{"layers": []}', '{"layers": {"double_blocks.0": 3}}', "\x00", '"layers"'])
def test_quantisation_metadata_of_another_make(tmp_path: Path, text: str) -> None:
    file = wrong.write(tmp_path / "m.safetensors", flux(), metadata={"_quantization_metadata": text})
    refused(file, "_quantization_metadata", "table of layers" if text.startswith('{"') else "json object")


# ----- dtypes side by side -----


def test_dtypes_that_may_stand_side_by_side(tmp_path: Path) -> None:
    dtypes = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F64")
    plain = wrong.original_tensors("wan")
    mixed = {name: (dtypes[i % len(dtypes)], shape) for i, (name, (_, shape)) in enumerate(plain.items())}
    assert {info.dtype for info in read(wrong.write(tmp_path / "m.safetensors", mixed)).tensors.values()} == {
        "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64"
    }  # fmt: skip


def test_fp8_without_a_scale_among_scaled_ones(tmp_path: Path) -> None:
    tensors = old(**{"img_in.weight": ("F8_E4M3", (256, 64))})
    refused(wrong.write(tmp_path / "m.safetensors", tensors), "img_in.weight", "no scale_weight")
