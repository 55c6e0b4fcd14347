"""A fuzzer of every public op: valid calls, nonsense and torch's transforms. What is right is plain torch in
float64, or in long doubles.

    python tests/fuzz.py --cases 20000                        # of all ops, kinds and places together
    python tests/fuzz.py softmax rope --kind valid --place sim --seed 7
    python tests/fuzz.py --case "Case('square', 'sim', 'valid', {'x': T((3, 0), 'float16')}, (0, 1))"

Hypothesis draws the cases and shrinks those that fail. A printed case is Python, which --case runs again;
random values come from seeds in it. The exit status is 1 after a failure. A hang of 5 minutes ends it.
--verbose prints each case before it runs.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import math
import os
import sys
import time
import warnings
from fractions import Fraction  # noqa: F401, for TWINS
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import fuzz_cases as draws
import fuzz_truth as truth
import hypothesis
import long_double
import numpy as np
import torch
from fuzz_cases import PLACES, Case, Draw, T, fill, specs
from fuzz_truth import magnitudes, outputs, results
from helpers import same_bits
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import cukern
from cukern.bench.verify import poisoned


def rope_in_place(x, cos, sin, *, k=None, **rest):
    """rope_ of copies, which lie in memory as x and k do: autograd lets nobody write a leaf."""
    return cukern.rope_(copied(x), cos, sin, k=copied(k), **rest)


def adamw_of_copies(params, grads, exp_avgs, exp_avg_sqs, **rest):
    lists = [
        [copied(t) for t in ts] if isinstance(ts, list | tuple) else ts
        for ts in (params, grads, exp_avgs, exp_avg_sqs)
    ]
    cukern.adamw(*lists, **rest)
    return tuple(map(torch.as_tensor, itertools.chain(*lists[:1], *lists[2:])))


def copied(t):
    if isinstance(t, np.ndarray):
        return t.copy()
    if (
        not isinstance(t, torch.Tensor)
        or t.layout is not torch.strided
        or t.is_nested
        or t.is_quantized
        or t.is_neg()
        or t.is_meta
    ):
        return t
    if torch._C._functorch.is_functorch_wrapped_tensor(t):  # which no plain memory can take
        return t.clone()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


# name: what draws its arguments, what is right, and how many roundings an element may err more than torch
FUZZED = {
    "square": (draws.draw_square, lambda x: x * x, 2),
    "softmax": (draws.draw_softmax, truth.softmax, 4),
    "log_softmax": (draws.draw_softmax, truth.log_softmax, 4),
    "causal_softmax": (draws.draw_causal, truth.causal_softmax, 4),
    "attention": (draws.draw_attention, truth.attention, 4),
    "attention_packed": (draws.draw_attention, truth.attention_packed, 4),
    "attention_varlen": (draws.draw_attention, truth.attention_varlen, 4),
    "embedding": (draws.draw_embedding, truth.embedding, 2),
    "cross_entropy": (draws.draw_cross_entropy, truth.cross_entropy, 4),
    "linear_cross_entropy": (draws.draw_cross_entropy, truth.linear_cross_entropy, 6),
    "rope": (draws.draw_rope, truth.rope, 2),
    "rope_": (draws.draw_rope, truth.rope, 2),
    "apply_rotary_pos_emb": (draws.draw_te, truth.te, 2),
    "matmul": (draws.draw_matmul, lambda a, b: a @ b, 6),
    "linear": (draws.draw_linear, truth.linear, 6),
    "gelu": (draws.draw_gelu, truth.gelu, 16),  # torch's, with tanh
    "swiglu": (draws.draw_swiglu, truth.gated, 4),
    "geglu": (draws.draw_swiglu, truth.geglu, 16),
    "layernorm": (draws.draw_norm, truth.layernorm, 6),
    "rmsnorm": (draws.draw_norm, truth.rmsnorm, 6),
    "kron_linear": (draws.draw_kron, truth.kron_linear, 6),
    "adamw": (draws.draw_adamw, truth.adamw, 6),
    "lokr_linear": (draws.draw_lokr, truth.lokr_linear, 6),
}


PEERS = {  # torch's own ops, which may add in other orders than the rules
    "softmax": lambda x, dim=-1, scale=1.0: (x * float(scale)).softmax(dim),
    "log_softmax": lambda x, dim=-1, scale=1.0: (x * float(scale)).log_softmax(dim),
    "linear": lambda x, weight, bias=None: torch.nn.functional.linear(x[None], weight, bias)[0],
    "adamw": lambda *lists, **numbers: truth.adamw(*lists, **numbers, lerp=torch.lerp),
    **{
        name: functools.partial(rule, limit=False)
        for name, rule in (("gelu", truth.gelu), ("geglu", truth.geglu), ("swiglu", truth.gated))
    },
}


def function_of(op: str) -> Any:
    """The op with results in the dtype of its first argument: a loss and lse of 16-bit types are float32."""
    function = {"rope_": rope_in_place, "adamw": adamw_of_copies}.get(op) or getattr(cukern, op)

    def rounded(**args: Any) -> Any:
        found, first = outputs(function(**args)), pytree.tree_leaves(args)[0]
        dtype = (
            torch.as_tensor(first).dtype if isinstance(first, torch.Tensor | np.ndarray) else found[0].dtype
        )
        return tuple(o.to(dtype) for o in found)

    return rounded if op == "adamw" or "attention" in op or "cross_entropy" in op else function


@contextlib.contextmanager
def at(place: str):
    with cukern.backend("sim" if place == "sim" else "gpu"), poisoned(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def cast(dtypes: dict, tensors: list) -> list:
    return [x.cpu().to(dtypes.get(x.dtype, x.dtype)) for x in tensors]


# a peer in float32 would excuse what leaves its range
NARROW = {torch.float16: torch.float64, torch.bfloat16: torch.float64}
DOUBLE = dict.fromkeys((*NARROW, torch.float32), torch.float64) | {torch.complex64: torch.complex128}


PRODUCTS = (
    "matmul", "linear", "kron_linear", "lokr_linear", "linear_cross_entropy", "attention", "attention_packed",
    "attention_varlen",
)  # fmt: skip


def run_valid(case: Case) -> None:
    (_, rule, roundings), args, (seed, step, *size) = FUZZED[case.op], case.args, case.how
    device, plain = (
        "cuda" if case.place == "gpu" else "cpu",
        {k: v for k, v in args.items() if k != "version"},
    )
    tensors, before = ([t.build(device) for t in specs(args)] for _ in range(2))

    def douts(outs: list) -> list:
        names = [str(o.dtype)[6:] for o in outs]
        layouts = [
            {"order": tuple(range(o.ndim))[:: -1 if step == 2 else 1], "steps": (step,) * o.ndim}
            for o in outs
        ]
        return [
            T(tuple(o.shape), n, seed=seed, size=(*size, 1.0)[0], **lay).build(device)
            for o, n, lay in zip(outs, names, layouts, strict=True)
        ]

    with at(case.place):
        ours, again = (results(function_of(case.op), args, tensors, douts) for _ in range(2))
    assert all(map(same_bits, tensors, before)), "an input was changed"
    assert all(map(same_bits, ours, again)), "two runs differ"
    # each result's dtype is x's, or that of its input
    given = [tensors[0].new_empty(o.shape) for o in ours if o is not None]
    count = len(ours) - sum(t.grad for t in specs(args))
    grads = douts(given[:count])
    longer = long_double.exact if any(t.dtype == "float64" for t in specs(args)) else lambda x: x
    xs, douts64 = (list(map(longer, cast(DOUBLE, some))) for some in (tensors, grads))
    exact = results(rule, plain, xs, lambda _: douts64)
    own = PEERS.get(case.op, rule)
    peer = results(
        own,
        plain,
        cast(NARROW, tensors),
        lambda outs: [g.to(o.dtype) for g, o in zip(cast(NARROW, grads), outs, strict=True)],
    )
    scales = magnitudes(case, rule, plain, cast(DOUBLE, tensors), cast(DOUBLE, grads))
    wanted = [t for t in specs(args) if t.grad]
    least = smallest_error(case, [*tensors, *grads])
    finite = all(x.isfinite().all() for x in (*tensors, *grads))
    for i, (o, p, e, s) in enumerate(zip(ours, peer, exact, scales, strict=True)):
        what = f"output {i}" if i < count else f"gradient of {wanted[i - count]}"
        dtype = tensors[0].dtype if i < count else getattr(torch, wanted[i - count].dtype)
        assert o.dtype == dtype and o.device == tensors[0].device, f"{what} is {o.dtype} on {o.device}"
        eps = max(torch.finfo(t).eps for t in (dtype, tensors[0].dtype))
        # a processor's library may flush subnormal numbers to 0
        if case.place == "reference" and case.op in PRODUCTS:
            o = torch.where(
                (o == 0) & (s < torch.finfo(dtype).tiny).to(o.device),
                long_double.rounded(e, dtype).to(o.device),
                o,
            )
        s = s.nan_to_num(nan=math.inf, posinf=math.inf) if finite else s  # the scale's terms overflow
        s = s.masked_fill(64 * s >= torch.finfo(dtype).max, math.inf)  # a result in between may overflow
        if case.op in PRODUCTS and overflows(case, [*tensors, *grads]):
            o = torch.where(o.isfinite(), o, long_double.rounded(e, dtype).to(o.device))
        compare(what, o.cpu(), p.to(dtype), e, s, eps * roundings, least)


def computed(case: Case, x: torch.Tensor) -> torch.finfo:
    """The dtype of results in between: of versions in torch, and of lokr_linear's small product or float16
    array in between, that of x."""
    in_torch = case.op == "lokr_linear" or case.args["version"] in ("v1", "v2")
    return torch.finfo(x.dtype if in_torch or x.dtype in (torch.float64, torch.complex128) else torch.float32)


def sizes(tensors: list) -> list:
    """The largest finite numbers."""
    return [
        t.detach().cpu().abs().double().nan_to_num(0.0, 0.0, 0.0).max().item() for t in tensors if t.numel()
    ]


def smallest_error(case: Case, tensors: list) -> float:
    """The allowed error of subnormal intermediate results: one rounding, times the largest factor, times a
    margin for sums.

    3xTF32 keeps a small part of each float32 number in TF32. Its subnormal numbers have 10 bits.
    """
    info, version = computed(case, tensors[0]), case.args["version"]
    splits = (
        version in ("v6", "v7")
        if case.op in ("matmul", "linear")
        else case.op.startswith("attention") and version not in ("v1", "v2")
    )
    splits &= case.place != "reference" and tensors[0].dtype == torch.float32
    return 64 * info.tiny * (2.0**-10 if splits else info.eps) * max(1.0, *sizes(tensors), 1.0)


def overflows(case: Case, tensors: list) -> bool:
    """Whether a product of some of the tensors may overflow, in an order of the factors that differs from the
    rule's."""
    if case.op == "attention_packed":
        tensors = [*tensors[0].unbind(2), *tensors[1:]]
    return sum(max(0.0, math.log2(n)) for n in sizes(tensors) if n) + 6 >= math.log2(
        computed(case, tensors[0]).max
    )


