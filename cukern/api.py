"""The public names of cukern. `cukern/__init__.py` imports them from here when one is first used."""
# ruff: noqa: F401

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cukern.ops.adamw import AdamW, adamw
from cukern.ops.attention import attention, attention_packed, attention_varlen
from cukern.ops.causal_softmax import causal_softmax
from cukern.ops.cross_entropy import cross_entropy, linear_cross_entropy, linear_logprobs
from cukern.ops.embedding import embedding
from cukern.ops.gelu import geglu, gelu, swiglu
from cukern.ops.kron_linear import KronLinear, kron_linear, lokr_linear
from cukern.ops.layernorm import layernorm, rmsnorm
from cukern.ops.matmul import linear, matmul
from cukern.ops.rope import apply_rotary_pos_emb, rope, rope_, rope_tables
from cukern.ops.softmax import log_softmax, softmax
from cukern.ops.square import square
from cukern.runtime.compile.compiler import CompileError, SetupError
from cukern.runtime.dispatch.versions import use
from cukern.runtime.launch.backend import backend
from cukern.runtime.launch.limits import LaunchError
from cukern.runtime.launch.tensor_map import tensor_map

if TYPE_CHECKING:
    import torch

    from cukern.bench.own_tune import Tried


def tune(
    function: Callable[..., Any], *sizes: int, dtype: "torch.dtype | None" = None, seconds: float = 1.0
) -> "list[Tried]":
    """Measure the `configs` of an op that `cukern.op` made, and record the fastest for this model of GPU.

    Args:
        function: what `cukern.op(..., configs=[...])` returned.
        sizes: those of `make`, for the measurement. None: the op's `bench` sizes. All configurations are
            checked on its `cases`.
        dtype: of the inputs; None: the first of the op's dtypes.
        seconds: of measuring per configuration, size and pass.

    Returns a list of cukern.bench.own_tune.Tried, one per configuration, in their order: `config`, `us`, the
    time of forward plus backward, and `problem`, why it is not used: it does not compile, its launch exceeds
    a limit, or its results are wrong. This process and later ones use the fastest of the others. Nothing else
    measures: a call in training takes the recorded choice, or the first configuration. An edit of the source
    or the configurations needs a new measurement.
    In the simulator (`cukern.backend("sim")`) configurations are only checked, and nothing is recorded.
    Raises TypeError for another function, ValueError if it has no configs or none is right, and SetupError
    without a GPU.

        fastest = min((t for t in cukern.tune(my_op, 4096, 1024) if not t.problem), key=lambda t: t.us)
    """
    from cukern.bench.own_tune import tune

    return tune(function, sizes, dtype, seconds)
