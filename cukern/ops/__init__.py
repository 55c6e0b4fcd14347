"""The ops, one file or one package each. Importing this package registers them all."""

from cukern.ops import adamw as adamw
from cukern.ops import attention as attention
from cukern.ops import causal_softmax as causal_softmax
from cukern.ops import cross_entropy as cross_entropy
from cukern.ops import embedding as embedding
from cukern.ops import gelu as gelu
from cukern.ops import kron_linear as kron_linear
from cukern.ops import layernorm as layernorm
from cukern.ops import matmul as matmul
from cukern.ops import rope as rope
from cukern.ops import softmax as softmax
from cukern.ops import square as square
