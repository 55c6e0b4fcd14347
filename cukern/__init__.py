"""CUDA kernels for PyTorch with nothing to build."""

from cukern.ops.causal_softmax import causal_softmax as causal_softmax
from cukern.ops.kron_linear import KronLinear as KronLinear
from cukern.ops.kron_linear import kron_linear as kron_linear
from cukern.ops.kron_linear import lokr_linear as lokr_linear
from cukern.ops.matmul import linear as linear
from cukern.ops.matmul import matmul as matmul
from cukern.ops.rope import rope as rope
from cukern.ops.rope import rope_ as rope_
from cukern.ops.rope_te import apply_rotary_pos_emb as apply_rotary_pos_emb
from cukern.ops.softmax import log_softmax as log_softmax
from cukern.ops.softmax import softmax as softmax
from cukern.ops.square import square as square
from cukern.runtime.backend import backend as backend
from cukern.runtime.compiler import CompileError as CompileError
from cukern.runtime.compiler import SetupError as SetupError
from cukern.runtime.kernel import compile as compile
from cukern.runtime.kernel import load as load
from cukern.runtime.limits import LaunchError as LaunchError
from cukern.runtime.warmup import warmup as warmup
