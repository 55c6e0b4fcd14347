"""The names of the ops that OP may be. The registry, which has them too, imports torch."""

_TEXT = """
adamw softmax log_softmax causal_softmax attention attention_grouped attention_packed
attention_varlen attention_decode cross_entropy cross_entropy_padded linear_cross_entropy embedding
embedding_tokens gelu gelu_tanh gelu_bias swiglu geglu kron_linear kron_linear_rectangular layernorm
rmsnorm layernorm_residual matmul linear linear_gelu rope rope_qk rope_interleaved rope_in_place
rope_quarter rope_strided rope_packed rope_te square
"""
NAMES = _TEXT.split()
