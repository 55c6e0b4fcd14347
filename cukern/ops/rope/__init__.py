"""Rotary position embedding: rope, rope_, rope_tables, and TransformerEngine's apply_rotary_pos_emb."""

from cukern.ops.rope import cases as cases
from cukern.ops.rope.op import rope as rope
from cukern.ops.rope.op import rope_ as rope_
from cukern.ops.rope.tables import rope_tables as rope_tables
from cukern.ops.rope.transformer_engine import apply_rotary_pos_emb as apply_rotary_pos_emb
