"""AdamW: the optimizer, and one step of it as a function of lists of tensors."""

from cukern.ops.adamw.op import adamw as adamw
from cukern.ops.adamw.optimizer import AdamW as AdamW