def compare(
    what: str, ours: torch.Tensor, peer: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor,
    rounding: float, least: float = 0.0,
) -> None:  # fmt: skip
    """Each element errs by at most twice torch's error, and `rounding` times the scale; what is not finite is
    right, or as torch has it."""
    assert ours.shape == exact.shape, f"{what} has shape {tuple(ours.shape)}, it must be {tuple(exact.shape)}"
    info, rounded = torch.finfo(ours.dtype), long_double.rounded(exact, ours.dtype)
    error = (ours.to(exact.dtype) - exact).abs()
    fine = (
        error
        <= 2 * (peer.to(exact.dtype) - exact).abs().nan_to_num(nan=0.0, posinf=0.0)
        + rounding * scale
        + 4 * info.tiny * info.eps
    )
    fine |= error <= least
    for other in (peer, rounded):
        fine |= (ours == other) | (ours.isnan() & other.isnan())
    possible = (exact.abs() <= 1.7e308) | ~ours.isfinite()  # of an infinity or NaN there is no finite result
    fine |= possible & (scale * (1 + 2 * rounding) >= info.max)  # a term overflows
    if not fine.all():
        i = tuple((~fine).nonzero()[0].tolist())
        numbers = (
            f"{ours[i].item()!r}, torch has {peer[i].item()!r}, exact is {rounded[i].item()!r}, scale "
            f"{scale[i].item():.3g}"
        )
        raise AssertionError(
            f"{what}: {int((~fine).sum())} of {fine.numel()} elements are wrong, the first at {i}: {numbers}"
        )


