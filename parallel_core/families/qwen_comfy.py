"""Qwen-Image on ComfyUI's side: the weight-free beginning and end of ComfyUI's model, and what it is refused.

The seam is `QwenImageTransformer2DModel._forward`: patches and position ids come from ComfyUI's own `process_img`, the
places of reference images follow its methods, and the patches that come back become a latent again. Knows neither
weights nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import UserError
from .base import ComfySide, Config, SeamCall

PATCH = 2
LATENT_CHANNELS = 16

_TIMESTEP_ZERO = "index_timestep_zero"
_OFFSET_METHODS = frozenset({"offset", "uxo"})
_NEWER_METHODS = frozenset({"negative_index", _TIMESTEP_ZERO})
_METHODS = _OFFSET_METHODS | _NEWER_METHODS | {"index"}
"""ComfyUI takes every name that it does not know for "offset"; a method of a later version would be lost so."""

_HIDDEN = -1e4
"""A bias from which on a key has no weight in the softmax."""


def _config_class(config: Config) -> str:
    return "comfy.supported_models:QwenImage"


def _unet_config(config: Config) -> dict[str, Any]:
    """Arguments of ComfyUI's QwenImageTransformer2DModel for a diffusers config."""
    names = ("patch_size", "in_channels", "out_channels", "num_layers", "attention_head_dim", "num_attention_heads")
    arguments: dict[str, Any] = {name: int(config[name]) for name in (*names, "joint_attention_dim")}
    arguments |= {"image_model": "qwen_image", "axes_dims_rope": tuple(config["axes_dims_rope"])}
    if config["zero_cond_t"]:
        arguments["default_ref_method"] = _TIMESTEP_ZERO
    return arguments


# -- the call ----------------------------------------------------------------------------------------------------------


def _call(model: Any, arguments: Mapping[str, Any], config: Config) -> SeamCall:
    """From `_forward`'s arguments: x [B, 16, F, h, w], timesteps [B], context [B, T, D], references as x."""
    x, context = arguments["x"], arguments["context"]
    img, img_ids, _ = model.process_img(x)
    rows = {"img": img, "txt": context, "timesteps": arguments["timesteps"]}
    shared = {"img_ids": img_ids[0], "txt_ids": _text_ids(x, context.shape[1])}
    references = arguments.get("ref_latents") or []
    if references:
        method = _reference_method(model, arguments)
        placed = [
            model.process_img(latent, **place)[:2]
            for latent, place in zip(references, _places(references, method), strict=True)
        ]
        rows["img"] = torch.cat([img, *(tokens for tokens, _ in placed)], dim=1)
        ids = torch.cat([ids[0] for _, ids in placed])
        if method == _TIMESTEP_ZERO:
            shared["clean_ids"] = ids
        else:
            shared["img_ids"] = torch.cat([shared["img_ids"], ids])
    mask = _visible_text(arguments.get("attention_mask"), context)
    if mask is not None:
        rows["txt_mask"] = mask
    return SeamCall(rows=rows, shared=shared)


