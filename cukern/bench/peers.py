"""Other implementations of an op: torch, torch.compile, Triton, load_inline. No other file of the tools knows
ops by name."""

import contextlib
import functools
import importlib.util
import itertools
import shutil
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cukern.bench.calls import Function
from cukern.ops.attention.cases import varlen_bounds
from cukern.runtime.registry import CASES, Case

STARTUP_OPS = ("square", "matmul")  # timed by `cukern bench startup`: the least and the most code to compile

_MOST_MATERIALISED = 4096  # rows of the full matrix

Missing = str  # the reason why a peer cannot run here
Maker = Callable[[Case, torch.device], "Function | Missing"]


def peers(
    case: Case, device: torch.device, only: Collection[str] | None = None
) -> tuple[dict[str, Function], dict[str, Missing]]:
    """The peers of `case` that run on this device, as functions of its inputs by name, and the reason for
    each of the others.

    Args:
        only: these peers; None: all except those that take a minute to build.
    """
    found: dict[str, Function] = dict(_EAGER.get(case.name, {"torch": case.reference}))
    missing: dict[str, Missing] = {}
    slow = ("load_inline", "torch.compile") if device.type != "cuda" else ("load_inline",)
    for name, make in _makers(case).items():
        if only is None or name in only:
            made = (
                f"takes a minute to build, so it runs only with --only {name}"
                if only is None and name in slow
                else make(case, device)
            )
            if isinstance(made, str):
                missing[name] = made
            else:
                found[name] = made
    return {name: f for name, f in found.items() if only is None or name in only}, missing


def names(case: Case) -> list[str]:
    """The names of all peers of `case`, including those that do not run here."""
    return [*_EAGER.get(case.name, ("torch",)), *_makers(case)]


def _torch_compile(case: Case, device: torch.device) -> Function | Missing:
    if device.type != "cuda" and shutil.which("c++") is None:
        return "no C++ compiler for torch.compile"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import torch._functorch.config

    # the bench runs the backward of a retained graph many times
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()  # after eight shapes dynamo stops compiling
    return torch.compile(case.reference, dynamic=False)


def _package(name: str, make: Callable[[Case], Function], wheel: str = "") -> Maker:
    """The maker of a peer that needs a GPU and a Python package. `wheel`: its name for pip, if it differs."""

    def maker(case: Case, device: torch.device) -> Function | Missing:
        if device.type != "cuda":
            return "there is no GPU"
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install {wheel or name.replace('_', '-')}"
        try:
            return make(case)
        except (ImportError, OSError) as error:
            return f"{name} cannot be imported: {error}"

    return maker


def no_load_inline() -> Missing | None:
    """The reason why load_inline cannot run here, if any."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    lacking = [program for program in ("nvcc", "ninja", "c++") if shutil.which(program) is None]
    return f"load_inline needs {', '.join(lacking)}" if lacking else None


def load_inline_square() -> Function:
    from torch.utils import cpp_extension

    source = Path(__file__).with_name("load_inline.cu").read_text()
    declaration = "torch::Tensor square(torch::Tensor x);"
    return cpp_extension.load_inline("cukern_peer_square", declaration, source, functions=["square"]).square


def _load_inline_square(case: Case, device: torch.device) -> Function | Missing:
    try:
        return no_load_inline() or load_inline_square()
    except (RuntimeError, OSError, ImportError) as error:
        return f"load_inline failed: {str(error).strip().splitlines()[0]}"


def _materialised(x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    """A Kronecker-factored layer that builds the full matrix in each call, as LoKr implementations do."""
    if x.shape[-1] > _MOST_MATERIALISED:
        raise ValueError(
            f"the full matrix would have {x.shape[-1]} rows; more than {_MOST_MATERIALISED} are not measured"
        )
    return x @ functools.reduce(torch.kron, factors)


# ---- rotary embeddings


@functools.lru_cache(maxsize=1024)
def _table(table: torch.Tensor, dtype: torch.dtype, copies: int, interleaved: bool) -> torch.Tensor:
    """cos or sin as a peer expects it: in x's dtype, each column `copies` times. Cached per tensor, so it is
    not timed."""
    wide = table.repeat_interleave(copies, -1) if interleaved else table.repeat(1, copies)
    return wide.to(dtype)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x cos + rotate_half(x) sin in x's dtype, as in Hugging Face's models. x is (batch, sequence, heads,
    head_dim)."""
    c, s = (_table(t, x.dtype, 2, interleaved)[:, None] for t in (cos, sin))
    if interleaved:
        return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s


def _of_both(one: Callable[..., Any]) -> Function:
    """The rotation of queries and keys by a function that rotates one of them."""
    return lambda q, k, cos, sin: (one(q, cos, sin), one(k, cos, sin))


def _layernorm_residual(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    s = x + residual
    return torch.nn.functional.layer_norm(s, w.shape, w, b), s


def _fused_adamw(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """torch's optimizer in place, on the rows of the tensors. It has no float32 moments of 16-bit
    parameters."""
    params, grads, exp_avgs, exp_avg_sqs = (list(x.unbind()) for x in (param, grad, exp_avg, exp_avg_sq))
    steps = list(torch.ones(len(param), dtype=torch.float32, device=param.device).unbind())
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-2,
        eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return param, exp_avg, exp_avg_sq


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cudnn: bool = False, causal: bool = True
) -> torch.Tensor:
    """torch's attention of (batch, heads, T, D) or (heads, T, D): cuDNN's kernels, or FlashAttention-2 for
    16-bit types and else torch's choice."""
    if q.ndim == 3:
        return sdpa(q[None], k[None], v[None], cudnn=cudnn, causal=causal)[0]
    backend = SDPBackend.CUDNN_ATTENTION if cudnn else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend) if cudnn or q.element_size() == 2 else contextlib.nullcontext():
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] > k.shape[1]
        )