# ---- nonsense: an argument v of a valid call becomes an expression


ANYTHING = (  # each is refused, but for what may_succeed says
    "None", "'abc'", "''", "b'v1'", "True", "2", "1.5", "-7", "nan", "inf", "10**400", "-(10**30)", "1j",
    "object()", "[]", "()", "{}",
    "set()", "[None]", "(2,)", "[[[1.0], []]]", "int", "torch.float32", "...", "len", "('v1', 'v1', 'v1')",
    "({}, [])", "torch.tensor(2.0)",
    "torch.tensor(2.0, requires_grad=True)", "torch.arange(3)", "np.array(['a'])", "np.array([None])",
    "np.array(['2020'], 'M8[D]')",
    "np.ones(3, '>f4')", "np.ones(3, 'f4')[::-1]", "np.ones(3, 'g')",
    "odd(__dlpack__=fails, __dlpack_device__=cpu)", "odd(__dlpack__=cpu)",
    "odd(__dlpack__=cpu, __dlpack_device__=cpu)", "odd(__dlpack__=cpu, __dlpack_device__=fails)",
    "odd(__repr__=fails)",
)  # fmt: skip


TENSORS = (
    "v.to('meta')", "v.to_sparse()", "v.flatten()[None].to_sparse_csr()", "v.float().to_mkldnn()",
    "torch.nested.nested_tensor([v])", "torch.quantize_per_tensor(v.float(), 1.0, 0, torch.qint8)",
    "v.short()", "v.bool()", "v.to(torch.uint64)", "v.to(torch.float8_e5m2)", "v.to(torch.complex128)",
    "v.tolist()", "torch.complex(v.double(), v.double()).conj().imag",
)  # fmt: skip


