"""Qwen-Image and Qwen-Image-Edit (also 2509, and 2511 where ComfyUI has it): joint attention over text and patches.

Owns the weights' names and shapes, what this family does not run, and how the diffusers model is made to start from
ComfyUI's positions and times. What happens on ComfyUI's side is in qwen_comfy.py. Knows no process and no node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UserError
from ..plan import ParallelPlan
from .base import Config, Family, SeamCall
from .common import first_output, joint_lengths, linear, refuse_uneven
from .qwen_comfy import COMFY_SIDE, LATENT_CHANNELS, PATCH
from .qwen_files import QWEN_FILES

_TIME_CHANNELS = 256
_THETA = 10000.0

_DEFAULTS: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
    "zero_cond_t": False,
    "use_additional_t_cond": False,
    "use_layer3d_rope": False,
}

_FIXED = {
    "patch_size": PATCH,
    "in_channels": PATCH**2 * LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "guidance_embeds": False,
    "use_additional_t_cond": False,
    "use_layer3d_rope": False,
}
"""Config fields whose other values make another model: of another VAE, distilled with guidance, Qwen-Image-Layered."""


def _inner_dim(config: Config) -> int:
    return int(config["num_attention_heads"]) * int(config["attention_head_dim"])


def _num_heads(config: Config) -> int:
    return int(config["num_attention_heads"])


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of diffusers' QwenImageTransformer2DModel."""
    inner, text = _inner_dim(config), int(config["joint_attention_dim"])
    shapes = {
        "txt_norm.weight": (text,),
        **linear("txt_in", inner, text),
        **linear("img_in", inner, int(config["in_channels"])),
        **linear("time_text_embed.timestep_embedder.linear_1", inner, _TIME_CHANNELS),
        **linear("time_text_embed.timestep_embedder.linear_2", inner, inner),
        **linear("norm_out.linear", 2 * inner, inner),
        **linear("proj_out", int(config["patch_size"]) ** 2 * int(config["out_channels"]), inner),
    }
    for index in range(int(config["num_layers"])):
        shapes |= _block_shapes(f"transformer_blocks.{index}", config)
    return shapes


def _block_shapes(block: str, config: Config) -> dict[str, tuple[int, ...]]:
    inner, head = _inner_dim(config), (int(config["attention_head_dim"]),)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
        shapes |= linear(f"{block}.attn.{name}", inner, inner)
    for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        shapes[f"{block}.attn.{name}.weight"] = head
    for stream in ("img", "txt"):
        shapes |= linear(f"{block}.{stream}_mod.1", 6 * inner, inner)
        shapes |= linear(f"{block}.{stream}_mlp.net.0.proj", 4 * inner, inner)
        shapes |= linear(f"{block}.{stream}_mlp.net.2", inner, 4 * inner)
    return shapes


def _check_config(config: Config) -> None:
    for name, value in _FIXED.items():
        if config[name] != value:
            raise UserError(
                f"The model's config has {name} = {config[name]!r}; of QwenImageTransformer2DModel only models with "
                f"{name} = {value!r} run here: Qwen-Image, Qwen-Image-Edit and their fine-tunes. "
                "Use ComfyUI's own Load Diffusion Model for this one."
            )


def _check_plan(config: Config, plan: ParallelPlan) -> None:
    heads = _num_heads(config)
    refuse_uneven(f"{heads} attention heads", heads, plan.tensor)


def _activation_bytes(config: Config, call: SeamCall, element_size: int) -> int:
    """The widest point is a block's attention: 14.4 widths of a token were measured, 16.5 with references at time zero
    (every token then has a modulation of its own)."""
    tokens = call.rows["img"].shape[1] + call.rows["txt"].shape[1]
    return 20 * tokens * _inner_dim(config) * element_size


# -- the rank's side ---------------------------------------------------------------------------------------------------


