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
its block sizes. `patch` puts the ops into a model of Hugging Face's transformers, and `patch_lycoris` into
LoKr adapters, in one line. `layers` has the ops as modules. `warmup` compiles and loads kernels ahead of
time, for example before a CUDA-graph capture.
`use` chooses one version of an op's kernels for a block. `backend("sim")` runs kernels in the simulator,
without a GPU.

`import cukern` alone imports neither torch nor the ops: the command line starts quickly. The first use of a
public name does. So does `import cukern.ops`, for programs that use torch.ops.cukern before, such as
torch.export.load.
"""
# ruff: noqa: F405  __all__ lists what the star imports

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cukern.api import *  # noqa: F403
    from cukern.integrations.lycoris import patch_lycoris
    from cukern.integrations.muon import Muon
    from cukern.integrations.transformers import patch
    from cukern.runtime.dispatch.own_op import op
    from cukern.runtime.launch.load import compile, load
    from cukern.runtime.warmup import warmup

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
    "patch_lycoris",
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

_ELSEWHERE = {  # the other names are of api
    "Muon": "integrations.muon",
    "compile": "runtime.launch.load",
    "load": "runtime.launch.load",
    "op": "runtime.dispatch.own_op",
    "patch": "integrations.transformers",
    "patch_lycoris": "integrations.lycoris",
    "warmup": "runtime.warmup",
}


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule when it is first used (PEP 562)."""
    if name in ("layers", "ops", "sim"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'api')}")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "layers", "sim"})
