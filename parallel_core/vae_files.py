"""Which VAE a single file holds: kind and sizes from its header's names and shapes, and where each weight lies in it.

Owns the names of the original layouts: the autoencoders of Stable Diffusion and FLUX ("ldm"), and Wan 2.1's (which is
Qwen-Image's too) and 2.2's. Reads no weight, and knows neither ComfyUI nor how a VAE computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .checkpoint import LOADABLE_DTYPES, Checkpoint, TensorInfo, read_header
from .errors import UserError
from .families.layout import MissingWeightError, Shapes
from .file_kinds import Kinds, describe_file, find_kind

_PREFIXES = ("first_stage_model.", "vae.", "")

_LEFT_FROM_TRAINING = ("loss.", "model_ema.")
"""What some published VAE files also hold; no part of the network."""

_OTHERS: Kinds = (
    ("a LoRA", ("*lora_A*", "*lora_B*", "*lora_down*", "*lora_up*", "*.hada_*", "*.lokr_*")),
    ("FLUX.2's VAE", ("bn.running_mean",)),
    ("a TAESD preview VAE", ("taesd_*", "decoder.layers.[0-9].weight", "[0-9].weight", "[0-9].conv.0.weight")),
    ("a tiny video VAE (TAEHV, TAEW)", ("decoder.22.bias",)),
    ("a part of Stable Cascade's VAE", ("vquantizer.*", "*backbone.1.0.block.*", "*blocks.11.num_batches_tracked")),
    ("Stable Video Diffusion's VAE", ("decoder.*.time_stack.*", "decoder.*.mix_factor", "decoder.time_conv_out.*")),
    ("a HunyuanVideo VAE", ("decoder.conv_in.conv.*",)),
    ("LTX-Video's VAE", ("decoder.up_blocks.*.res_blocks.*", "per_channel_statistics.*")),
    ("Cosmos' VAE", ("*patcher3d.*",)),
    ("Mochi's VAE", ("*blocks.*.stack.*", "*attn_block.attn.qkv.*")),
    ("an audio VAE", ("decoder.layers.*.beta", "*vocoder.*", "decoder.model.*.weight_g")),
    ("a pixel space VAE", ("pixel_space_vae",)),
    ("an autoencoder with attention in its levels (VQGAN, Kandinsky)", ("*coder.*.attn.[0-9].*", "quantize.*")),
    ("a deep compression autoencoder (DC-AE, Sana)", ("decoder.stages.*", "decoder.up_blocks.*.main.*")),
    ("a FLUX or HunyuanVideo transformer", ("*double_blocks.*",)),
    ("a Qwen-Image transformer", ("*transformer_blocks.*.img_mod.*",)),
    ("a Wan transformer", ("*blocks.0.cross_attn.*",)),
    ("a transformer in diffusers' layout", ("transformer_blocks.*",)),
)
"""What a file is that does not run here, and globs of names of which one tells: many of them look like Stable
Diffusion's VAE otherwise."""

Rules = tuple[tuple[str, str], ...]
"""(pattern, replacement), applied in this order: diffusers' names -> the file's."""


@dataclass(frozen=True, kw_only=True)
class VaeLayout:
    """One kind of file. `marks`: names in the file that together tell it. `config(shapes)`: the diffusers config, from
    shapes by the file's names; `rules(config)`: how diffusers' names become the file's."""

    label: str
    class_name: str
    marks: tuple[str, ...]
    config: Callable[[Shapes], dict[str, Any]]
    rules: Callable[[Mapping[str, Any]], Rules]


def vae_file_name(name: str, variant: str, config: Mapping[str, Any]) -> str:
    """The file's name (without prefix) of a weight of the diffusers model, in a file of that layout."""
    for pattern, replacement in next(layout for layout in LAYOUTS if layout.label == variant).rules(config):
        name = re.sub(pattern, replacement, name)
    return name


def read_vae_file(file: Path) -> Checkpoint:
    """The VAE in a single file (or in a whole checkpoint). Its tensors keep the file's names, without a prefix.

    `UserError` for a file without a VAE that runs here, with what it looks like.
    """
    tensors = _within({info.name: info for info in read_header(file)})
    what = find_kind(_OTHERS, tensors)
    if not what:
        for layout in LAYOUTS:
            if all(mark in tensors for mark in layout.marks):
                return _checkpoint(file, layout, tensors)
    looks = f"It looks like {what}." if what else describe_file(tensors)
    raise UserError(
        f"{file.name!r} holds no VAE that runs here. {looks} Expected the VAE of Stable Diffusion, "
        "FLUX, Wan or Qwen-Image; other VAEs work with ComfyUI's own Load VAE."
    )