def _prepare(rows: Mapping[str, torch.Tensor], shared: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments of QwenImageTransformer2DModel.forward, and the positions, which `_follow_comfyui` takes out again.

    img_shapes tells diffusers only how many tokens each image has, and so which of them are references whose time is
    zero: the positions say the rest. Times stay float32.
    """
    images = [shared[name] for name in ("img_ids", "clean_ids") if name in shared]
    return {
        "hidden_states": rows["img"],
        "encoder_hidden_states": rows["txt"],
        "encoder_hidden_states_mask": rows.get("txt_mask"),
        "timestep": rows["timesteps"].float(),
        "img_shapes": [[(1, 1, ids.shape[0]) for ids in images]] * rows["img"].shape[0],
        "img_ids": torch.cat(images),
        "txt_ids": shared["txt_ids"],
        "return_dict": False,
    }


def _follow_comfyui(model: torch.nn.Module) -> None:
    """Makes the model start from the positions and times that ComfyUI's own model starts from.

    Positions: ComfyUI starts the text behind the target image alone, diffusers behind the largest of all images, and
    ComfyUI's methods of placing references have no counterpart in diffusers. Times: diffusers rounds them to the
    model's dtype before it multiplies by 1000 (bfloat16: 0.9873 becomes 988), ComfyUI keeps them in float32. Whether
    references count as free of noise (`zero_cond_t`) is a part of ComfyUI's method, so it changes from call to call.
    """
    given: dict[str, torch.Tensor] = {}
    embedder: Any = model.time_text_embed
    positions: Any = model.pos_embed
    axes = tuple(positions.axes_dim)

    def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given.update(timestep=kwargs["timestep"], img_ids=kwargs.pop("img_ids"), txt_ids=kwargs.pop("txt_ids"))
        references_are_clean = len(kwargs["img_shapes"][0]) > 1
        for part in (module, *module.transformer_blocks):
            part.zero_cond_t = references_are_clean
        return args, kwargs

    def embed_times(timestep: torch.Tensor, hidden_states: torch.Tensor, *unused: None) -> torch.Tensor:
        """`timestep` has one row more for each row of the batch where references are clean, and theirs is zero."""
        times = given["timestep"].to(hidden_states.device)
        times = torch.nn.functional.pad(times, (0, timestep.shape[0] - times.shape[0]))
        embedding: torch.Tensor = embedder.timestep_embedder(embedder.time_proj(times).to(hidden_states.dtype))
        return embedding

    def embed_positions(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _rotations(given["img_ids"], axes), _rotations(given["txt_ids"], axes)

    model.register_forward_pre_hook(take, with_kwargs=True)
    embedder.forward = embed_times
    positions.forward = embed_positions


def _rotations(ids: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Positions [L, 3] -> unit complex numbers [L, sum(axes) / 2], angle position * theta ** (-2 i / axis).

    The rotary embedding of RoFormer (https://arxiv.org/abs/2104.09864), one axis after the other; the angles in
    float64, as ComfyUI computes them.
    """
    angles = []
    for position, size in zip(ids.double().unbind(-1), axes, strict=True):
        exponents = torch.arange(0, size, 2, dtype=torch.float64, device=ids.device) / size
        angles.append(torch.outer(position, _THETA**-exponents))
    angle = torch.cat(angles, dim=-1)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


FAMILY = Family(
    name="qwen-image",
    transformer="diffusers:QwenImageTransformer2DModel",
    defaults=_DEFAULTS,
    expected_shapes=expected_shapes,
    num_heads=_num_heads,
    check_config=_check_config,
    check_plan=_check_plan,
    activation_bytes=_activation_bytes,
    comfy=COMFY_SIDE,
    files=QWEN_FILES,
    prepare=_prepare,
    finish=first_output,
    on_loaded=_follow_comfyui,
    cp_segments=("encoder_hidden_states", "hidden_states"),
    segment_lengths=joint_lengths,
    mask_rows=("txt_mask",),
    cp_masks={"encoder_hidden_states_mask": "encoder_hidden_states"},
    tp_replicated_output=(
        "transformer_blocks.*.img_mod.1",
        "transformer_blocks.*.txt_mod.1",
        "norm_out.linear",
    ),
)