def _sdpa_of_each(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """One call per sequence of attention_varlen, whose lengths follow from the shapes."""
    bounds = varlen_bounds(len(q), len(cu_seqlens) - 1)
    spans = (slice(a, b) for a, b in itertools.pairwise(bounds) if a < b)
    parts = ([x[span].transpose(0, 1) for x in (q, k, v)] for span in spans)
    return torch.cat([sdpa(*qkv).transpose(0, 1) for qkv in parts])


def _flash_attention(case: Case) -> Function:
    from flash_attn.layers.rotary import apply_rotary_emb

    interleaved, in_place = case.name == "rope_interleaved", case.name in ("rope_in_place", "rope_quarter")

    def one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c, s = _table(cos, x.dtype, 1, False), _table(sin, x.dtype, 1, False)
        return apply_rotary_emb(x, c, s, interleaved, in_place)

    return one if case.name in ("rope", "rope_quarter") else _of_both(one)


def _liger_rope(case: Case) -> Function:
    """Works in place. Its backward overwrites the incoming gradients, so it must be the last peer of its
    op."""
    from liger_kernel.ops.rope import LigerRopeFunction

    def both(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[Any, ...]:
        c, s = _table(cos, q.dtype, 2, False)[None], _table(sin, q.dtype, 2, False)[None]
        return tuple(
            y.transpose(1, 2) for y in LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), c, s)
        )

    return both


def _transformer_engine(case: Case) -> Function:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    return lambda t, freqs: apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", fused=True)


def _liger(module: str, function: str, *last: Any) -> Maker:
    """An autograd Function of Liger, and its arguments after the tensors."""

    def make(case: Case) -> Function:
        apply = getattr(import_module(f"liger_kernel.ops.{module}"), function).apply
        return lambda *tensors: apply(*tensors, *last)

    return _package("liger_kernel", make)


def _quack(module: str, **options: Any) -> Maker:
    return _package(
        "quack",
        lambda case: partial(getattr(import_module(f"quack.{module}"), module), **options),
        "quack-kernels",
    )


# ---- the peers of each op

_EAGER: dict[str, dict[str, Function]] = {
    "square": {"torch": torch.square, "a*a": lambda a: a * a, "a**2": lambda a: a**2},
    "softmax": {"torch": partial(torch.softmax, dim=-1)},
    "gelu": {"torch": torch.nn.functional.gelu},
    "swiglu": {"torch": lambda gate, up: torch.nn.functional.silu(gate) * up},
    "cross_entropy": {"torch": torch.nn.functional.cross_entropy},
    "adamw": {"torch": _fused_adamw},
    "attention": {"torch": lambda *qkv: CASES["attention"].reference(*qkv), "sdpa": sdpa},
    "attention_varlen": {"sdpa": _sdpa_of_each},
    "attention_decode": {"sdpa": partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)},
    "layernorm": {"torch": lambda x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b)},
    "rmsnorm": {"torch": lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)},
    "layernorm_residual": {"torch": _layernorm_residual},
    "rope": {"torch": _rope},
    "rope_interleaved": {"torch": _of_both(partial(_rope, interleaved=True))},
    **{name: {"torch": _of_both(_rope)} for name in ("rope_qk", "rope_in_place", "rope_strided")},
}

_FLASH = {"flash_attn": _package("flash_attn", _flash_attention)}
_MAKERS: dict[str, dict[str, Maker]] = {
    "square": {
        "triton": _package("triton", lambda case: import_module("cukern.bench.triton_square").square),
        "load_inline": _load_inline_square,
    },
    **dict.fromkeys(("rope", "rope_qk", "rope_interleaved", "rope_strided", "rope_quarter"), _FLASH),
    "rope_in_place": {**_FLASH, "liger": _package("liger_kernel", _liger_rope)},
    "rope_te": {"transformer_engine": _package("transformer_engine", _transformer_engine)},
    "softmax": {"liger": _liger("softmax", "LigerSoftmaxFunction"), "quack": _quack("softmax")},
    "rmsnorm": {
        "liger": _liger("rms_norm", "LigerRMSNormFunction", 1e-6, 0.0, "llama", False),
        "quack": _quack("rmsnorm", eps=1e-6),
    },
    "layernorm": {"liger": _liger("layer_norm", "LigerLayerNormFunction", 1e-5)},
    "swiglu": {"liger": _liger("swiglu", "LigerSiLUMulFunction")},
    # Liger writes its gradient over the logits, which other peers need
    "cross_entropy": {"quack": _quack("cross_entropy")},
    "attention": {
        "cudnn": lambda case, device: (
            partial(sdpa, cudnn=True) if device.type == "cuda" else "there is no GPU"
        )
    },
    "kron_linear": {"materialised": lambda case, device: _materialised},
}


def _makers(case: Case) -> dict[str, Maker]:
    return {"torch.compile": _torch_compile, **_MAKERS.get(case.name, {})}
