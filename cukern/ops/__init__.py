"""The ops, one file each. To import this package is to fill the registry."""

from cukern.ops import causal_softmax as causal_softmax
from cukern.ops import kron_cases as kron_cases
from cukern.ops import matmul as matmul
from cukern.ops import rope_cases as rope_cases
from cukern.ops import softmax as softmax
from cukern.ops import square as square
