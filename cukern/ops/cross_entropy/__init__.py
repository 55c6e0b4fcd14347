"""cross_entropy of logits and target indices, and of a linear layer without its logits."""

from cukern.ops.cross_entropy import cases as cases
from cukern.ops.cross_entropy.linear import linear_cross_entropy as linear_cross_entropy
from cukern.ops.cross_entropy.logprobs import linear_logprobs as linear_logprobs
from cukern.ops.cross_entropy.op import cross_entropy as cross_entropy
