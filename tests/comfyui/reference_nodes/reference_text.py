"""The reference: ComfyUI's own text encoder classes and tokenizers over tiny files, as a stock CLIP.

ComfyUI's loaders take the full-size sizes; its classes take others through `model_options`. The sizes are read from the
test's own files. Qwen2.5-VL's eyes have no such option and are left out: no test here shows it a picture.
Does not know: the product.
"""

# ruff: noqa: N802 (INPUT_TYPES is ComfyUI's name)

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import comfy.sd
import comfy.text_encoders.flux
import comfy.text_encoders.qwen_image
import comfy.text_encoders.qwen_vl
import comfy.text_encoders.wan
import folder_paths
import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]


def _t5_sizes(weights: Weights) -> dict[str, Any]:
    heads = weights["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].shape[1]
    vocabulary, width = weights["shared.weight"].shape
    return {
        "d_ff": weights["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"].shape[0],
        "d_kv": weights["encoder.block.0.layer.0.SelfAttention.q.weight"].shape[0] // heads,
        "d_model": width,
        "num_heads": heads,
        "num_layers": sum(name.endswith("SelfAttention.q.weight") for name in weights),
        "vocab_size": vocabulary,
    }


def _clip_sizes(weights: Weights) -> dict[str, Any]:
    vocabulary, width = weights["text_model.embeddings.token_embedding.weight"].shape
    return {
        "hidden_size": width,
        "projection_dim": width,
        "intermediate_size": weights["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        "num_attention_heads": 1,
        "num_hidden_layers": sum(name.endswith("fc1.weight") for name in weights),
        "vocab_size": vocabulary,
    }


def _qwen_sizes(weights: Weights) -> dict[str, Any]:
    vocabulary, width = weights["model.embed_tokens.weight"].shape
    return {
        "hidden_size": width,
        "intermediate_size": weights["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": sum(name.endswith("self_attn.q_proj.weight") for name in weights),
        "num_attention_heads": weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // 128,
        "num_key_value_heads": weights["model.layers.0.self_attn.k_proj.weight"].shape[0] // 128,
        "vocab_size": vocabulary,
    }


class _NoEyes(torch.nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()


def _target(kind: str, files: list[Weights]) -> tuple[SimpleNamespace, dict[str, Any], dict[str, Any]]:
    """ComfyUI's classes, the model options with the files' sizes, the tokenizer's data."""
    if kind == "flux":
        clip = next(weights for weights in files if "text_model.embeddings.token_embedding.weight" in weights)
        t5 = next(weights for weights in files if "shared.weight" in weights)
        target = SimpleNamespace(
            params={},
            clip=comfy.text_encoders.flux.flux_clip(dtype_t5=torch.float32),
            tokenizer=comfy.text_encoders.flux.FluxTokenizer,
        )
        return target, {"t5xxl_model_config": _t5_sizes(t5), "clip_l_model_config": _clip_sizes(clip)}, {}
    (weights,) = files
    if kind == "wan":
        target = SimpleNamespace(
            params={}, clip=comfy.text_encoders.wan.te(), tokenizer=comfy.text_encoders.wan.WanT5Tokenizer
        )
        data = {"spiece_model": weights.pop("spiece_model")}
        return target, {"umt5xxl_model_config": _t5_sizes(weights)}, data
    target = SimpleNamespace(
        params={}, clip=comfy.text_encoders.qwen_image.te(), tokenizer=comfy.text_encoders.qwen_image.QwenImageTokenizer
    )
    return target, {"qwen25_7b_model_config": _qwen_sizes(weights)}, {}


class TestReferenceText:
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"files": ("STRING", {}), "kind": (["flux", "qwen-image", "wan"], {})}}

    def load(self, files: str, kind: str) -> tuple[Any]:
        weights = [load_file(folder_paths.get_full_path_or_raise("text_encoders", name)) for name in files.split(",")]
        target, options, data = _target(kind, weights)
        with mock.patch.object(comfy.text_encoders.qwen_vl, "Qwen2VLVisionTransformer", _NoEyes):
            clip = comfy.sd.CLIP(target, tokenizer_data=data, model_options={**options, "dtype": torch.float32})
        for one in weights:
            missing, _ = clip.load_sd(one)
            lost = [name for name in missing if not name.endswith(("logit_scale", "text_projection.weight"))]
            if lost:
                raise ValueError(f"ComfyUI's encoder misses {lost[:5]}")
        return (clip,)


NODES = {"TestReferenceText": TestReferenceText}
