"""How the matrices of text encoders are sliced over ranks where transformers declares no plan: T5, UMT5 and CLIP.

Styles are transformers' own by name, but for `HEADS_OF_BIAS`, which the rank side registers. Declarations only.
"""

from __future__ import annotations

HEADS_OF_BIAS = "parallel_diffusion_heads_of_bias"
"""A table with one column per attention head, of which a rank keeps those of its own heads."""

T5_PLAN = {
    # one table under two names
    "shared": "embedding_rowwise",
    "encoder.embed_tokens": "embedding_rowwise",
    "encoder.block.*.layer.*.SelfAttention.q": "colwise",
    "encoder.block.*.layer.*.SelfAttention.k": "colwise",
    "encoder.block.*.layer.*.SelfAttention.v": "colwise",
    "encoder.block.*.layer.*.SelfAttention.o": "rowwise",
    "encoder.block.*.layer.*.SelfAttention.relative_attention_bias": HEADS_OF_BIAS,
    "encoder.block.*.layer.*.DenseReluDense.wi": "colwise",
    "encoder.block.*.layer.*.DenseReluDense.wi_0": "colwise",
    "encoder.block.*.layer.*.DenseReluDense.wi_1": "colwise",
    "encoder.block.*.layer.*.DenseReluDense.wo": "rowwise",
}
"""`wi` of T5 1.0, `wi_0` and `wi_1` of the gated feed-forward that T5 1.1 and UMT5 have."""

CLIP_PLAN = {
    "encoder.layers.*.self_attn.q_proj": "colwise",
    "encoder.layers.*.self_attn.k_proj": "colwise",
    "encoder.layers.*.self_attn.v_proj": "colwise",
    "encoder.layers.*.self_attn.out_proj": "rowwise",
    "encoder.layers.*.mlp.fc1": "colwise",
    "encoder.layers.*.mlp.fc2": "rowwise",
}