# these may be right
SHAPES = "v[None]", "v.flatten()", "v[..., :0]", "torch.cat((v, v), -1)", "v.sum()", "v[0]"


TWINS = {  # the same in another type
    float: ("np.float64(v)", "np.float32(v)", "Fraction(v)"),
    int: ("np.int64(v)", "np.int16(v)"),
    bool: ("np.bool_(v)",),
    str: ("np.str_(v)",),
    T: ("torch.nn.Parameter(v, requires_grad=False)", "v.numpy()"),
    tuple: ("list(v)",),
}


OPTIONAL = ("version", "window", "sink", "k", "sin", "positions", "position_ids", "mrope_section",
            "cu_seqlens", "start_positions",
            "bias", "residual", "softcap", "vocab_size", "key_lengths", "cu_seqlens_k",
            "chunk_rows")  # fmt: skip


NUMBERS = {"sink", "scale", "eps", "dim", "window", "rotary_dim", "rotary_offset", "cp_size", "cp_rank",
           "ignore_index", "z_loss", "softcap", "vocab_size", "chunk_rows", "lr", "weight_decay",
           "step"}  # fmt: skip


def fails(*_: Any, **__: Any) -> None:
    raise KeyError("odd")


def cpu(*_: Any, **__: Any) -> tuple[int, int]:
    return 1, 0


