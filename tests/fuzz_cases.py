"""What the fuzzer draws: tensors, which a case describes in Python, and the arguments of each op."""

import dataclasses
import itertools
import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from cukern.runtime.registry import CASES

# where an op runs: plain torch on the CPU, and kernels
PLACES = ("reference", "gpu" if torch.cuda.is_available() else "sim")
FLOATS, IDS = ("float32", "float16", "bfloat16", "float64"), ("int32", "int64")


@dataclasses.dataclass(frozen=True)
class T:
    """A tensor of a case. `order`: its dimensions from the outermost in memory; `steps`: of each dimension, 2
    to leave out every other element, 0 to expand one; `offset`: elements of its memory before it. `values`: a
    kind of random numbers, or the numbers; `size`: a factor of random ones, which stay finite."""

    shape: tuple[int, ...]
    dtype: str
    values: Any = "normal"
    seed: int = 0
    grad: bool = False
    order: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    offset: int = 0
    size: float = 1.0

    def __repr__(self) -> str:
        given = [
            f"{f.name}={v!r}"
            for f in dataclasses.fields(self)[2:]
            if (v := getattr(self, f.name)) != f.default
        ]
        return f"T({', '.join([repr(self.shape), repr(self.dtype), *given])})"

    def build(self, device: str = "cpu") -> torch.Tensor:
        rank, dtype = len(self.shape), getattr(torch, self.dtype)
        order, steps = self.order or range(rank), self.steps or (1,) * rank
        sizes = [n * s if s else 1 for n, s in zip(self.shape, steps, strict=True)]
        memory = self.draw(self.offset + math.prod(sizes), dtype).to(device)
        x = (
            memory[self.offset :]
            .view([sizes[i] for i in order])
            .permute(sorted(range(rank), key=list(order).__getitem__))
        )
        return x[tuple(slice(None, None, s or 1) for s in steps)].expand(self.shape)

    def draw(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(self.values, str):
            return torch.tensor(self.values, dtype=dtype).flatten()
        g = torch.Generator().manual_seed(self.seed)
        x = torch.randn(n, generator=g, dtype=torch.complex128 if dtype.is_complex else torch.float64)
        u = torch.rand(n, generator=g)
        if self.values == "ties":
            x = (2 * x.real).round().to(x.dtype)
        elif self.values == "zeros":
            x = x * (u < 0.3)
        elif self.values == "squares":
            x = x * x
        elif self.values in ("wild", "special"):
            x = x * 10.0 ** ((2 * u.double() - 1) * {torch.float16: 3, torch.float64: 60}.get(dtype, 20))
        elif self.values == "hidden":
            x[u < 0.4] = -math.inf
        if self.values == "special":
            info = torch.finfo(dtype)
            most = min(info.max, 1e150)
            for i, v in enumerate(
                (math.inf, -math.inf, math.nan, most, -most, info.tiny, info.tiny * info.eps, -0.0)
            ):
                x[(u * 40).int() == i] = v
        if self.size != 1:
            most = torch.finfo(dtype).max
            x = (
                x * self.size
                if dtype.is_complex
                else torch.where(x.abs() < math.inf, (x * self.size).clamp(-most, most), x)
            )
        return x.to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    op: str
    place: str
    kind: str
    args: dict[str, Any]
    # valid: seed, steps and size of the gradients; nonsense: argument, index, expression; transforms: name
    # and seed
    how: Any = None


class Draw:
    """What draws a case: `pick` one of several, the simplest first, or sizes, tensors and so on."""

    def __init__(self, draw: Any, op: str, place: str, kind: str):
        self.draw, self.op, self.place, self.kind = draw, op, place, kind
        self.sizes = (
            (1, 2, 3, 0)
            if kind == "transforms"
            else (1, 2, 3, 4, 0, 5, 7, 8) + (() if place == "sim" else (17, 33))
        )

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def integer(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def size(self) -> int:
        return self.pick(*self.sizes)

    def shape(self, least: int, most: int) -> tuple[int, ...]:
        rank = self.integer(least, most)
        return tuple(self.pick(*self.sizes[: 6 if rank > 2 else None]) for _ in range(rank))

    def version(self, most: int = 1) -> Any:
        if self.place == "reference":
            return self.pick(None, "v1", "v2") if "kron" in self.op or "lokr" in self.op else None
        known = (
            None,
            *CASES[
                {"lokr_linear": "kron_linear"}.get(self.op, self.op if self.op in CASES else "rope")
            ].op.versions,
        )
        return (
            tuple(self.pick(*known) for _ in range(2))
            if most == 2 and self.pick(False, True)
            else self.pick(*known)
        )

    def dtype(self, *dtypes: str) -> str:
        return (
            self.pick("float64", "float32") if self.kind == "transforms" else self.pick(*(dtypes or FLOATS))
        )

    def tensor(
        self,
        shape: tuple[int, ...],
        dtype: str,
        *kinds: str,
        grad: bool = True,
        expand: bool = True,
        sized: bool = True,
    ) -> T:
        rank, values = len(shape), self.pick("normal", *(kinds if self.kind == "valid" else ()))
        t = T(tuple(shape), dtype, values, self.integer(0, 99), grad and self.pick(True, False))
        if sized and self.kind == "valid" and self.pick(False, False, True):
            t = dataclasses.replace(t, size=self.size_of(dtype))
        if self.pick(True, True, False):
            return t
        steps = tuple(self.pick(1, 2, *[0] * (expand and self.kind != "transforms")) for _ in shape)
        return dataclasses.replace(
            t, order=tuple(self.draw(st.permutations(range(rank)))), steps=steps, offset=self.integer(0, 3)
        )

    def size_of(self, dtype: str) -> float:
        """A power of ten, from 1e-40 to the largest number of the dtype."""
        most = float(torch.finfo(getattr(torch, dtype)).max) if dtype in FLOATS else 1e10
        exponent = self.integer(-40, int(math.log10(most)) + 1)
        return 10.0**exponent if exponent <= math.log10(most) else most

    def ids(self, shape: tuple[int, ...], most: int) -> T:
        return T(shape, self.pick(*IDS), tuple(self.integer(0, most) for _ in range(math.prod(shape))))


def draw_square(d: Draw) -> dict:
    return {"x": d.tensor(d.shape(0, 4), d.dtype(), "special", "wild"), "version": d.version()}


SCALES = (1.0, 0.125, -1.5, 3, 0.0, 1e-40, 1e4, 3e38)


def draw_softmax(d: Draw) -> dict:
    shape = list(d.shape(0, 4))
    dim = d.integer(-max(1, len(shape)), max(0, len(shape) - 1))
    if d.kind == "valid" and shape and d.pick(False, False, True):
        shape[dim] = d.pick(31, 64, 65, 130, 300, *([1025, 4100] if d.place != "sim" else []))
        shape = [min(n, 3) if i != dim % len(shape) else n for i, n in enumerate(shape)]
    x = d.tensor(tuple(shape), d.dtype(), "ties", "hidden", "wild", "special")
    return {
        "x": x,
        "dim": dim,
        "scale": d.pick(*SCALES[: 5 if d.kind == "transforms" else None]),
        "version": d.version(2),
    }


def draw_causal(d: Draw) -> dict:
    batch = d.shape(0, 2)
    queries = d.size()
    keys = d.pick(*d.sizes, *([] if d.kind == "transforms" else [40, 70]))
    dtype = d.dtype()
    x = d.tensor((*batch, queries, keys), dtype, "ties", "hidden", "wild", "special")
    leading = tuple(d.pick(n, 1) for n in batch[d.integer(0, len(batch)) :])
    sink = d.pick(
        None, 0.0, -2.5, 70, d.tensor(leading, dtype if d.kind == "transforms" else d.dtype(), "wild")
    )
    scale = abs(d.pick(*SCALES[: 5 if d.kind == "transforms" else None]))
    return {
        "x": x,
        "scale": scale,
        "window": d.pick(None, 1, 2, 5, 1000),
        "sink": sink,
        "version": d.version(2),
    }


def draw_attention(d: Draw) -> dict:
    batch, queries, features, dtype = d.shape(0, 2), d.size(), d.size(), d.dtype()
    keys, group = max(0, queries + d.pick(0, 0, 1, 3, -1)), d.pick(1, 1, 2, 3)
    heads = (*batch[:-1], batch[-1] * group) if batch else ()
    if d.op == "attention_packed":
        qkv = d.tensor((d.size(), queries, 3, d.size(), features), dtype)
        args, values, heads = {"qkv": qkv}, features, (qkv.shape[3],)
    elif d.op == "attention_varlen":
        lengths, kv_heads, same = [d.size() for _ in range(d.integer(1, 4))], d.size(), d.pick(True, False)
        key_lengths = lengths if same else [d.size() for _ in lengths]
        values = d.pick(features, d.size())
        heads = (kv_heads * group,)
        shapes = (
            (sum(lengths), *heads, features),
            *((sum(key_lengths), kv_heads, n) for n in (features, values)),
        )
        ends = [tuple(itertools.accumulate(some, initial=0)) for some in (lengths, key_lengths)]
        q, k, v, *bounds = (
            *(d.tensor(s, dtype) for s in shapes),
            *(T((len(end),), d.pick(*IDS), end) for end in ends),
        )
        args = {"q": q, "k": k, "v": v, "cu_seqlens": bounds[0], "cu_seqlens_k": None if same else bounds[1]}
    else:
        values = d.pick(features, d.size())
        q, k, v = (
            d.tensor(s, dtype)
            for s in ((*heads, queries, features), (*batch, keys, features), (*batch, keys, values))
        )
        args = {"q": q, "k": k, "v": v}
        if d.pick(False, False, True):
            args["key_lengths"] = dataclasses.replace(d.ids(batch[:-1], keys), dtype="int32")
    fits = dtype == "float64" or (0 < features <= 128 and features % 8 == 0 and features == values)
    version, causal, free = d.version(), d.pick(True, True, False), "key_lengths" not in args
    args |= {
        "scale": d.pick(None, 1.0, 0.125, 3, 0.0),
        "causal": causal,
        "softcap": d.pick(None, None, 5.0, 0.5),
    }
    args["window"] = d.pick(None, None, 1, 2, 1000) if causal and free else None
    args["sink"] = d.pick(
        None, None, 0.0, -2.5, d.tensor(heads[len(heads) - d.integer(0, len(heads)) :], dtype)
    )
    args["return_lse"] = d.pick(False, False, True)
    return {
        **args,
        "version": version
        if (fits or version not in ("v3", "v4")) and (free or version not in ("v1", "v2"))
        else None,
    }


def draw_cross_entropy(d: Draw) -> dict:
    rows = d.shape(0, 2)
    columns = d.pick(*(n for n in d.sizes if n), *([] if d.kind == "transforms" else [40, 70]))
    # which is refused: it may be torch's layout
    columns += d.op == "cross_entropy" and rows[1:] == (columns,) and columns > 1
    vocab, dtype, ignored = d.pick(None, max(1, columns - 2)), d.dtype(), d.pick(-100, 0)
    if d.op == "cross_entropy":
        args = {"logits": d.tensor((*rows, columns), dtype, "ties", "wild")}
        rest = {"inplace_backward": False}
    else:
        features, rest = d.size(), {"chunk_rows": d.pick(None, 1, 3)}
        args = {
            "x": d.tensor((*rows, features), dtype, "ties"),
            "weight": d.tensor((columns, features), dtype, "ties", "zeros"),
        }
    # a mean of nothing is NaN, and so may be its derivatives
    some = d.kind != "transforms" or (math.prod(rows) and ignored < 0)
    reductions = "sum", *["none"] * (d.op == "cross_entropy"), *["mean"] * bool(some)
    args |= {
        "targets": d.ids(rows, (vocab or columns) - 1),
        "reduction": d.pick(*reductions),
        "label_smoothing": d.pick(0.0, 0.125, 1),
    }
    args |= {
        "ignore_index": ignored,
        "z_loss": d.pick(0.0, 0.25, -1.5),
        "softcap": d.pick(None, 5.0, 0.5),
        "vocab_size": vocab,
        **rest,
    }
    return {**args, "version": d.version()}


def draw_adamw(d: Draw) -> dict:
    dtype = d.dtype()
    wide = "float32" if dtype in ("float16", "bfloat16") else dtype
    params = [
        dataclasses.replace(d.tensor(d.shape(0, 3), dtype, "zeros", grad=False), steps=())
        for _ in range(d.integer(1, 3))
    ]
    lists = {"params": params}
    for name, kind, values in (
        ("grads", dtype, "zeros"),
        ("exp_avgs", wide, "zeros"),
        ("exp_avg_sqs", wide, "squares"),
    ):
        lists[name] = [
            dataclasses.replace(p, dtype=kind, values=d.pick("normal", values), seed=d.integer(0, 99))
            for p in params
        ]
    lists["exp_avg_sqs"] = [dataclasses.replace(p, values="squares") for p in lists["exp_avg_sqs"]]
    numbers = {
        "lr": d.pick(1e-3, 0.5, 0.0),
        "betas": d.pick((0.9, 0.999), (0.0, 0.5)),
        "eps": d.pick(1e-8, 0.1),
    }
    rest = {
        "step": d.pick(1, 2, 1000, 2**24),
        **numbers,
        "weight_decay": d.pick(1e-2, 0.0, 0.5),
        "version": d.version(),
    }
    return {**{name: tuple(ts) for name, ts in lists.items()}, **rest}


def draw_rope(d: Draw) -> dict:
    b, s, h, kh, half = d.size(), d.size(), d.size(), d.size(), d.pick(1, 2, 3, 4, 8)
    layout, dtype, n = d.pick("bshd", "bhsd", "sbhd", "thd"), d.dtype(), 2 * half
    b, offset = 1 if layout == "thd" else b, d.pick(0, 0, 1, 2, 8)
    width, after = n // d.pick(2, 1), d.pick(0, 0, 1, 4)
    sizes = {"b": b, "s": s, "t": s, "h": h, "d": offset + n + after}
    place = {"expand": d.op == "rope"}
    x = d.tensor(tuple(sizes[c] for c in layout), dtype, "special", "wild", "zeros", **place)
    form = d.pick("cu", "ids") if layout == "thd" else d.pick("plain", "ids", "mrope", "rows", "starts")
    rows, args = s + d.pick(0, 2), {"x": x, "layout": layout}
    if form == "ids":
        rows, args["position_ids"] = rows + 1, d.ids(d.pick((s,), (b, s), (1, s)), rows)
    elif form == "mrope":
        first, second = sorted((d.integer(0, half), d.integer(0, half)))
        section = d.pick((first, half - first), (first, second - first, half - second))
        rows, args["mrope_section"], args["position_ids"] = (
            rows + 1,
            section,
            d.ids((len(section), d.pick(b, 1), s), rows),
        )
    elif form in ("cu", "starts"):
        count, rows = b, rows + 3
        if form == "cu":
            bounds = sorted(d.integer(0, s) for _ in range(d.integer(1, 4)))
            args["cu_seqlens"], count = T((len(bounds),), d.pick(*IDS), tuple(bounds)), len(bounds) - 1
        if form == "starts" or d.pick(False, True):
            args["start_positions"] = d.ids((count,), 3)
    table = {
        "shape": (d.pick(b, 1), s, width) if form == "rows" else (rows, width),
        "dtype": d.pick("float32", "float64", dtype),
    }
    args["cos"] = d.tensor(**table, grad=False, sized=False)
    args["sin"] = d.tensor(**table, grad=False, sized=False) if d.pick(True, True, False) else None
    if d.pick(False, True):
        args["k"] = d.tensor(tuple({**sizes, "h": kh}[c] for c in layout), dtype, "special", "wild", **place)
    if offset + after or d.pick(False, True):
        args |= {"rotary_dim": n, "rotary_offset": offset}
    args |= {
        "interleaved": d.pick(False, True),
        "inverse": d.pick(False, True),
        "scale": d.pick(None, 1.0, 0.5, 2, -3.0, 0.0),
    }
    return {**args, "version": d.version()}


def draw_te(d: Draw) -> dict:
    b = d.size()
    s = d.size()
    h = d.size()
    half = d.pick(1, 2, 3, 8)
    form = d.pick("sbhd", "bshd", "thd")
    dtype = d.dtype()
    cp = d.pick(1, 1, 2, 3)
    s, args = 2 * s if cp > 1 else s, {"tensor_format": form}
    sizes = {"b": b, "s": s, "t": s, "h": h, "d": 2 * half + d.pick(0, 0, 1, 4)}
    args["t"] = d.tensor(tuple(sizes[c] for c in form), dtype, "special", "wild", "zeros")
    count = b
    if form == "thd":
        bounds = sorted(d.integer(0, s // 2) * 2 * cp for _ in range(d.integer(1, 4)))
        args["cu_seqlens"], count = T((len(bounds),), d.pick(*IDS), tuple(bounds)), len(bounds) - 1
    if d.pick(False, True):
        args["start_positions"] = d.ids((count,), 3)
    args["freqs"] = d.tensor(
        (s * cp + 3, 1, 1, 2 * half), dtype if dtype != "bfloat16" else "float32", grad=False, sized=False
    )
    args |= {
        "interleaved": d.pick(False, True),
        "fused": d.pick(True, False),
        "cp_size": cp,
        "cp_rank": d.integer(0, cp - 1),
    }
    return {**args, "version": d.version()}


def draw_matmul(d: Draw) -> dict:
    dtype, rows, m, k, n = d.dtype(), d.shape(0, 2), d.size(), d.pick(*d.sizes, 40), d.size()
    a, b = (d.tensor(shape, dtype, "ties", "zeros", "wild", "special") for shape in ((*rows, m, k), (k, n)))
    return {"a": a, "b": b, "version": d.version()}


def draw_linear(d: Draw) -> dict:
    dtype, k, n = d.dtype(), d.pick(*d.sizes, 40), d.size()
    args = {
        "x": d.tensor((*d.shape(0, 3), k), dtype, "wild"),
        "weight": d.tensor((n, k), dtype, "zeros", "wild"),
    }
    return {
        **args,
        "bias": d.tensor((n,), dtype, "wild") if d.pick(True, False) else None,
        "version": d.version(),
    }


def draw_norm(d: Draw) -> dict:
    dtype, columns, rows = d.dtype(), d.pick(*d.sizes, 40, 67), d.shape(0, 3)
    wide = "float32" if dtype in ("float16", "bfloat16") and d.pick(False, True) else dtype
    weight = d.tensor((columns,), wide, "zeros") if d.pick(True, True, False) else None
    args = {"x": d.tensor((*rows, columns), dtype, "ties", "zeros"), "weight": weight}
    if d.op == "layernorm":
        args["bias"] = (
            d.tensor((columns,), wide, "zeros") if weight is not None and d.pick(True, False) else None
        )
    residual = d.tensor((*rows, columns), dtype, "ties") if d.pick(False, True) else None
    return {**args, "eps": d.pick(1e-5, 0.1, 3), "residual": residual, "version": d.version()}


SIZES = (
    ((2, 3),),
    ((1, 1),),
    ((8, 8),),
    ((3, 2), (2, 5)),
    ((2, 2), (4, 4)),
    ((2, 3), (1, 2), (3, 1)),
    ((2, 2),) * 4,
    ((16, 16), (4, 2)),
)


def epilogue(d: Draw, dtype: str, shape: tuple[int, ...]) -> dict:
    bias, residual = (
        d.tensor(s, dtype, "zeros") if d.pick(False, True) else None for s in (shape[-1:], shape)
    )
    return {"bias": bias, "residual": residual, "scale": d.pick(1.0, 0.5, -3, 0.0), "version": d.version()}


def draw_kron(d: Draw) -> dict:
    sizes, dtype = d.pick(*SIZES[: 6 if d.kind == "transforms" else None]), d.dtype(*FLOATS, "complex64")
    rows = d.shape(0, 2)
    samples = d.pick(False, False, True) and len(rows) > 0
    p, q = (math.prod(size[i] for size in sizes) for i in (0, 1))
    factors = tuple(
        d.tensor((*rows[: samples and d.integer(0, 1)], *size), dtype, "ties", "zeros") for size in sizes
    )
    end = epilogue(d, dtype, (*rows, q))
    end["version"] = d.pick(None, "v1", "v2") if dtype == "complex64" else end["version"]
    return {"x": d.tensor((*rows, p), dtype, "ties", "zeros"), "factors": factors, **end}


def draw_lokr(d: Draw) -> dict:
    ((p1, q1), (p2, q2)), dtype, rank = d.pick(*(s for s in SIZES if len(s) == 2)), d.dtype(), d.pick(1, 2, 5)
    rows = d.shape(0, 2)
    w1, w2 = (
        d.tensor((q, p), dtype, "ties", "zeros")
        if d.pick(True, False)
        else (d.tensor((q, rank), dtype), d.tensor((rank, p), dtype))
        for p, q in ((p1, q1), (p2, q2))
    )
    x = d.tensor((*rows, p1 * p2), dtype, "ties", "zeros")
    return {"x": x, "w1": w1, "w2": w2, **epilogue(d, dtype, (*rows, q1 * q2))}


def draw_gelu(d: Draw) -> dict:
    approximate, dtype, shape = d.pick("none", "tanh"), d.dtype(), d.shape(1, 3)
    shape = (*shape[:-1], d.pick(*d.sizes, *([] if d.kind == "transforms" else [16, 24, 40])))
    bias = (
        d.tensor(shape[-1:], d.pick(dtype, dtype if d.kind == "transforms" else "float32"), "zeros")
        if d.pick(True, False)
        else None
    )
    return {
        "x": d.tensor(shape, dtype, "special", "wild"),
        "bias": bias,
        "approximate": approximate,
        "version": d.version(),
    }


def draw_swiglu(d: Draw) -> dict:
    """Without an infinite `up`, for which the rule's derivative is the difference of two infinities."""
    approximate = "none" if d.op == "swiglu" else d.pick("none", "tanh")
    dtype = d.dtype()
    shape = d.shape(0, 3)
    pair = {"gate": d.tensor(shape, dtype, "special", "wild"), "up": d.tensor(shape, dtype, "zeros", "wild")}
    return {**pair, **({} if d.op == "swiglu" else {"approximate": approximate}), "version": d.version()}


def draw_embedding(d: Draw) -> dict:
    dtype, vocabulary, features, shape = d.dtype(), d.pick(3, 4, 9), d.size(), d.shape(0, 3)
    if d.kind == "valid" and d.pick(False, True):
        shape = (d.pick(67, 130, 200),)  # more than one chunk of sorted tokens
    tokens, table = d.ids(shape, vocabulary - 1), None
    if shape and d.pick(True, False):
        table = d.tensor((shape[-1] + d.pick(0, 2), features), dtype, "wild", "special", "zeros")
    weight = d.tensor((vocabulary, features), dtype, "wild", "special", "zeros")
    return {"weight": weight, "tokens": tokens, "positions": table, "version": d.version()}


def fill(args: dict, tensors: list) -> dict:
    """The arguments with tensors in place of their T."""
    tensors = iter(tensors)
    return pytree.tree_map(lambda v: next(tensors) if isinstance(v, T) else v, args)


def specs(args: dict) -> list[T]:
    return [v for v in pytree.tree_leaves(args) if isinstance(v, T)]
