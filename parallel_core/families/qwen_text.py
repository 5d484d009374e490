"""How Qwen-Image reads a prompt: the language half of Qwen2.5-VL, inside a fixed instruction.

Declarations only, importable on both sides. Knows no process, no weight, no node.
"""

from __future__ import annotations

from ..text_spec import TextFamily, TextPart

# QwenImagePipeline's own words, which ComfyUI uses too.
_INSTRUCTION = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)

_WITH_IMAGE = (
    "It reads the prompt together with the image that it edits, which this node has no input for. Use ComfyUI's own "
    "CLIP loader with TextEncodeQwenImageEdit or TextEncodeQwenImageEditPlus; they work with Load Parallel Transformer."
)

QWEN_TEXT = TextFamily(
    name="qwen-image",
    pipelines=("QwenImagePipeline", "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline"),
    refused=dict.fromkeys(
        (
            "QwenImageEditPipeline",
            "QwenImageEditPlusPipeline",
            "QwenImageEditInpaintPipeline",
            "QwenImageLayeredPipeline",
        ),
        _WITH_IMAGE,
    ),
    parts=(
        TextPart(
            label="Qwen2.5-VL",
            encoder="text_encoder",
            encoder_classes=("Qwen2_5_VLForConditionalGeneration",),
            loaded_class="Qwen2_5_VLTextModel",
            config_key="text_config",
            # transformers has moved the language model to and fro; files of all ages are about.
            renames=(
                ("model.language_model.", ""),
                ("language_model.model.", ""),
                ("model.layers.", "layers."),
                ("model.embed_tokens.", "embed_tokens."),
                ("model.norm.", "norm."),
            ),
            # the eyes, and the choice of a next token: 2.4 GB that text alone does not need
            unused=("visual.*", "model.visual.*", "lm_head.*", "language_model.lm_head.*"),
            tokenizer="tokenizer",
            tokenizer_classes=("Qwen2Tokenizer", "Qwen2TokenizerFast"),
            output="last_hidden_state",
            key="cross_attn",
            length="open",
            template=_INSTRUCTION,
            template_tokens=34,
            most_tokens=1024,
            divided=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
        ),
    ),
    max_sequence_length=1024,
)
