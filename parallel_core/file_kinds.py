"""What a file that is not the wanted one looks like, from its first bytes or the names in its header: for messages.

Knows the marks of common kinds of files; reads nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

Kinds = tuple[tuple[str, tuple[str, ...]], ...]
"""What a file is called, and globs of names of which one tells."""

_KINDS: Kinds = (
    ("a LoRA", ("*lora_A*", "*lora_B*", "*lora_down*", "*lora_up*", "*.hada_w1_a", "*.lokr_w1*", "*.diff_b")),
    ("a ControlNet", ("controlnet_*", "*input_hint_block.*", "zero_convs.*", "control_model.*")),
    ("an SD 1.x, SD 2.x or SDXL checkpoint (a U-Net)", ("*input_blocks.*", "down_blocks.*.resnets.*")),
    ("Stable Diffusion 3", ("*joint_blocks.*", "pos_embed.pos_embed")),
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
"""The first kind that fits is named."""


def known_kind(names: Iterable[str]) -> str:
    """What a file with tensors of these names is called; "" where it is not known."""
    return find_kind(_KINDS, names)


def find_kind(kinds: Kinds, names: Iterable[str]) -> str:
    """The first of `kinds` of which a glob fits one of the names; "" for none."""
    names = tuple(names)
    return next((kind for kind, globs in kinds if any(fnmatchcase(n, glob) for n in names for glob in globs)), "")


def describe_file(names: Iterable[str]) -> str:
    """One sentence about a file with tensors of these names."""
    names = sorted(names)
    kind = known_kind(names)
    if kind:
        return f"It looks like {kind}."
    if not names:
        return "It holds no tensors at all."
    return f"What it holds is not known: {len(names)} tensors such as {', '.join(map(repr, names[:3]))}."


_PICKLE = (
    "a pickled PyTorch checkpoint, which can run code when it is opened and is not read. Use the model's .safetensors "
    "file."
)
_STARTS: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"GGUF",), "a GGUF file. Let its name end in .gguf."),
    ((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), _PICKLE),
    ((b"<!doc", b"<html", b"<?xml"), "a web page. The site has sent a page (log in?) in place of the model."),
    ((b"version https://git-lfs",), "a Git LFS pointer: the model itself was not downloaded. Run `git lfs pull`."),
    ((b"{", b"["), "json text. The site has sent a message in place of the model: look into the file."),
)
_ZEROS = "zeros: the download was begun and not finished. Download it again."


def describe_start(begin: bytes) -> str:
    """What a file that begins with these bytes and is not what its name says is, and what to do; "" if not known."""
    if begin[4:8] == bytes(4):  # a length of less than 4 GB, as a safetensors file begins, however damaged
        return _ZEROS if not any(begin) else ""
    text = begin.lstrip().lower()
    return next((kind for starts, kind in _STARTS if begin.startswith(starts) or text.startswith(starts)), "")


def is_safetensors(begin: bytes) -> bool:
    """Whether a file that begins with these bytes looks like safetensors."""
    return begin[4:9] == bytes(4) + b"{"