def odd(**methods: Any) -> Any:
    return type("Odd", (), methods)()


def may_succeed(case: Case, name: str, what: str) -> bool:
    """Whether the spoiled argument may still mean something; then the result must be right."""
    if what == "None":
        return (
            name in OPTIONAL
            or (name == "weight" and "norm" in case.op)
            or (case.op.startswith(("rope", "attention")) and name in ("scale", "rotary_dim"))
        )
    if what == "True":
        return name in ("interleaved", "inverse", "fused", "inplace_backward", "causal", "return_lse")
    if what == "torch.arange(3)":
        return name in ("targets", "tokens", "position_ids", "start_positions", "cu_seqlens", "cu_seqlens_k")
    if what == "v.tolist()":
        return name in NUMBERS and case.args[name].shape == ()  # a number
    if what in SHAPES or what.startswith("torch.tensor"):
        names = (
            "x", "logits", "q", "k", "qkv", "sink", "a", "b", "weight", "bias", "residual", "factors", "t",
            "w1", "w2", "gate", "up",
        )  # fmt: skip
        return name in names or "v" in what or case.op == "adamw"  # a parameter without dimensions
    whole = what in ("2", "-7", "10**400", "-(10**30)") and name in NUMBERS
    factor = what in ("1.5", "nan", "inf") and name in ("scale", "sink", "z_loss", "softcap")
    return whole or factor or (what == "1.5" and name in ("eps", "lr", "weight_decay"))


def run_nonsense(case: Case) -> None:
    (name, index, what), function = case.how, function_of(case.op)
    args = fill(case.args, [t.build("cuda" if case.place == "gpu" else "cpu") for t in specs(case.args)])
    value = args[name] if index is None else args[name][index]
    with at(case.place):
        try:
            spoiled = eval(what, globals() | {"v": value, "nan": math.nan, "inf": math.inf})
        except (RuntimeError, IndexError, TypeError, OverflowError):
            return  # this value cannot be spoiled so

        def with_argument(v: Any) -> dict:
            return {**args, name: v if index is None else (*args[name][:index], v, *args[name][index + 1 :])}

        if what in itertools.chain(*TWINS.values()):
            same = with_argument(float(spoiled)) if what == "np.float32(v)" else args  # it may be rounded
            assert all(
                map(same_bits, outputs(function(**same)), outputs(function(**with_argument(spoiled))))
            ), "the result differs"
            return
        spoiled = with_argument(spoiled)
        try:
            outs = outputs(function(**spoiled))
        except (TypeError, ValueError) as error:
            assert len(str(error)) > 10, f"the error says nothing: {error!r}"
            return
    if what == "v.to('meta')" and len(specs(case.args)) == 1:
        assert all(o.is_meta for o in outs)
        return
    if case.place == "gpu" and case.op == "attention_varlen" and name.startswith("cu_seqlens"):
        return  # nothing reads the bounds there
    assert may_succeed(case, name, what), f"{name} = {what} was accepted"
    exact = {k: v for k, v in spoiled.items() if k != "version"}
    exact = pytree.tree_map(
        lambda v: cast(DOUBLE, [v.detach()])[0] if isinstance(v, torch.Tensor) else v, exact
    )
    try:
        right = outputs(FUZZED[case.op][1](**exact))
    except IndexError:
        return  # a token outside of the table
    for o, e in zip(outs, right, strict=True):
        eps = 50 * torch.finfo(getattr(torch, specs(case.args)[0].dtype)).eps
        torch.testing.assert_close(o.detach().cpu(), e.to(o.dtype), rtol=eps, atol=eps, equal_nan=True)


# ---- transforms: f maps tensors to one


TRANSFORMS = (
    "jvp", "dual", "vjp", "vmap", "vmap of grad", "jacrev", "jacfwd", "hessian", "twice", "checkpoint",
)  # fmt: skip
REFUSED: list[str] = []


