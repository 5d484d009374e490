"""What a model file that is not the wanted one looks like, from the names and shapes in its header: for messages only.

Knows the marks of common kinds of files; reads nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from .checkpoint import TensorInfo

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("a LoRA", ("*lora_A*", "*lora_B*", "*lora_down*", "*lora_up*", "*.hada_w1_a", "*.lokr_w1*", "*.diff_b")),
    ("SVDQuant weights (Nunchaku)", ("*.smooth_factor*", "*.wscales")),
    ("a ControlNet", ("controlnet_*", "*input_hint_block.*", "zero_convs.*", "control_model.*")),
    ("an SD 1.x, SD 2.x or SDXL checkpoint (a U-Net)", ("*input_blocks.*", "down_blocks.*.resnets.*")),
    ("Stable Diffusion 3", ("*joint_blocks.*",)),
    ("FLUX.2", ("*double_stream_modulation_img.*",)),
    ("Chroma", ("*distilled_guidance_layer.*",)),
    ("HunyuanVideo", ("*txt_in.individual_token_refiner.*",)),
    ("HiDream", ("*caption_projection.*.linear.weight", "*double_stream_blocks.*")),
    ("LTX-Video", ("*adaln_single.*", "*patchify_proj.*")),
    ("Lumina 2 or Z-Image", ("*cap_embedder.*", "*noise_refiner.*")),
    ("a Wan or Qwen-Image VAE", ("decoder.middle.*", "decoder.upsamples.*", "encoder.downsamples.*")),
    ("a VAE", ("decoder.up.*", "decoder.up_blocks.*", "encoder.down.*", "first_stage_model.*", "quant_conv.*")),
    ("a CLIP text encoder", ("*text_model.encoder.*",)),
    ("a CLIP vision model", ("vision_model.*", "visual.transformer.*")),
    ("a T5 text encoder", ("encoder.block.*", "enc.blk.*")),
    ("a language model", ("model.layers.*", "*lm_head.*", "blk.*.attn_q.*", "token_embd.*", "transformer.h.*")),
    ("an upscaler", ("*conv_first.*", "*body.*.rdb*", "*RRDB*")),
    ("an embedding", ("emb_params", "string_to_param*", "clip_l", "clip_g")),
)
"""What it is called, and globs of names of which one tells. The first kind that fits is named."""


def describe_file(names: Mapping[str, TensorInfo]) -> str:
    """One sentence about a file with these tensors."""
    for kind, globs in _KINDS:
        if _any_match(names, globs):
            return f"It looks like {kind}."
    if not names:
        return "It holds no tensors at all."
    some = ", ".join(repr(name) for name in sorted(names)[:3])
    return f"What it holds is not known: {len(names)} tensors such as {some}."


def _any_match(names: Iterable[str], globs: Iterable[str]) -> bool:
    globs = tuple(globs)
    return any(fnmatchcase(name, glob) for name in names for glob in globs)
