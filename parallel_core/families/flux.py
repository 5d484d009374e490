"""FLUX.1 (dev, schnell, Krea, Kontext and their fine-tunes): joint attention over text and packed image tokens.

The seam is ComfyUI's `Flux.forward_orig`: all that comes before it (patches, position ids, reference latents) needs no
weight and stays ComfyUI's. Knows no process and no node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UserError
from ..plan import ParallelPlan
from .base import ComfySide, Config, Family, SeamCall
from .common import first_output, joint_lengths, linear, refuse_uneven
from .flux_files import FLUX_FILES

_PATCH = 2
_TIME_CHANNELS = 256

_DEFAULTS: dict[str, Any] = {
    "in_channels": 64,
    "out_channels": None,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}


def inner_dim(config: Config) -> int:
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"])


def _num_heads(config: Config) -> int:
    return int(config["num_attention_heads"])


def _out_channels(config: Config) -> int:
    return int(config.get("out_channels") or config["in_channels"])


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of diffusers' FluxTransformer2DModel."""
    inner = inner_dim(config)
    shapes = {
        **linear("x_embedder", inner, int(config["in_channels"])),
        **linear("context_embedder", inner, int(config["joint_attention_dim"])),
        **linear("norm_out.linear", 2 * inner, inner),
        **linear("proj_out", _out_channels(config), inner),
    }
    embedders = {"timestep_embedder": _TIME_CHANNELS, "text_embedder": int(config["pooled_projection_dim"])}
    if config.get("guidance_embeds"):
        embedders["guidance_embedder"] = _TIME_CHANNELS
    for name, channels in embedders.items():
        shapes |= linear(f"time_text_embed.{name}.linear_1", inner, channels)
        shapes |= linear(f"time_text_embed.{name}.linear_2", inner, inner)
    for index in range(int(config["num_layers"])):
        shapes |= _double_block_shapes(f"transformer_blocks.{index}", config)
    for index in range(int(config["num_single_layers"])):
        shapes |= _single_block_shapes(f"single_transformer_blocks.{index}", config)
    return shapes


def _double_block_shapes(block: str, config: Config) -> dict[str, tuple[int, ...]]:
    inner, head = inner_dim(config), (int(config["attention_head_dim"]),)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("norm1.linear", "norm1_context.linear"):
        shapes |= linear(f"{block}.{name}", 6 * inner, inner)
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
        shapes |= linear(f"{block}.attn.{name}", inner, inner)
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        shapes[f"{block}.attn.{name}.weight"] = head
    for name in ("ff", "ff_context"):
        shapes |= linear(f"{block}.{name}.net.0.proj", 4 * inner, inner)
        shapes |= linear(f"{block}.{name}.net.2", inner, 4 * inner)
    return shapes


def _single_block_shapes(block: str, config: Config) -> dict[str, tuple[int, ...]]:
    inner, head = inner_dim(config), (int(config["attention_head_dim"]),)
    shapes = {
        **linear(f"{block}.norm.linear", 3 * inner, inner),
        **linear(f"{block}.proj_mlp", 4 * inner, inner),
        **linear(f"{block}.proj_out", inner, 5 * inner),
    }
    for name in ("to_q", "to_k", "to_v"):
        shapes |= linear(f"{block}.attn.{name}", inner, inner)
    for name in ("norm_q", "norm_k"):
        shapes[f"{block}.attn.{name}.weight"] = head
    return shapes


def _check_plan(config: Config, plan: ParallelPlan) -> None:
    heads = _num_heads(config)
    refuse_uneven(f"{heads} attention heads", heads, plan.tensor)


def _activation_bytes(config: Config, call: SeamCall, element_size: int) -> int:
    """The widest point is a single block: its input, q, k, v, the 4x MLP and their concatenation, about 16 widths."""
    tokens = call.rows["img"].shape[1] + call.rows["txt"].shape[1]
    return 16 * tokens * inner_dim(config) * element_size


# -- ComfyUI's side ----------------------------------------------------------------------------------------------------


def _config_class(config: Config) -> str:
    return "comfy.supported_models:Flux" if config.get("guidance_embeds") else "comfy.supported_models:FluxSchnell"


def _unet_config(config: Config) -> dict[str, Any]:
    """Arguments of ComfyUI's FluxParams for a diffusers config."""
    return {
        "image_model": "flux",
        "in_channels": int(config["in_channels"]) // _PATCH**2,
        "out_channels": _out_channels(config) // _PATCH**2,
        "vec_in_dim": int(config["pooled_projection_dim"]),
        "context_in_dim": int(config["joint_attention_dim"]),
        "hidden_size": inner_dim(config),
        "mlp_ratio": 4.0,
        "num_heads": _num_heads(config),
        "depth": int(config["num_layers"]),
        "depth_single_blocks": int(config["num_single_layers"]),
        "axes_dim": list(config["axes_dims_rope"]),
        "theta": 10000,
        "patch_size": _PATCH,
        "qkv_bias": True,
        "guidance_embed": bool(config.get("guidance_embeds")),
        "txt_ids_dims": [],  # a field of newer versions of ComfyUI only
    }