def transformed(name: str, f: Any, xs: list) -> Any:
    """The results of a transform of f at xs, with random tangents, gradients and batches."""
    every, leaves = tuple(range(len(xs))), [x.detach().requires_grad_() for x in xs]
    dims = [int(torch.randint(x.ndim + 1, ())) if torch.rand(()) < 0.6 else None for x in xs]
    dims = tuple(dims if any(d is not None for d in dims) else [0, *dims[1:]])
    many = [
        x if d is None else torch.stack([random(x) for _ in range(3)], d)
        for x, d in zip(xs, dims, strict=True)
    ]
    tangents, g = [random(x) for x in xs], random(f(*xs))
    if name == "dual":
        with forward_ad.dual_level():
            duals = [
                x if d is None else forward_ad.make_dual(x, t)
                for x, d, t in zip(xs, dims, tangents, strict=True)
            ]
            out = forward_ad.unpack_dual(f(*duals))
            return out.primal, torch.zeros_like(out.primal) if out.tangent is None else out.tangent
    if name == "vjp":
        return torch.func.vjp(f, *xs)[1](g)
    if name == "vmap of grad":
        return torch.func.vmap(torch.func.grad(lambda *ys: (f(*ys) * g).sum(), every), dims)(*many)
    if name == "hessian":
        return torch.func.hessian(lambda *ys: (f(*ys) * g).sum(), every)(*xs)
    if name == "twice":
        g.requires_grad_()
        first = torch.autograd.grad(f(*leaves), leaves, g, create_graph=True)
        total = sum((d * t).sum() for d, t in zip(first, tangents, strict=True))
        return *first, *torch.autograd.grad(total, [*leaves, g], materialize_grads=True)
    if name == "checkpoint":
        torch.utils.checkpoint.checkpoint(f, *leaves, use_reentrant=dims[0] is None).backward(g)
        # None: a sum over no terms
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    if name == "jvp":
        return torch.func.jvp(f, tuple(xs), tuple(tangents))
    return torch.func.vmap(f, dims)(*many) if name == "vmap" else getattr(torch.func, name)(f, every)(*xs)


def random(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, dtype=torch.float64).to(x)


def run_transforms(case: Case) -> None:
    (name, seed), args = case.how, case.args
    tensors = [t.build("cuda" if case.place == "gpu" else "cpu") for t in specs(args)]
    where = [i for i, t in enumerate(specs(args)) if t.grad]

    def run(function: Any, args: dict, tensors: list) -> list:
        def f(*some: torch.Tensor) -> torch.Tensor:
            every = list(tensors)
            for i, x in zip(where, some, strict=True):
                every[i] = x
            found = [o.flatten() for o in outputs(function(**fill(args, every)))]
            # torch's cat fails in jacfwd of an empty tensor
            return found[0] if len(found) == 1 else torch.cat(found)

        torch.manual_seed(seed)
        return [
            t.detach().cpu() for t in pytree.tree_leaves(transformed(name, f, [tensors[i] for i in where]))
        ]

    try:
        exact = run(
            FUZZED[case.op][1], {k: v for k, v in args.items() if k != "version"}, cast(DOUBLE, tensors)
        )
    except (RuntimeError, IndexError):
        return  # torch cannot, as of some empty tensors
    with at(case.place):
        try:
            ours = run(function_of(case.op), args, tensors)
        except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            assert any(
                word in str(error) for word in (case.op, "vmap", "jvp", "forward", "transform", "derivative")
            ), f"unclear: {error!r}"
            return REFUSED.append(f"{case.op} refused {name}: {str(error)[:100]}")
    for a, b in zip(ours, exact, strict=True):
        limit = 1e-9 if a.dtype == torch.float64 else 1e-3
        torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit)


# ---- drawing, running and reporting


RUN = {"valid": run_valid, "nonsense": run_nonsense, "transforms": run_transforms}


