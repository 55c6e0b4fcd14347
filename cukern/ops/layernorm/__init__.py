"""layernorm and rmsnorm over the last dimension, with an optional residual add before them."""

from cukern.ops.layernorm.op import layernorm as layernorm
from cukern.ops.layernorm.op import rmsnorm as rmsnorm
