"""Wan 2.1 and 2.2 (text to video, image to video, the 5B model, both experts of 2.2): video tokens that attend to text.

The seam is ComfyUI's `WanModel.forward_orig`: padding, rotary positions, concatenated channels and per-frame times need
no weight and stay ComfyUI's. Here are the declarations and ComfyUI's side; `wan_rank` has the rank's side, `wan_shapes`
the weights. Knows no process and no node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from ..plan import ParallelPlan
from .base import ComfySide, Config, Family, SeamCall
from .common import first_output, refuse_uneven
from .wan_files import WAN_FILES
from .wan_rank import prepare, set_up
from .wan_shapes import expected_shapes, inner_dim, out_channels

_PATCH = (1, 2, 2)

_DEFAULTS: dict[str, Any] = {
    "patch_size": _PATCH,
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}

_COMFY_CLASSES = {
    (16, 16, False): "comfy.supported_models:WAN21_T2V",  # 2.1 and both experts of 2.2 T2V
    (36, 16, True): "comfy.supported_models:WAN21_I2V",  # 2.1 I2V and first-last-frame
    (36, 16, False): "comfy.supported_models:WAN21_T2V",  # both experts of 2.2 I2V, whose image is in the channels
    (48, 48, False): "comfy.supported_models:WAN22_T2V",  # 2.2 TI2V 5B
}
"""(channels in, channels out, whether an image encoder's output is read) -> ComfyUI's class."""


def _num_heads(config: Config) -> int:
    return int(config["num_attention_heads"])


def _tensor_units(config: Config) -> int:
    """Heads and feed-forward are both sliced, and neither width is a multiple of the other (40 heads, 13824)."""
    return math.gcd(_num_heads(config), int(config["ffn_dim"]))


def _check_plan(config: Config, plan: ParallelPlan) -> None:
    sliced = f"{_num_heads(config)} attention heads and {config['ffn_dim']} feed-forward channels"
    refuse_uneven(sliced, _tensor_units(config), plan.tensor)


def _check_config(config: Config) -> None:
    _config_class(config)


def _segment_lengths(config: Config, call: SeamCall) -> dict[str, int]:
    return {"hidden_states": call.shared["rope"].shape[0]}


def _activation_bytes(config: Config, call: SeamCall, element_size: int) -> int:
    """The widest point is a block's self-attention (residual, input, q, k, v, turned q and k, parts in float32) or its
    feed-forward (the hidden layer before and after its GELU). Times per frame are held per token, in both dtypes."""
    tokens, width = call.shared["rope"].shape[0], inner_dim(config)
    attention = width * (8 * element_size + 12)
    feed_forward = width * (5 * element_size + 4) + 2 * int(config["ffn_dim"]) * element_size
    modulation = width * (6 * element_size + 28) if call.rows["times"].ndim == 2 else 0
    return tokens * (max(attention, feed_forward) + modulation)


# -- ComfyUI's side ----------------------------------------------------------------------------------------------------


def _config_class(config: Config) -> str:
    """ComfyUI's class; `UserError` for a variant that is not supported."""
    reads_image = config.get("image_dim") is not None
    found = _COMFY_CLASSES.get((int(config["in_channels"]), out_channels(config), reads_image))
    added = config.get("added_kv_proj_dim")
    if found is None or tuple(config["patch_size"]) != _PATCH or added != (inner_dim(config) if reads_image else None):
        names = ("in_channels", "out_channels", "image_dim", "added_kv_proj_dim", "patch_size")
        raise UserError(
            f"This Wan model is of an unknown kind: {', '.join(f'{name} {config.get(name)}' for name in names)}. "
            "Supported: text to video (16 channels in, 16 out), image to video (36 in, 16 out; Wan 2.1 with image_dim) "
            "and the 5B model (48 in, 48 out), with patches of 1 x 2 x 2. Use ComfyUI's own Load Diffusion Model."
        )
    return found


def _unet_config(config: Config) -> dict[str, Any]:
    """Arguments of ComfyUI's WanModel for a diffusers config."""
    return {
        "image_model": "wan2.1",
        "model_type": "t2v" if config.get("image_dim") is None else "i2v",
        "patch_size": _PATCH,
        "in_dim": int(config["in_channels"]),
        "out_dim": out_channels(config),
        "dim": inner_dim(config),
        "ffn_dim": int(config["ffn_dim"]),
        "freq_dim": int(config["freq_dim"]),
        "text_dim": int(config["text_dim"]),
        "num_heads": _num_heads(config),
        "num_layers": int(config["num_layers"]),
        "cross_attn_norm": bool(config["cross_attn_norm"]),
        "eps": float(config["eps"]),
        "flf_pos_embed_token_number": config.get("pos_embed_seq_len"),
    }


def _call(model: Any, arguments: Mapping[str, Any], config: Config) -> SeamCall:
    """From `forward_orig`'s arguments: x [B, C, T, H, W] in whole patches, t [B] or [B, T], context [B, L, D],
    clip_fea [B, I, C], freqs [1, tokens, 1, half a head, 2, 2] (rotations).

    Without an image encoder in the model ComfyUI leaves clip_fea out too; so it does denoise_mask, whose part in the
    times is already in t.
    """
    rows = {"x": arguments["x"], "times": arguments["t"], "context": arguments["context"]}
    clip = arguments.get("clip_fea")
    if clip is not None and config.get("image_dim") is not None:
        rows["clip_fea"] = clip
    cos_and_sin = arguments["freqs"][0, :, 0, :, :, 0]
    return SeamCall(rows=rows, shared={"rope": cos_and_sin.float().contiguous()})


def _check_conditioning(cond: Mapping[str, Any], config: Config) -> None:
    text, width = cond.get("cross_attn"), int(config["text_dim"])
    if text is None or text.ndim != 3 or text.shape[-1] != width:
        shape = "none" if text is None else list(text.shape)
        raise UserError(
            f"The conditioning's text has shape {shape}; this Wan model expects [batch, tokens, {width}]. "
            "It was made by the text encoder of another model family: use the encoder that belongs to this model."
        )
    clip, channels = cond.get("clip_vision_output"), config.get("image_dim")
    if clip is not None and channels is not None and clip.penultimate_hidden_states.shape[-1] != channels:
        raise UserError(
            f"The conditioning's clip_vision_output has {clip.penultimate_hidden_states.shape[-1]} channels; this Wan "
            f"model expects {channels}. Use the CLIP vision model that belongs to it (for Wan 2.1: CLIP ViT-H)."
        )


FAMILY = Family(
    name="wan",
    transformer="diffusers:WanTransformer3DModel",
    defaults=_DEFAULTS,
    expected_shapes=expected_shapes,
    num_heads=_num_heads,
    check_config=_check_config,
    check_plan=_check_plan,
    activation_bytes=_activation_bytes,
    comfy=ComfySide(
        config_class=_config_class,
        unet_config=_unet_config,
        params_class="comfy.ldm.wan.model:WanModel",
        seam="forward_orig",
        arguments=frozenset({"x", "t", "context", "clip_fea", "freqs", "transformer_options", "denoise_mask"}),
        call=_call,
        conditioning=frozenset(
            {"pooled_output", "clip_vision_output", "concat_latent_image", "concat_mask", "time_dim_concat"}
        ),
        check_conditioning=_check_conditioning,
    ),
    files=WAN_FILES,
    prepare=prepare,
    finish=first_output,
    on_loaded=set_up,
    cp_segments=("hidden_states",),
    segment_lengths=_segment_lengths,
    cp_sometimes=("timestep",),  # one per token where frames have times of their own
    tp_plan={
        "blocks.*.attn*.to_q": "colwise",
        "blocks.*.attn*.to_k": "colwise",
        "blocks.*.attn*.to_v": "colwise",
        "blocks.*.attn*.to_out.0": "rowwise",
        "blocks.*.attn2.add_k_proj": "colwise",
        "blocks.*.attn2.add_v_proj": "colwise",
        "blocks.*.ffn.net.0.proj": "colwise",
        "blocks.*.ffn.net.2": "rowwise",
    },
    tp_units=_tensor_units,
    tp_norms=("blocks.*.attn*.norm_q", "blocks.*.attn*.norm_k", "blocks.*.attn2.norm_added_k"),
    tp_heads=("blocks.*.attn1", "blocks.*.attn2"),
    fp32_weights=(
        "patch_embedding.*",
        "condition_embedder.time_embedder.*",
        "condition_embedder.image_embedder.norm*",
        "blocks.*.norm2.*",
        "*scale_shift_table",
    ),
    unused_weights=("blocks.*.attn2.norm_added_q.weight",),  # the first I2V folders have it; no model reads it
)  # fmt: skip