@st.composite
def cases(draw: Any, op: str, places: tuple[str, ...], kinds: tuple[str, ...]) -> Case:
    # which is not differentiable
    kinds = tuple(kind for kind in kinds if kind != "transforms" or op != "adamw") or ("valid",)
    d = Draw(draw, op, draw(st.sampled_from(places)), draw(st.sampled_from(kinds)))
    args, index = FUZZED[op][0](d), None
    if d.kind == "valid":
        size = d.size_of(specs(args)[0].dtype) if d.pick(False, False, True) else 1.0
        return Case(op, d.place, d.kind, args, (d.integer(0, 99), d.pick(1, 2, 0), *[size][: size != 1]))
    if d.kind == "transforms":
        # has a gradient, if nothing else has
        first = next(k for k in ("x", "a", "t", "gate", "weight", "logits", "q", "qkv") if k in args)
        args |= (
            {} if any(t.grad for t in specs(args)) else {first: dataclasses.replace(args[first], grad=True)}
        )
        return Case(op, d.place, d.kind, args, (d.pick(*TRANSFORMS), d.integer(0, 99)))
    args = pytree.tree_map(lambda v: dataclasses.replace(v, grad=False) if isinstance(v, T) else v, args)
    name = d.pick(*args)
    value = args[name]
    if isinstance(value, tuple) and isinstance(value[0], T) and d.pick(True, False):
        index = d.integer(0, len(value) - 1)
        value = value[index]
    twins = TWINS.get(type(value), ()) if name != "version" else ()
    return Case(
        op,
        d.place,
        d.kind,
        args,
        (name, index, d.pick(*ANYTHING, *twins, *twins, *(TENSORS + SHAPES) * isinstance(value, T))),
    )


def fuzz(
    op: str,
    count: int,
    seed: int,
    places: tuple[str, ...] = PLACES,
    kinds: tuple[str, ...] = tuple(RUN),
    verbose: bool = False,
) -> list:
    """The failures of so many cases, each shrunk."""
    failures: list[str] = []

    def one(case: Case) -> None:
        if verbose:
            print(case, flush=True)
        faulthandler.dump_traceback_later(300, exit=True)
        try:
            RUN[case.kind](case)
        except Exception as error:
            raise AssertionError(f"{case!r}\n    {type(error).__name__}: {str(error)[:400]}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()

    for start in range(0, count, 100):  # hypothesis ends at a failure, once it has shrunk it
        settings = hypothesis.settings(
            max_examples=min(100, count - start), deadline=None, database=None, print_blob=False,
            derandomize=False, suppress_health_check=list(hypothesis.HealthCheck),
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        )  # fmt: skip
        try:
            hypothesis.seed(seed * 1_000_003 + start)(
                settings(hypothesis.given(cases(op, places, kinds))(one))
            )()
        except Exception as error:
            failures += [str(e) for e in getattr(error, "exceptions", [error])]
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=", ".join(FUZZED))
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=RUN)
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument("--verbose", action="store_true", help="print each case before it runs")
    parser.add_argument("--case", help="run this one again")
    options = parser.parse_args()
    faulthandler.enable()
    if options.case:
        case = eval(options.case)
        return RUN[case.kind](case) or 0
    ops, total = options.ops or list(FUZZED), 0
    places = (options.place,) if options.place else PLACES
    kinds = (options.kind,) if options.kind else tuple(RUN)
    for i, op in enumerate(ops):
        begin, count = time.time(), options.cases * (i + 1) // len(ops) - options.cases * i // len(ops)
        failures = fuzz(op, count, options.seed, places, kinds, options.verbose)
        print(
            f"{op}: {count} cases, {len(failures)} failures, {time.time() - begin:.0f} s",
            *failures,
            sep="\n  ",
            flush=True,
        )
        total += len(failures)
    print(*(f"{line} ({count} times)" for line, count in collections.Counter(REFUSED).items()), sep="\n")
    print(f"{options.cases} cases, {total} failures")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
