"""cross_entropy of logits and target indices."""

from cukern.ops.cross_entropy import cases as cases
from cukern.ops.cross_entropy.op import cross_entropy as cross_entropy