def _call(model: Any, arguments: Mapping[str, Any], config: Config) -> SeamCall:
    """From `forward_orig`'s arguments: img [B, L, C], txt [B, T, D], ids [B, L|T, 3], timesteps [B], y [B, P]."""
    img, txt = arguments["img"], arguments["txt"]
    rows = {"img": img, "txt": txt, "timesteps": arguments["timesteps"]}
    pooled = arguments.get("y")
    channels = int(config["pooled_projection_dim"])
    rows["y"] = img.new_zeros(img.shape[0], channels) if pooled is None else pooled[:, :channels]
    guidance = arguments.get("guidance")
    if guidance is not None and config.get("guidance_embeds"):
        rows["guidance"] = guidance.expand(img.shape[0]) if guidance.shape[0] == 1 else guidance
    shared = {}
    for name in ("img_ids", "txt_ids"):
        ids = arguments[name]
        if not torch.equal(ids, ids[:1].expand_as(ids)):
            raise UserError(f"The rows of one Flux batch have different {name}; expected the same positions in each.")
        shared[name] = ids[0]
    return SeamCall(rows=rows, shared=shared)


def _check_conditioning(cond: Mapping[str, Any], config: Config) -> None:
    text, pooled = cond.get("cross_attn"), cond.get("pooled_output")
    width, channels = int(config["joint_attention_dim"]), int(config["pooled_projection_dim"])
    if text is None or text.ndim != 3 or text.shape[-1] != width:
        shape = "none" if text is None else list(text.shape)
        raise UserError(
            f"The conditioning's text has shape {shape}; this Flux model expects [batch, tokens, {width}]. "
            "It was made by the text encoder of another model family: use the encoders that belong to this model."
        )
    if "pooled_output" not in cond:
        raise UserError(
            "The conditioning has no pooled_output, which Flux needs: encode the prompt with Flux's CLIP-L."
        )
    if pooled is not None and pooled.shape[-1] < channels:
        raise UserError(
            f"The conditioning's pooled_output has {pooled.shape[-1]} channels; this Flux model expects {channels}. "
            "It was made by the text encoder of another model family."
        )


# -- the rank's side ---------------------------------------------------------------------------------------------------


def _prepare(rows: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments of FluxTransformer2DModel.forward. Times stay float32: see `_embed_times_as_comfyui`."""
    return {
        "hidden_states": rows["img"],
        "encoder_hidden_states": rows["txt"],
        "pooled_projections": rows["y"],
        "timestep": rows["timesteps"].float(),
        "guidance": rows.get("guidance"),
        "img_ids": shared["img_ids"],
        "txt_ids": shared["txt_ids"],
        "return_dict": False,
    }


def _embed_times_as_comfyui(model: torch.nn.Module) -> None:
    """Makes the embeddings of time and guidance start from the values that ComfyUI's own model starts from.

    diffusers rounds the timestep to the model's dtype before it multiplies by 1000 (bfloat16: 0.9873 becomes 988),
    which shifts the whole picture; ComfyUI keeps it in float32. Guidance comes in the model's dtype in both and is
    multiplied there (bfloat16: 3.5 becomes 3504). diffusers also has no way to leave guidance out, which
    FluxDisableGuidance asks for.
    """
    times: dict[str, torch.Tensor | None] = {}
    embed: Any = model.time_text_embed

    def remember(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        times.update(timestep=kwargs["timestep"], guidance=kwargs["guidance"])

    def forward(*args: torch.Tensor) -> torch.Tensor:
        pooled, timestep, guidance = args[-1], times["timestep"], times["guidance"]
        assert timestep is not None
        embedding = embed.timestep_embedder(embed.time_proj(timestep * 1000).to(pooled.dtype))
        if guidance is not None:
            embedding = embedding + embed.guidance_embedder(embed.time_proj(guidance * 1000).to(pooled.dtype))
        result: torch.Tensor = embedding + embed.text_embedder(pooled)
        return result

    model.register_forward_pre_hook(remember, with_kwargs=True)
    embed.forward = forward


FAMILY = Family(
    name="flux",
    transformer="diffusers:FluxTransformer2DModel",
    defaults=_DEFAULTS,
    expected_shapes=expected_shapes,
    num_heads=_num_heads,
    check_plan=_check_plan,
    activation_bytes=_activation_bytes,
    comfy=ComfySide(
        config_class=_config_class,
        unet_config=_unet_config,
        params_class="comfy.ldm.flux.model:FluxParams",
        seam="forward_orig",
        arguments=frozenset(
            {"img", "img_ids", "txt", "txt_ids", "timesteps", "y", "guidance", "transformer_options"}
        ),
        call=_call,
        conditioning=frozenset(
            {
                "pooled_output", "guidance", "reference_latents", "reference_latents_method",
                "concat_latent_image", "concat_mask", "denoise_mask", "noise_mask",
            }
        ),
        check_conditioning=_check_conditioning,
    ),
    files=FLUX_FILES,
    prepare=_prepare,
    finish=first_output,
    on_loaded=_embed_times_as_comfyui,
    segment_lengths=joint_lengths,
    cp_segments=("encoder_hidden_states", "hidden_states"),
    tp_replicated_output=(
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "single_transformer_blocks.*.norm.linear",
        "norm_out.linear",
    ),
)  # fmt: skip
