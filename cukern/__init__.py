"""CUDA kernels for PyTorch with nothing to build.

Ops: square, matmul, linear, softmax, log_softmax, causal_softmax, rope, rope_, rope_tables,
apply_rotary_pos_emb, kron_linear, lokr_linear, embedding, layernorm, rmsnorm, gelu, swiglu, geglu,
cross_entropy, linear_cross_entropy, linear_logprobs, attention, attention_packed, attention_varlen, adamw,
the optimizers AdamW and Muon, and the module KronLinear. `help(cukern.softmax)` gives shapes, dtypes, errors
and an example.

Arguments of embedding, layernorm, rmsnorm, gelu, swiglu, geglu and cross_entropy are tensors or arrays that
support DLPack, all on one device. A tensor (..., C) is not copied if its last dimension has stride 1 and the
others flatten to one of any stride; else it is copied once. 16-bit types are computed in float32 and rounded
once. CPU tensors use torch's operations, or the simulator. Autocast follows torch's rules;
docs/guide/autocast.md has them by op.

Your own kernels: `load`, `compile` and `tensor_map`; `op` makes a differentiable op of them, `tune` chooses
its block sizes. `patch` puts the ops into a model of Hugging Face's transformers, in one line. `layers` has
the ops as modules. `warmup` compiles and loads kernels ahead of time, for example before a CUDA-graph
capture.
`use` chooses one version of an op's kernels for a block. `backend("sim")` runs kernels in the simulator,
without a GPU.
"""

import importlib
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
from cukern.runtime.dispatch.own_op import op
from cukern.runtime.dispatch.versions import use
from cukern.runtime.launch.backend import backend
from cukern.runtime.launch.limits import LaunchError
from cukern.runtime.launch.load import compile, load
from cukern.runtime.launch.tensor_map import tensor_map
from cukern.runtime.warmup import warmup

if TYPE_CHECKING:
    import torch

    from cukern.bench.own_tune import Tried
    from cukern.integrations.muon import Muon
    from cukern.integrations.transformers import patch

__version__ = "0.1.0"
__all__ = [
    "AdamW",
    "CompileError",
    "KronLinear",
    "LaunchError",
    "Muon",
    "SetupError",
    "adamw",
    "apply_rotary_pos_emb",
    "attention",
    "attention_packed",
    "attention_varlen",
    "backend",
    "causal_softmax",
    "compile",
    "cross_entropy",
    "embedding",
    "geglu",
    "gelu",
    "kron_linear",
    "layernorm",
    "linear",
    "linear_cross_entropy",
    "linear_logprobs",
    "load",
    "log_softmax",
    "lokr_linear",
    "matmul",
    "op",
    "patch",
    "rmsnorm",
    "rope",
    "rope_",
    "rope_tables",
    "softmax",
    "square",
    "swiglu",
    "tensor_map",
    "tune",
    "use",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """`cukern.layers`, `cukern.sim`, `cukern.patch` and `cukern.Muon` are imported when they are first
    used."""
    if name == "Muon":
        return importlib.import_module(f"{__name__}.integrations.muon").Muon
    if name == "patch":
        return importlib.import_module(f"{__name__}.integrations.transformers").patch
    if name in ("layers", "sim"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
