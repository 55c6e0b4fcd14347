"""Rotary position embeddings, and TransformerEngine's function of the same purpose."""

from cukern.ops.rope import cases as cases
from cukern.ops.rope.op import rope as rope
from cukern.ops.rope.op import rope_ as rope_
from cukern.ops.rope.transformer_engine import apply_rotary_pos_emb as apply_rotary_pos_emb