def _within(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The VAE's part of a checkpoint, named without the prefix; all of a file that has no such part."""
    for prefix in _PREFIXES:
        found = {
            name.removeprefix(prefix): replace(info, name=name.removeprefix(prefix), stored_as=name)
            for name, info in tensors.items()
            if name.startswith(prefix)
        }
        if found:
            return {name: info for name, info in found.items() if not name.startswith(_LEFT_FROM_TRAINING)}
    return {}


def _checkpoint(file: Path, layout: VaeLayout, tensors: Mapping[str, TensorInfo]) -> Checkpoint:
    odd = {info.dtype for info in tensors.values()} - {*LOADABLE_DTYPES}
    if odd:
        raise UserError(f"{file.name!r} is a {layout.label} VAE in {', '.join(sorted(odd))}; expected 16 or 32 bits.")
    try:
        config = layout.config(Shapes({name: info.shape for name, info in tensors.items()}, lambda name: name))
    except MissingWeightError as error:
        raise UserError(f"{file.name!r} looks like a {layout.label} VAE, but {error.args[0]!r} is missing.") from None
    except (ValueError, IndexError):
        raise UserError(f"{file.name!r} has the names of a {layout.label} VAE, but shapes that none has.") from None
    return Checkpoint(
        folder=file, class_name=layout.class_name, config=config, tensors=dict(tensors), variant=layout.label
    )


# ----- Stable Diffusion, FLUX -----


def _ldm_config(shapes: Shapes) -> dict[str, Any]:
    blocks = shapes.count("encoder.down.{}.block.0.conv1.weight")
    return {
        **_common(shapes, blocks, [shapes[f"encoder.down.{n}.block.0.conv1.weight"][0] for n in range(blocks)]),
        "layers_per_block": shapes.count("encoder.down.0.block.{}.conv1.weight"),
        "mid_block_add_attention": "encoder.mid.attn_1.q.weight" in shapes,
    }


def _diffusers_config(shapes: Shapes) -> dict[str, Any]:
    blocks = shapes.count("encoder.down_blocks.{}.resnets.0.conv1.weight")
    widths = [shapes[f"encoder.down_blocks.{n}.resnets.0.conv1.weight"][0] for n in range(blocks)]
    return {
        **_common(shapes, blocks, widths),
        "layers_per_block": shapes.count("encoder.down_blocks.0.resnets.{}.conv1.weight"),
        "mid_block_add_attention": any(
            f"encoder.mid_block.attentions.0.{name}.weight" in shapes for name in ("to_q", "query")
        ),
    }


def _common(shapes: Shapes, blocks: int, widths: list[int]) -> dict[str, Any]:
    _, latent_channels, _, _ = shapes["decoder.conv_in.weight"]  # another number of dimensions is another kind of VAE
    return {
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "down_block_types": ["DownEncoderBlock2D"] * blocks,
        "up_block_types": ["UpDecoderBlock2D"] * blocks,
        "block_out_channels": widths,
        "latent_channels": latent_channels,
        "norm_num_groups": 32,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
        "force_upcast": latent_channels == 4,  # SDXL's overflows in float16, and shapes do not tell it from SD 1's
    }


_LDM_PARTS: Rules = (
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out."),
    (r"\.down_blocks\.(\d+)\.resnets\.", r".down.\1.block."),
    (r"\.down_blocks\.(\d+)\.downsamplers\.0\.", r".down.\1.downsample."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.conv_norm_out\.", ".norm_out."),
)


def _ldm_rules(config: Mapping[str, Any]) -> Rules:
    last = len(config["block_out_channels"]) - 1
    ups = [
        rule
        for number in range(last + 1)
        for rule in (
            (rf"\.up_blocks\.{number}\.resnets\.", f".up.{last - number}.block."),
            (rf"\.up_blocks\.{number}\.upsamplers\.0\.", f".up.{last - number}.upsample."),
        )
    ]
    return (*_LDM_PARTS, *ups)


# ----- Wan, Qwen-Image -----

_WAN_PARTS: Rules = (
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"coder\.conv_in\.", "coder.conv1."),
    (r"coder\.norm_out\.", "coder.head.0."),
    (r"coder\.conv_out\.", "coder.head.2."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.norm1\.", ".residual.0."),
    (r"\.norm2\.", ".residual.3."),
    (r"(?<!coder)\.conv1\.", ".residual.2."),
    (r"\.conv2\.", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
)

_BLOCKS = 2  # residual blocks of a stage of the encoder; the decoder has one more, and a resampler follows them
_WAN21: Rules = (
    (r"^encoder\.down_blocks\.", "encoder.downsamples."),
    *(
        (rf"^decoder\.up_blocks\.{stage}\.resnets\.{block}\.", f"decoder.upsamples.{stage * (_BLOCKS + 2) + block}.")
        for stage in range(4)
        for block in range(_BLOCKS + 1)
    ),
    *(
        (rf"^decoder\.up_blocks\.{stage}\.upsamplers\.0\.", f"decoder.upsamples.{stage * (_BLOCKS + 2) + _BLOCKS + 1}.")
        for stage in range(4)
    ),
)
_WAN22: Rules = (
    (r"^encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.downsamples.\1.downsamples."),
    (r"^encoder\.down_blocks\.(\d+)\.downsampler\.", rf"encoder.downsamples.\1.downsamples.{_BLOCKS}."),
    (r"^decoder\.up_blocks\.(\d+)\.resnets\.", r"decoder.upsamples.\1.upsamples."),
    (r"^decoder\.up_blocks\.(\d+)\.upsampler\.", rf"decoder.upsamples.\1.upsamples.{_BLOCKS + 1}."),
)


_ORIGINAL = ("encoder.conv1.weight", "decoder.head.0.gamma", "conv2.weight", "decoder.head.2.weight")
_DIFFUSERS = ("encoder.conv_in.weight", "decoder.norm_out.gamma", "post_quant_conv.weight", "decoder.conv_out.weight")


def _wan_config(shapes: Shapes, names: tuple[str, ...] = _ORIGINAL, **fixed: Any) -> dict[str, Any]:
    """`names`: of the first and last layers in the file's layout."""
    first, decoder, latents, last = (shapes[name] for name in names)
    return {
        "base_dim": first[0],
        "decoder_base_dim": decoder[0],
        "z_dim": latents[0],
        "in_channels": first[1],
        "out_channels": last[0],
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": _BLOCKS,
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "scale_factor_temporal": 4,
        **fixed,
    }


def _wan22(shapes: Shapes, names: tuple[str, ...] = _ORIGINAL) -> dict[str, Any]:
    return _wan_config(shapes, names, is_residual=True, patch_size=2, scale_factor_spatial=16)


LAYOUTS: tuple[VaeLayout, ...] = (
    VaeLayout(
        label="Wan 2.2",
        class_name="AutoencoderKLWan",
        marks=("decoder.middle.0.residual.0.gamma", "decoder.upsamples.0.upsamples.0.residual.2.weight"),
        config=_wan22,
        rules=lambda config: (*_WAN22, *_WAN_PARTS),
    ),
    VaeLayout(
        label="Wan 2.1",
        class_name="AutoencoderKLWan",
        marks=("decoder.middle.0.residual.0.gamma", "decoder.upsamples.0.residual.2.weight"),
        config=lambda shapes: _wan_config(shapes, scale_factor_spatial=8),
        rules=lambda config: (*_WAN21, *_WAN_PARTS),
    ),
    VaeLayout(
        label="Wan 2.2, in diffusers' layout,",
        class_name="AutoencoderKLWan",
        marks=("decoder.mid_block.resnets.0.norm1.gamma", "encoder.down_blocks.0.resnets.0.conv1.weight"),
        config=lambda shapes: _wan22(shapes, _DIFFUSERS),
        rules=lambda config: (),
    ),
    VaeLayout(
        label="Wan 2.1, in diffusers' layout,",
        class_name="AutoencoderKLWan",
        marks=("decoder.mid_block.resnets.0.norm1.gamma", "encoder.down_blocks.0.conv1.weight"),
        config=lambda shapes: _wan_config(shapes, _DIFFUSERS, scale_factor_spatial=8),
        rules=lambda config: (),
    ),
    VaeLayout(
        label="Stable Diffusion or FLUX",
        class_name="AutoencoderKL",
        marks=("encoder.down.0.block.0.conv1.weight", "decoder.mid.block_1.conv1.weight", "decoder.conv_in.weight"),
        config=_ldm_config,
        rules=_ldm_rules,
    ),
    VaeLayout(
        label="diffusers",
        class_name="AutoencoderKL",
        marks=("encoder.down_blocks.0.resnets.0.conv1.weight", "decoder.up_blocks.0.resnets.0.conv1.weight"),
        config=_diffusers_config,
        rules=lambda config: (),
    ),
)
"""Wan's in diffusers' layout before the other diffusers files: the first that fits is taken."""