def _text_ids(x: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[T, 3]: the text goes on along the diagonal from where the target image, centred on 0, ends."""
    start = max((size + PATCH // 2) // PATCH // 2 for size in x.shape[-2:])
    line = torch.arange(start, start + num_tokens, dtype=torch.float32, device=x.device)
    return line[:, None].repeat(1, 3)


def _reference_method(model: Any, arguments: Mapping[str, Any]) -> str:
    """How ComfyUI places the references of this call."""
    default = getattr(model, "default_ref_method", None)  # of newer versions, as are the methods that it may name
    method: str = arguments.get("ref_latents_method") or default or "index"
    if method in _NEWER_METHODS and default is None:
        raise UserError(
            f"The conditioning asks for the reference method {method!r}, which this version of ComfyUI does not have. "
            "Update ComfyUI, or choose 'index' or 'offset'."
        )
    _check_method(method)
    return method


def _places(references: Sequence[torch.Tensor], method: str) -> Iterator[dict[str, int]]:
    """For each reference the index and the offsets (latent cells) that `process_img` gets.

    By index each has a frame of its own, counted from 1 up or from -1 down. By offset all share frame 1 and are laid
    out to the right of one another or one below the other, so that the rectangle around them stays as square as can be.
    """
    if method not in _OFFSET_METHODS:
        step = -1 if method == "negative_index" else 1
        for number in range(1, len(references) + 1):
            yield {"index": step * number}
        return
    height = width = 0
    for latent in references:
        rows, columns = latent.shape[-2:]
        to_the_right = rows + height > columns + width
        down, right = (0, width) if to_the_right else (height, 0)
        yield {"index": 1, "h_offset": down, "w_offset": right}
        height, width = max(height, rows + down), max(width, columns + right)


def _visible_text(mask: torch.Tensor | None, context: torch.Tensor) -> torch.Tensor | None:
    """bool [B, T], True where a text token may be attended to; None where all may.

    ComfyUI reads integers as 1 visible, 0 hidden, and adds floating-point numbers to the attention's scores; of those
    only the biases that hide a token entirely can cross to the ranks.
    """
    if mask is None:
        return None
    if mask.shape != context.shape[:2]:
        raise UserError(
            f"The text's attention_mask has shape {list(mask.shape)}; expected {list(context.shape[:2])}, a number "
            "for every token."
        )
    if not mask.is_floating_point():
        visible = mask != 0
    elif bool(((mask == 0) | (mask <= _HIDDEN)).all()):
        visible = mask == 0
    else:
        odd = mask[(mask != 0) & (mask > _HIDDEN)][0].item()
        raise UserError(
            f"The text's attention_mask is a bias of floating-point numbers and holds {odd:g}; expected 0 (visible) or "
            f"at most {_HIDDEN:g} (hidden). Other biases do not reach the ranks."
        )
    return None if bool(visible.all()) else visible


def _restore(model: Any, arguments: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [B, L, 64] -> the latent [B, 16, F, h, w]: the target's tokens alone, patches joined, padding cut off."""
    batch, channels, frames, height, width = arguments["x"].shape
    rows, columns = (-(-size // PATCH) for size in (height, width))
    target = tokens[:, : frames * rows * columns]
    patches = target.reshape(batch, frames, rows, columns, channels, PATCH, PATCH)
    latent = patches.permute(0, 4, 1, 2, 5, 3, 6).reshape(batch, channels, frames, rows * PATCH, columns * PATCH)
    return latent[..., :height, :width]


# -- refusals ----------------------------------------------------------------------------------------------------------


def _check_conditioning(cond: Mapping[str, Any], config: Config) -> None:
    text, width = cond.get("cross_attn"), int(config["joint_attention_dim"])
    if text is None or text.ndim != 3 or text.shape[-1] != width:
        shape = "none" if text is None else list(text.shape)
        raise UserError(
            f"The conditioning's text has shape {shape}; this Qwen-Image model expects [batch, tokens, {width}]. "
            "It was made by the text encoder of another model family: use the encoder that belongs to this model."
        )
    for latent in cond.get("reference_latents") or ():
        if latent.ndim != 5 or latent.shape[1] != LATENT_CHANNELS:
            raise UserError(
                f"A reference latent has shape {list(latent.shape)}; a Qwen-Image model expects [batch, "
                f"{LATENT_CHANNELS}, 1, height, width]. Encode the image with Qwen-Image's own VAE."
            )
    method = cond.get("reference_latents_method")
    if method is not None:
        _check_method(method)


def _check_method(method: str) -> None:
    if method not in _METHODS:
        known = ", ".join(sorted(_METHODS))
        raise UserError(f"The conditioning asks for the reference method {method!r}; expected one of {known}.")


COMFY_SIDE = ComfySide(
    config_class=_config_class,
    unet_config=_unet_config,
    params_class="comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",
    seam="_forward",
    arguments=frozenset(
        {"x", "timesteps", "context", "attention_mask", "ref_latents", "ref_latents_method", "transformer_options"}
    ),
    call=_call,
    # guidance, concat_latent_image and concat_mask are what nodes for other models leave behind; ComfyUI's Qwen-Image
    # does not read them either.
    conditioning=frozenset(
        {
            "pooled_output", "attention_mask", "reference_latents", "reference_latents_method", "guidance",
            "concat_latent_image", "concat_mask", "denoise_mask", "noise_mask",
        }
    ),
    check_conditioning=_check_conditioning,
    restore=_restore,
    needs={"default_ref_method": "zero_cond_t (Qwen-Image-Edit-2511)"},
)  # fmt: skip
