"""A fuzzer of every public op: valid calls, nonsense and torch's transforms, compared with float64 in plain torch.

    python tests/fuzz.py --cases 20000                        # of all ops, kinds and places together
    python tests/fuzz.py softmax rope --kind valid --place sim --seed 7
    python tests/fuzz.py --case "Case('square', 'sim', 'valid', {'x': T((3, 0), 'float16')}, (0, 1))"

Hypothesis draws the cases and shrinks those that fail. A printed case is Python, which --case runs again; random values come from seeds in
it. The exit status is 1 after a failure. A hang of 5 minutes ends it. --verbose prints each case before it runs.
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

import hypothesis
import long_double
import numpy as np
import torch
from helpers import same_bits
from hypothesis import strategies as st
from rope_oracle import rotate, te_positions
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import cukern
from cukern.bench.calls import outputs
from cukern.bench.verify import poisoned
from cukern.runtime.registry import OPS

PLACES = ("reference", "gpu" if torch.cuda.is_available() else "sim")  # where an op runs: plain torch on the CPU, and kernels
FLOATS, IDS = ("float32", "float16", "bfloat16", "float64"), ("int32", "int64")
AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3), "thd": (0, 1, 2)}


@dataclasses.dataclass(frozen=True)
class T:
    """A tensor of a case. `order`: its dimensions from the outermost in memory; `steps`: of each dimension, 2 to leave out every other
    element, 0 to expand one; `offset`: elements of its memory before it. `values`: a kind of random numbers, or the numbers."""

    shape: tuple[int, ...]
    dtype: str
    values: Any = "normal"
    seed: int = 0
    grad: bool = False
    order: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    offset: int = 0

    def __repr__(self) -> str:
        given = [f"{f.name}={v!r}" for f in dataclasses.fields(self)[2:] if (v := getattr(self, f.name)) != f.default]
        return f"T({', '.join([repr(self.shape), repr(self.dtype), *given])})"

    def build(self, device: str = "cpu") -> torch.Tensor:
        rank, dtype = len(self.shape), getattr(torch, self.dtype)
        order, steps = self.order or range(rank), self.steps or (1,) * rank
        sizes = [n * s if s else 1 for n, s in zip(self.shape, steps, strict=True)]
        memory = self.draw(self.offset + math.prod(sizes), dtype).to(device)
        x = memory[self.offset :].view([sizes[i] for i in order]).permute(sorted(range(rank), key=list(order).__getitem__))
        return x[tuple(slice(None, None, s or 1) for s in steps)].expand(self.shape)

    def draw(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(self.values, str):
            return torch.tensor(self.values, dtype=dtype).flatten()
        g = torch.Generator().manual_seed(self.seed)
        x, u = torch.randn(n, generator=g, dtype=torch.complex128 if dtype.is_complex else torch.float64), torch.rand(n, generator=g)
        if self.values == "ties":
            x = (2 * x.real).round().to(x.dtype)
        elif self.values == "zeros":
            x = x * (u < 0.3)
        elif self.values in ("wild", "special"):
            x = x * 10.0 ** ((2 * u.double() - 1) * {torch.float16: 3, torch.float64: 60}.get(dtype, 20))
        elif self.values == "hidden":
            x[u < 0.4] = -math.inf
        if self.values == "special":
            info = torch.finfo(dtype)
            most = min(info.max, 1e150)
            for i, v in enumerate((math.inf, -math.inf, math.nan, most, -most, info.tiny, info.tiny * info.eps, -0.0)):
                x[(u * 40).int() == i] = v
        return x.to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    op: str
    place: str
    kind: str
    args: dict[str, Any]
    how: Any = None  # valid: seed and steps of the gradients; nonsense: argument, index, expression; transforms: name and seed


class Draw:
    """What draws a case: `pick` one of several, the simplest first, or sizes, tensors and so on."""

    def __init__(self, draw: Any, op: str, place: str, kind: str):
        self.draw, self.op, self.place, self.kind = draw, op, place, kind
        self.sizes = (1, 2, 3, 0) if kind == "transforms" else (1, 2, 3, 4, 0, 5, 7, 8) + (() if place == "sim" else (17, 33))

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
        known = (None, *OPS[{"lokr_linear": "kron_linear"}.get(self.op, self.op if self.op in OPS else "rope")].versions)
        return tuple(self.pick(*known) for _ in range(2)) if most == 2 and self.pick(False, True) else self.pick(*known)

    def dtype(self, *dtypes: str) -> str:
        return self.pick("float64", "float32") if self.kind == "transforms" else self.pick(*(dtypes or FLOATS))

    def tensor(self, shape: tuple[int, ...], dtype: str, *kinds: str, grad: bool = True, expand: bool = True) -> T:
        rank, values = len(shape), self.pick("normal", *(kinds if self.kind == "valid" else ()))
        t = T(tuple(shape), dtype, values, self.integer(0, 99), grad and self.pick(True, False))
        if self.pick(True, True, False):
            return t
        steps = tuple(self.pick(1, 2, *[0] * (expand and self.kind != "transforms")) for _ in shape)
        return dataclasses.replace(t, order=tuple(self.draw(st.permutations(range(rank)))), steps=steps, offset=self.integer(0, 3))

    def ids(self, shape: tuple[int, ...], most: int) -> T:
        return T(shape, self.pick(*IDS), tuple(self.integer(0, most) for _ in range(math.prod(shape))))


# ---- the ops: what to draw, and what is right. A rule takes tensors of one dtype, float64 for the truth


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
    return {"x": x, "dim": dim, "scale": d.pick(*SCALES[: 5 if d.kind == "transforms" else None]), "version": d.version(2)}


def draw_causal(d: Draw) -> dict:
    batch, queries, keys = d.shape(0, 2), d.size(), d.pick(*d.sizes, *([] if d.kind == "transforms" else [40, 70]))
    dtype = d.dtype()
    x = d.tensor((*batch, queries, keys), dtype, "ties", "hidden", "wild", "special")
    leading = tuple(d.pick(n, 1) for n in batch[d.integer(0, len(batch)) :])
    sink = d.pick(None, 0.0, -2.5, 70, d.tensor(leading, dtype if d.kind == "transforms" else d.dtype(), "wild"))
    scale = abs(d.pick(*SCALES[: 5 if d.kind == "transforms" else None]))
    return {"x": x, "scale": scale, "window": d.pick(None, 1, 2, 5, 1000), "sink": sink, "version": d.version(2)}


def hidden_of(x, window):
    (queries, keys), (i, j) = x.shape[-2:], (torch.arange(n) for n in x.shape[-2:])
    ahead = j - (i[:, None] + keys - queries)
    return (ahead > 0) | (ahead <= -min(window or 1 << 40, 1 << 40))


def with_sink(z, sink):
    sink = torch.as_tensor(-math.inf if sink is None else sink if isinstance(sink, torch.Tensor) else float(sink)).to(z.dtype)
    return torch.cat((z, sink[(..., *(None,) * min(2, z.ndim))].expand(*z.shape[:-1], 1)), -1)


def causal_softmax(x, scale=1.0, window=None, sink=None):
    hidden = hidden_of(x, window)
    z = with_sink((x.masked_fill(hidden, 0.0) * float(scale)).masked_fill(hidden, -math.inf), sink)
    return masked_softmax(z)[..., :-1].masked_fill(hidden, 0.0)


def masked_softmax(z):
    """A row of -inf alone gives 0."""
    most = z.detach().amax(-1, keepdim=True)
    e = (z - most.masked_fill(most == -math.inf, 0.0)).exp()
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def draw_attention(d: Draw) -> dict:
    batch, queries, features, dtype = d.shape(0, 2), d.size(), d.size(), d.dtype()
    keys, group = max(0, queries + d.pick(0, 0, 1, 3, -1)), d.pick(1, 1, 2, 3)
    heads = (*batch[:-1], batch[-1] * group) if batch else ()
    if d.op == "attention_packed":
        qkv = d.tensor((d.size(), queries, 3, d.size(), features), dtype)
        args, fits, heads = {"qkv": qkv}, 0 < features <= 128 and features % 8 == 0, (qkv.shape[3],)
    else:
        q, k, v = (d.tensor(s, dtype) for s in ((*heads, queries, features), (*batch, keys, features), (*batch, keys, d.size())))
        args, fits = {"q": q, "k": k, "v": v}, 0 < features <= 128 and features % 8 == 0 and features == v.shape[-1]
    version, causal, fits = d.version(), d.pick(True, True, False), fits or dtype == "float64"
    args |= {"scale": d.pick(None, 1.0, 0.125, 3, 0.0), "causal": causal, "softcap": d.pick(None, None, 5.0, 0.5)}
    args["window"] = d.pick(None, None, 1, 2, 1000) if causal else None
    args["sink"] = d.pick(None, None, 0.0, -2.5, d.tensor(heads[len(heads) - d.integer(0, len(heads)) :], dtype))
    return {**args, "version": version if fits or version not in ("v3", "v4") else None}


def attention_weights(q, k, v, scale, causal, softcap, window, sink):
    """Also k and v, with each head repeated, and the last column, the sink's."""
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale))
    scores = scores if softcap is None else float(softcap) * torch.tanh(scores / float(softcap))
    hidden = hidden_of(scores, window) & torch.tensor(causal)
    return masked_softmax(with_sink(scores.masked_fill(hidden, -math.inf), sink)), k, v


def attention(q, k, v, scale=None, causal=True, softcap=None, window=None, sink=None):
    weights, _, v = attention_weights(q, k, v, scale, causal, softcap, window, sink)
    return weights[..., :-1] @ v


def attention_packed(qkv, **options):
    return attention(*(t.transpose(1, 2) for t in qkv.unbind(2)), **options).transpose(1, 2)


def attention_scales(dout, q, k, v, scale, sink, **rest):
    """The sums of the absolute values of all terms. Each exponent's rounding is part of its row. A softcap's slope is at most 1."""
    kv_heads, (p, k, v) = k.shape[-3:-2], attention_weights(q, k, v, scale, sink=sink, **rest)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    q, k, v, g = (t.abs() for t in (q, k, v, dout))
    p = p * (1 + (q @ k.mT * scale).sum(-1, keepdim=True) + (abs(torch.as_tensor(0.0 if sink is None else sink))[..., None, None]))
    p, column = p[..., :-1], p[..., -1:]
    dp = g @ v.mT
    total = (p * dp).sum(-1, keepdim=True)
    ds = scale * p * (dp + total)
    dk, dv = (t.unflatten(-3, (*kv_heads, -1)).sum(-3) if kv_heads and any(kv_heads) else t for t in (ds.mT @ q, p.mT @ g))
    dsink = [(column * total).sum((-2, -1)).sum_to_size(sink.shape)] if isinstance(sink, torch.Tensor) else []
    return [p @ v, ds @ k, dk, dv, *dsink]


def packed_scales(dout, qkv, **options):
    out, *grads = attention_scales(dout.transpose(1, 2), *(t.transpose(1, 2) for t in qkv.unbind(2)), **options)
    return [out.transpose(1, 2), torch.stack([t.transpose(1, 2) for t in grads[:3]], 2), *grads[3:]]


def softmax_scales(name, dtype, args, douts):
    """What errors of the softmaxes are relative to: the exponents' rounding, in float32 of 16-bit types, is part of every term. `tiny`
    times the rounding is the error of a subnormal result, which the gradient multiplies: the backward gets the rounded result."""
    x, s, g, sink = args["x"], args["scale"], douts[0], args.get("sink")
    wide, tiny = (2.0**-13, max(1e-7, torch.finfo(dtype).tiny)) if dtype.itemsize == 2 else (1.0, torch.finfo(dtype).tiny)
    dim, log = (args["dim"] if x.ndim else -1) if "dim" in args else -1, name == "log_softmax"
    z, g = (t.movedim(dim, -1) if t.ndim else t[None] for t in (x * s, g))
    z = with_sink(z if "dim" in args else z.masked_fill(hidden_of(x, args["window"]), -math.inf), sink)
    z, g = z.clamp(-1e300, 1e300), with_sink(g, 0.0).abs()
    y, most = z.softmax(-1).nan_to_num(0.0), z.abs().masked_fill(z == -1e300, 0.0)
    loss = z - z.logsumexp(-1, keepdim=True)
    a = 1 + wide * (most + most.amax(-1, keepdim=True)) + (loss.abs().clamp(max=1e4) if log else 0)
    total = (a * y * g).sum(-1, keepdim=True) + a * (y * g).sum(-1, keepdim=True) + tiny * g.sum(-1, keepdim=True)
    total = a * y * g.sum(-1, keepdim=True) + (a * y * g.sum(-1, keepdim=True)).sum(-1, keepdim=True) * y if log else total * y
    dx = abs(s) * (total + (g if log else a * y * g + tiny * g))
    back = [t[..., :-1].movedim(-1, dim) if x.ndim else t[0] for t in (a * loss.abs() + a if log else a * y, dx)]
    if not isinstance(sink, torch.Tensor):
        return back
    return [*back, ((total + a * y * g)[..., -1].sum(-1)).sum_to_size(sink.shape)]


def draw_cross_entropy(d: Draw) -> dict:
    rows, columns = d.shape(0, 2), d.pick(*(n for n in d.sizes if n), *([] if d.kind == "transforms" else [40, 70]))
    vocab = d.pick(None, max(1, columns - 2))
    args = {"logits": d.tensor((*rows, columns), d.dtype(), "ties", "wild"), "targets": d.ids(rows, (vocab or columns) - 1)}
    ignored = d.pick(-100, 0)
    some = d.kind != "transforms" or (math.prod(rows) and ignored < 0)  # a mean of nothing is NaN, and so may be its derivatives
    args |= {"reduction": d.pick("sum", "none", *["mean"] * bool(some)), "label_smoothing": d.pick(0.0, 0.125, 1)}
    args |= {
        "ignore_index": ignored,
        "z_loss": d.pick(0.0, 0.25, -1.5),
        "softcap": d.pick(None, 5.0, 0.5),
        "vocab_size": vocab,
        "inplace_backward": False,
    }
    return {**args, "version": d.version()}


def cross_entropy_terms(logits, targets, ignore_index, smoothing, softcap, vocab):
    """What is not a number in `share` and `valid`: the logits, each class's share, and which rows count."""
    c, flat = logits[..., :vocab].reshape(-1, vocab or logits.shape[-1]), targets.reshape(-1).long()
    c = c if softcap is None else softcap * torch.tanh(c / softcap)
    share = (torch.arange(c.shape[1]) == flat[:, None]).to(c.dtype) * (1 - float(smoothing)) + c.new_full((), float(smoothing)) / c.shape[1]
    outside = (flat != ignore_index) & ((flat < 0) | (flat >= c.shape[1]))
    return c, share.masked_fill(outside[:, None], math.nan), flat != ignore_index


def reduced(rows, valid, reduction, shape):
    rows = rows.masked_fill(~valid, 0.0)
    return rows.view(shape) if reduction == "none" else rows.sum() / (valid.sum() if reduction == "mean" else 1)


def cross_entropy(logits, targets, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, vocab_size=None,
                  inplace_backward=False):  # fmt: skip
    softcap = None if softcap is None else float(softcap)
    c, share, valid = cross_entropy_terms(logits, targets, ignore_index, label_smoothing, softcap, vocab_size)
    rows = -(share * c.log_softmax(-1)).sum(-1) + float(z_loss) * c.logsumexp(-1).square()
    return reduced(rows, valid, reduction, targets.shape)


def cross_entropy_scales(dtype, args, douts):
    """The terms' absolute values, with the exponents' rounding in float32 and without the softcap's slope, which is at most 1."""
    x, shape, z = args["logits"], args["targets"].shape, abs(args["z_loss"])
    c, share, valid = cross_entropy_terms(
        x, args["targets"], args["ignore_index"], args["label_smoothing"], args["softcap"], args["vocab_size"]
    )
    lse, wide = c.logsumexp(-1, keepdim=True), 2.0**-10 if dtype.itemsize == 2 else 1.0
    rows = (lse.abs() + z * lse.square())[:, 0] + (share * c.abs()).sum(-1)
    g = (
        douts[0].reshape(-1)
        if args["reduction"] == "none"
        else douts[0].expand(len(c)) / (valid.sum() if args["reduction"] == "mean" else 1)
    )
    p = (c - lse).exp() * (1 + wide * ((c - lse).abs().clamp(max=1e3) + (args["softcap"] or 0.0))) + 1e-30 * (dtype != torch.float64)
    dx = (g.abs() * valid)[:, None] * ((1 + 2 * z * lse.abs()) * p + share)
    dx = torch.nn.functional.pad(dx, (0, x.shape[-1] - c.shape[1])).view(x.shape)
    return [reduced(rows, valid, args["reduction"], shape), dx, None]


def rounded_cross_entropy(logits, targets, **rest):
    """The loss in logits' dtype, as the fuzzer expects."""
    loss = cukern.cross_entropy(logits, targets, **rest)
    return loss.to(logits.dtype) if isinstance(logits, torch.Tensor) else loss


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
        rows, args["mrope_section"], args["position_ids"] = rows + 1, section, d.ids((len(section), d.pick(b, 1), s), rows)
    elif form in ("cu", "starts"):
        count, rows = b, rows + 3
        if form == "cu":
            bounds = sorted(d.integer(0, s) for _ in range(d.integer(1, 4)))
            args["cu_seqlens"], count = T((len(bounds),), d.pick(*IDS), tuple(bounds)), len(bounds) - 1
        if form == "starts" or d.pick(False, True):
            args["start_positions"] = d.ids((count,), 3)
    table = {"shape": (d.pick(b, 1), s, width) if form == "rows" else (rows, width), "dtype": d.pick("float32", "float64", dtype)}
    args["cos"] = d.tensor(**table, grad=False)
    args["sin"] = d.tensor(**table, grad=False) if d.pick(True, True, False) else None
    if d.pick(False, True):
        args["k"] = d.tensor(tuple({**sizes, "h": kh}[c] for c in layout), dtype, "special", "wild", **place)
    if offset + after or d.pick(False, True):
        args |= {"rotary_dim": n, "rotary_offset": offset}
    args |= {"interleaved": d.pick(False, True), "inverse": d.pick(False, True), "scale": d.pick(None, 1.0, 0.5, 2, -3.0, 0.0)}
    return {**args, "version": d.version()}


def rope(x, cos, sin=None, k=None, interleaved=False, rotary_dim=None, rotary_offset=0, position_ids=None, mrope_section=None,
         cu_seqlens=None, start_positions=None, layout="bshd", inverse=False, scale=None, cp_size=1, cp_rank=0, sign=0):  # fmt: skip
    """`sign`: for magnitudes, the tables' absolute values, and sin's times that."""
    cos, sin = (cos, sin) if sin is not None else (cos.double().cos(), cos.double().sin())
    cos, sin = (cos.abs(), sign * sin.abs()) if sign else (cos, sin)
    axes, half = AXES[layout], (x.shape[-1] if rotary_dim is None else rotary_dim) // 2
    packed = layout == "thd"
    batch, sequence = (1, len(x)) if packed else [x.shape[a] for a in axes[:2]]
    if mrope_section:
        section = torch.arange(len(mrope_section)).repeat_interleave(torch.tensor(mrope_section))
        rows = position_ids.long()[section].movedim(0, -1)
    elif position_ids is not None:
        rows = position_ids.long().expand(batch, sequence)[..., None].expand(-1, -1, half)
    else:
        starts, bounds = (None if t is None else t.tolist() for t in (start_positions, cu_seqlens))
        row = te_positions("thd" if packed else "bshd", (sequence,) if packed else (batch, sequence), starts, bounds, cp_size, cp_rank)
        rows = torch.tensor(row, dtype=torch.int64).view(batch, sequence, 1).expand(-1, -1, half)
    options = {"interleaved": interleaved, "offset": rotary_offset, "inverse": inverse, "scale": 1.0 if scale is None else float(scale)}

    def turned(x):
        y = rotate(x[None] if packed else x.permute(axes), cos, sin, rows, **options)
        return y[0] if packed else y.permute(axes)

    return turned(x) if k is None else (turned(x), turned(k))


def draw_te(d: Draw) -> dict:
    b, s, h, half, form, dtype = d.size(), d.size(), d.size(), d.pick(1, 2, 3, 8), d.pick("sbhd", "bshd", "thd"), d.dtype()
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
    args["freqs"] = d.tensor((s * cp + 3, 1, 1, 2 * half), dtype if dtype != "bfloat16" else "float32", grad=False)
    args |= {"interleaved": d.pick(False, True), "fused": d.pick(True, False), "cp_size": cp, "cp_rank": d.integer(0, cp - 1)}
    return {**args, "version": d.version()}


def te(t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False, fused=True, cu_seqlens=None, cp_size=1, cp_rank=0, sign=0):
    rest = {"layout": tensor_format, "rotary_dim": freqs.shape[-1], "interleaved": interleaved, "sign": sign}
    return rope(t, freqs[:, 0, 0], None, start_positions=start_positions, cu_seqlens=cu_seqlens, cp_size=cp_size, cp_rank=cp_rank, **rest)


def draw_matmul(d: Draw) -> dict:
    dtype, rows, m, k, n = d.dtype(), d.shape(0, 2), d.size(), d.pick(*d.sizes, 40), d.size()
    a, b = (d.tensor(shape, dtype, "ties", "zeros", "wild", "special") for shape in ((*rows, m, k), (k, n)))
    return {"a": a, "b": b, "version": d.version()}


def draw_linear(d: Draw) -> dict:
    dtype, k, n = d.dtype(), d.pick(*d.sizes, 40), d.size()
    args = {"x": d.tensor((*d.shape(0, 3), k), dtype, "wild"), "weight": d.tensor((n, k), dtype, "zeros", "wild")}
    return {**args, "bias": d.tensor((n,), dtype, "wild") if d.pick(True, False) else None, "version": d.version()}


def draw_norm(d: Draw) -> dict:
    dtype, columns, rows = d.dtype(), d.pick(*d.sizes, 40, 67), d.shape(0, 3)
    wide = "float32" if dtype in ("float16", "bfloat16") and d.pick(False, True) else dtype
    weight = d.tensor((columns,), wide, "zeros") if d.pick(True, True, False) else None
    args = {"x": d.tensor((*rows, columns), dtype, "ties", "zeros"), "weight": weight}
    if d.op == "layernorm":
        args["bias"] = d.tensor((columns,), wide, "zeros") if weight is not None and d.pick(True, False) else None
    residual = d.tensor((*rows, columns), dtype, "ties") if d.pick(False, True) else None
    return {**args, "eps": d.pick(1e-5, 0.1, 3), "residual": residual, "version": d.version()}


def rmsnorm(x, weight, bias=None, eps=1e-6, residual=None):
    s = x if residual is None else x + residual
    y = s * (s.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 if weight is None else weight) + (0 if bias is None else bias)
    return y if residual is None else (y, s)


def layernorm(x, weight, bias=None, eps=1e-5, residual=None):
    s = x if residual is None else x + residual
    y = rmsnorm(s - s.mean(-1, keepdim=True), weight, bias, eps)
    return y if residual is None else (y, s)


def norm_scales(name, args, douts):
    """The sums of the absolute values of the terms, times how much s, rounded to 16 bits, changes 1 / sqrt(variance)."""
    s = args["x"] if args["residual"] is None else args["x"] + args["residual"]
    w, b = (t.abs() if t is not None else float(t is args["weight"]) for t in (args["weight"], args.get("bias")))
    r = ((s - (s.mean(-1, keepdim=True) if name == "layernorm" else 0)).square().mean(-1, keepdim=True) + args["eps"]).rsqrt()
    n = r * (s.abs() + s.abs().mean(-1, keepdim=True))
    g, condition = douts[0].abs(), 1 + n.amax(-1, keepdim=True) if s.shape[-1] else 1
    h, rows = condition * g * w, tuple(range(s.ndim - 1))
    dx = r * (h + h.mean(-1, keepdim=True) + n * (n * h).mean(-1, keepdim=True)) + (douts[1].abs() if len(douts) > 1 else 0)
    grads = {"x": dx, "weight": (condition * g * n).sum(rows), "bias": g.sum(rows), "residual": dx}
    outs = [n * w + (b if isinstance(b, torch.Tensor) else 0), s.abs()][: len(douts)]
    return outs, [grads[k] for k, v in args.items() if isinstance(v, torch.Tensor)]


SIZES = ((2, 3),), ((1, 1),), ((8, 8),), ((3, 2), (2, 5)), ((2, 2), (4, 4)), ((2, 3), (1, 2), (3, 1)), ((2, 2),) * 4, ((16, 16), (4, 2))


def epilogue(d: Draw, dtype: str, shape: tuple[int, ...]) -> dict:
    bias, residual = (d.tensor(s, dtype, "zeros") if d.pick(False, True) else None for s in (shape[-1:], shape))
    return {"bias": bias, "residual": residual, "scale": d.pick(1.0, 0.5, -3, 0.0), "version": d.version()}


def draw_kron(d: Draw) -> dict:
    sizes, dtype = d.pick(*SIZES[: 6 if d.kind == "transforms" else None]), d.dtype(*FLOATS, "complex64")
    rows = d.shape(0, 2)
    samples = d.pick(False, False, True) and len(rows) > 0
    p, q = (math.prod(size[i] for size in sizes) for i in (0, 1))
    factors = tuple(d.tensor((*rows[: samples and d.integer(0, 1)], *size), dtype, "ties", "zeros") for size in sizes)
    end = epilogue(d, dtype, (*rows, q))
    end["version"] = d.pick(None, "v1", "v2") if dtype == "complex64" else end["version"]
    return {"x": d.tensor((*rows, p), dtype, "ties", "zeros"), "factors": factors, **end}


def kron_linear(x, factors, bias=None, scale=1.0, residual=None):
    if any(w.ndim == 3 for w in factors):
        each = [kron_linear(x[i], [w[i] if w.ndim == 3 else w for w in factors]) for i in range(x.shape[0])]
        y = torch.stack(each) if each else x.new_zeros(*x.shape[:-1], math.prod(w.shape[-1] for w in factors))
    else:
        w = functools.reduce(lambda a, b: (a[:, None, :, None] * b[:, None]).reshape(-1, a.shape[1] * b.shape[1]), factors)
        y = (x[None] @ w)[0]
    return y * float(scale) + (0 if bias is None else bias) + (0 if residual is None else residual)


def draw_lokr(d: Draw) -> dict:
    ((p1, q1), (p2, q2)), dtype, rank = d.pick(*(s for s in SIZES if len(s) == 2)), d.dtype(), d.pick(1, 2, 5)
    rows = d.shape(0, 2)
    w2 = d.tensor((q2, p2), dtype, "zeros") if d.pick(True, False) else (d.tensor((q2, rank), dtype), d.tensor((rank, p2), dtype))
    x, w1 = d.tensor((*rows, p1 * p2), dtype, "ties", "zeros"), d.tensor((q1, p1), dtype, "ties")
    return {"x": x, "w1": w1, "w2": w2, **epilogue(d, dtype, (*rows, q1 * q2))}


def lokr_linear(x, w1, w2, **rest):
    return kron_linear(x, (w1.mT, (w2[0] @ w2[1] if isinstance(w2, tuple) else w2).mT), **rest)


def draw_gelu(d: Draw) -> dict:
    approximate, dtype, shape = d.pick("none", "tanh"), d.dtype(), d.shape(1, 3)
    shape = (*shape[:-1], d.pick(*d.sizes, *([] if d.kind == "transforms" else [16, 24, 40])))
    bias = d.tensor(shape[-1:], d.pick(dtype, dtype if d.kind == "transforms" else "float32"), "zeros") if d.pick(True, False) else None
    return {"x": d.tensor(shape, dtype, *wild(d, approximate)), "bias": bias, "approximate": approximate, "version": d.version()}


def draw_swiglu(d: Draw) -> dict:
    """Without an infinite `up`, for which the rule's derivative is the difference of two infinities."""
    approximate, dtype, shape = "none" if d.op == "swiglu" else d.pick("none", "tanh"), d.dtype(), d.shape(0, 3)
    pair = {"gate": d.tensor(shape, dtype, *wild(d, approximate)), "up": d.tensor(shape, dtype, "zeros", "wild")}
    return {**pair, **({} if d.op == "swiglu" else {"approximate": approximate}), "version": d.version()}


def wild(d: Draw, approximate: str) -> tuple[str, ...]:
    """Kinds of values. torch's gradient of the approximation is NaN where the square of x overflows."""
    return ("zeros",) if d.place == "reference" and approximate == "tanh" else ("special", "wild")


def gated(gate, up=1.0, bias=None, approximate=None):
    """silu without `approximate`."""
    v = gate if bias is None else gate + bias
    two = v.new_full((), 2.0)
    if approximate == "none":
        return v * (torch.erfc(-v / two.sqrt()) / 2) * up
    square, factor = (v * v).clamp(max=1e4), (two / two.new_ones(()).atan()).sqrt()  # sqrt(8 / pi)
    return v * torch.sigmoid(v if approximate is None else factor * v * (1 + 0.044715 * square)) * up


def draw_embedding(d: Draw) -> dict:
    dtype, vocabulary, features, shape = d.dtype(), d.pick(3, 4, 9), d.size(), d.shape(0, 3)
    if d.kind == "valid" and d.pick(False, True):
        shape = (d.pick(67, 130, 200),)  # more than one chunk of sorted tokens
    tokens, table = d.ids(shape, vocabulary - 1), None
    if shape and d.pick(True, False):
        table = d.tensor((shape[-1] + d.pick(0, 2), features), dtype, "wild", "special", "zeros")
    weight = d.tensor((vocabulary, features), dtype, "wild", "special", "zeros")
    return {"weight": weight, "tokens": tokens, "positions": table, "version": d.version()}


def embedding(tokens, weight, positions=None):
    out = weight[tokens.long()]
    return out if positions is None else out + positions[: tokens.shape[-1]]


def rope_in_place(x, cos, sin, *, k=None, **rest):
    """rope_ of copies, which lie in memory as x and k do: autograd lets nobody write a leaf."""
    return cukern.rope_(copied(x), cos, sin, k=copied(k), **rest)


def copied(t):
    if isinstance(t, np.ndarray):
        return t.copy()
    if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or t.is_nested or t.is_quantized or t.is_neg() or t.is_meta:
        return t
    if torch._C._functorch.is_functorch_wrapped_tensor(t):  # which no plain memory can take
        return t.clone()
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


FUZZED = {  # name: what draws its arguments, what is right, and how many roundings an element may err more than torch
    "square": (draw_square, lambda x: x * x, 2),
    "softmax": (draw_softmax, lambda x, dim=-1, scale=1.0: (x * float(scale)).softmax(dim), 4),
    "log_softmax": (draw_softmax, lambda x, dim=-1, scale=1.0: (x * float(scale)).log_softmax(dim), 4),
    "causal_softmax": (draw_causal, causal_softmax, 4),
    "attention": (draw_attention, attention, 4),
    "attention_packed": (draw_attention, attention_packed, 4),
    "embedding": (draw_embedding, embedding, 2),
    "cross_entropy": (draw_cross_entropy, cross_entropy, 4),
    "rope": (draw_rope, rope, 2),
    "rope_": (draw_rope, rope, 2),
    "apply_rotary_pos_emb": (draw_te, te, 2),
    "matmul": (draw_matmul, lambda a, b: a @ b, 6),
    "linear": (draw_linear, lambda x, weight, bias=None: torch.nn.functional.linear(x[None], weight, bias)[0], 6),
    "gelu": (draw_gelu, lambda x, bias=None, approximate="none": gated(x, 1.0, bias, approximate), 16),  # torch's own, with tanh
    "swiglu": (draw_swiglu, gated, 4),
    "geglu": (draw_swiglu, lambda gate, up, approximate="none": gated(gate, up, None, approximate), 16),
    "layernorm": (draw_norm, layernorm, 6),
    "rmsnorm": (draw_norm, rmsnorm, 6),
    "kron_linear": (draw_kron, kron_linear, 6),
    "lokr_linear": (draw_lokr, lokr_linear, 6),
}


def function_of(op: str) -> Any:
    return {"rope_": rope_in_place, "cross_entropy": rounded_cross_entropy}.get(op) or getattr(cukern, op)


@contextlib.contextmanager
def at(place: str):
    with cukern.backend("sim" if place == "sim" else "gpu"), poisoned(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fill(args: dict, tensors: list) -> dict:
    """The arguments with tensors in place of their T."""
    tensors = iter(tensors)
    return pytree.tree_map(lambda v: next(tensors) if isinstance(v, T) else v, args)


def specs(args: dict) -> list[T]:
    return [v for v in pytree.tree_leaves(args) if isinstance(v, T)]


def results(function: Any, args: dict, tensors: list, douts: Any) -> list[torch.Tensor]:
    """The outputs, and the gradients of the tensors that have one, for the gradients `douts(outputs)`."""
    leaves = [x.detach().requires_grad_(t.grad) for x, t in zip(tensors, specs(args), strict=True)]
    outs = outputs(function(**fill(args, leaves)))
    wanted, some = [x for x in leaves if x.requires_grad], [o.requires_grad for o in outs]
    grads = list(itertools.compress(douts(outs), some))
    if not grads:
        return [*outs, *map(torch.zeros_like, wanted)]
    return [*(o.detach() for o in outs), *torch.autograd.grad(list(itertools.compress(outs, some)), wanted, grads, materialize_grads=True)]


def cast(dtypes: dict, tensors: list) -> list:
    return [x.cpu().to(dtypes.get(x.dtype, x.dtype)) for x in tensors]


NARROW = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
DOUBLE = dict.fromkeys((*NARROW, torch.float32), torch.float64) | {torch.complex64: torch.complex128}


def run_valid(case: Case) -> None:
    (_, rule, roundings), args, (seed, step) = FUZZED[case.op], case.args, case.how
    device, plain = "cuda" if case.place == "gpu" else "cpu", {k: v for k, v in args.items() if k != "version"}
    tensors, before = ([t.build(device) for t in specs(args)] for _ in range(2))

    def douts(outs: list) -> list:
        names = [str(o.dtype)[6:] for o in outs]
        layouts = [{"order": tuple(range(o.ndim))[:: -1 if step == 2 else 1], "steps": (step,) * o.ndim} for o in outs]
        return [T(tuple(o.shape), n, seed=seed, **lay).build(device) for o, n, lay in zip(outs, names, layouts, strict=True)]

    with at(case.place):
        ours, again = (results(function_of(case.op), args, tensors, douts) for _ in range(2))
    assert all(map(same_bits, tensors, before)), "an input was changed"
    assert all(map(same_bits, ours, again)), "two runs differ"
    given = [tensors[0].new_empty(o.shape) for o in ours if o is not None]  # each result's dtype is x's, or that of its input
    count = len(ours) - sum(t.grad for t in specs(args))
    grads = douts(given[:count])
    longer = long_double.exact if any(t.dtype == "float64" for t in specs(args)) else lambda x: x
    xs, douts64 = (list(map(longer, cast(DOUBLE, some))) for some in (tensors, grads))
    exact = results(rule, plain, xs, lambda _: douts64)
    peer = results(rule, plain, cast(NARROW, tensors), lambda outs: [g.to(o.dtype) for g, o in zip(cast(NARROW, grads), outs, strict=True)])
    scales = magnitudes(case, rule, plain, cast(DOUBLE, tensors), cast(DOUBLE, grads))
    wanted = [t for t in specs(args) if t.grad]
    for i, (o, p, e, s) in enumerate(zip(ours, peer, exact, scales, strict=True)):
        what = f"output {i}" if i < count else f"gradient of {wanted[i - count]}"
        dtype = tensors[0].dtype if i < count else getattr(torch, wanted[i - count].dtype)
        assert o.dtype == dtype and o.device == tensors[0].device, f"{what} is {o.dtype} on {o.device}"
        eps = max(torch.finfo(t).eps for t in (dtype, tensors[0].dtype))
        compare(what, o.cpu(), p.to(dtype), e, s, eps * roundings)


def magnitudes(case: Case, rule: Any, args: dict, tensors: list, grads: list) -> list:
    """What the error of each result is relative to: the sum of the absolute values of its terms."""
    if "softmax" in case.op or case.op == "cross_entropy":
        scales = functools.partial(softmax_scales, case.op) if "softmax" in case.op else cross_entropy_scales
        out, *every = scales(getattr(torch, specs(args)[0].dtype), fill(args, tensors), grads)
        return [out, *itertools.compress(every, [t.grad for t in specs(args)])]
    if "attention" in case.op:
        scales = packed_scales if "packed" in case.op else attention_scales
        out, *every = scales(grads[0], **fill(args, tensors))
        return [out, *itertools.compress(every, [t.grad for t in specs(args)])]
    if "norm" in case.op:
        outs, every = norm_scales(case.op, fill(args, tensors), grads)
        return [*outs, *itertools.compress(every, [t.grad for t in specs(args)])]
    absolute = {k: abs(v) if k == "scale" and v else v for k, v in args.items()}
    tensors, grads = ([x.abs() if x.is_floating_point() or x.is_complex() else x for x in xs] for xs in (tensors, grads))
    if "cos" not in args and "freqs" not in args:
        return results(rule, absolute, tensors, lambda _: grads)
    if args.get("sin") is None:  # angles, which have signs
        angles = args.get("cos"), args.get("freqs")
        tensors = [t.build().double() if t in angles else x for t, x in zip(specs(args), tensors, strict=True)]
    plus, minus = (results(functools.partial(rule, sign=sign), absolute, tensors, lambda _: grads) for sign in (1, -1))
    return [torch.maximum(a.abs(), b.abs()) for a, b in zip(plus, minus, strict=True)]


def compare(what: str, ours: torch.Tensor, peer: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor, rounding: float) -> None:
    """Each element errs by at most twice torch's error, and `rounding` times the scale; what is not finite is right, or as torch has it."""
    assert ours.shape == exact.shape, f"{what} has shape {tuple(ours.shape)}, it must be {tuple(exact.shape)}"
    info, rounded = torch.finfo(ours.dtype), long_double.rounded(exact, ours.dtype)
    error = (ours.to(exact.dtype) - exact).abs()
    fine = error <= 2 * (peer.to(exact.dtype) - exact).abs().nan_to_num(nan=0.0, posinf=0.0) + rounding * scale + 4 * info.tiny * info.eps
    for other in (peer, rounded):
        fine |= (ours == other) | (ours.isnan() & other.isnan())
    fine |= scale * (1 + 2 * rounding) >= info.max  # a term overflows
    if not fine.all():
        i = tuple((~fine).nonzero()[0].tolist())
        numbers = f"{ours[i].item()!r}, torch has {peer[i].item()!r}, exact is {rounded[i].item()!r}, scale {scale[i].item():.3g}"
        raise AssertionError(f"{what}: {int((~fine).sum())} of {fine.numel()} elements are wrong, the first at {i}: {numbers}")


# ---- nonsense: an argument v of a valid call becomes an expression

ANYTHING = (  # each is refused, but for what may_succeed says
    "None", "'abc'", "''", "b'v1'", "True", "2", "1.5", "-7", "nan", "inf", "10**400", "-(10**30)", "1j", "object()", "[]", "()", "{}",
    "set()", "[None]", "(2,)", "[[[1.0], []]]", "int", "torch.float32", "...", "len", "('v1', 'v1', 'v1')", "({}, [])", "torch.tensor(2.0)",
    "torch.tensor(2.0, requires_grad=True)", "torch.arange(3)", "np.array(['a'])", "np.array([None])", "np.array(['2020'], 'M8[D]')",
    "np.ones(3, '>f4')", "np.ones(3, 'f4')[::-1]", "np.ones(3, 'g')", "odd(__dlpack__=fails, __dlpack_device__=cpu)", "odd(__dlpack__=cpu)",
    "odd(__dlpack__=cpu, __dlpack_device__=cpu)", "odd(__dlpack__=cpu, __dlpack_device__=fails)", "odd(__repr__=fails)",
)  # fmt: skip
TENSORS = (
    "v.to('meta')", "v.to_sparse()", "v.flatten()[None].to_sparse_csr()", "v.float().to_mkldnn()", "torch.nested.nested_tensor([v])",
    "torch.quantize_per_tensor(v.float(), 1.0, 0, torch.qint8)", "v.short()", "v.bool()", "v.to(torch.uint64)", "v.to(torch.float8_e5m2)",
    "v.to(torch.complex128)", "v.tolist()", "torch.complex(v.double(), v.double()).conj().imag",
)  # fmt: skip
SHAPES = "v[None]", "v.flatten()", "v[..., :0]", "torch.cat((v, v), -1)", "v.sum()", "v[0]"  # these may be right
TWINS = {  # the same in another type
    float: ("np.float64(v)", "np.float32(v)", "Fraction(v)"),
    int: ("np.int64(v)", "np.int16(v)"),
    bool: ("np.bool_(v)",),
    str: ("np.str_(v)",),
    T: ("torch.nn.Parameter(v, requires_grad=False)", "v.numpy()"),
    tuple: ("list(v)",),
}
OPTIONAL = ("version", "window", "sink", "k", "sin", "positions", "position_ids", "mrope_section", "cu_seqlens", "start_positions",
            "bias", "residual", "softcap", "vocab_size")  # fmt: skip
NUMBERS = {"sink", "scale", "eps", "dim", "window", "rotary_dim", "rotary_offset", "cp_size", "cp_rank",
           "ignore_index", "z_loss", "softcap", "vocab_size"}  # fmt: skip


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
        return name in ("interleaved", "inverse", "fused", "inplace_backward", "causal")
    if what == "torch.arange(3)":
        return name in ("targets", "tokens")
    if what in SHAPES or what.startswith("torch.tensor"):
        names = "x", "logits", "q", "k", "qkv", "sink", "a", "b", "weight", "bias", "residual", "factors", "t", "w1", "w2", "gate", "up"
        return name in names or "v" in what
    whole = what in ("2", "-7", "10**400", "-(10**30)") and name in NUMBERS
    factor = what in ("1.5", "nan", "inf") and name in ("scale", "sink", "z_loss", "softcap")
    return whole or factor or (what == "1.5" and name == "eps")


def run_nonsense(case: Case) -> None:
    (name, index, what), function = case.how, function_of(case.op)
    args = fill(case.args, [t.build("cuda" if case.place == "gpu" else "cpu") for t in specs(case.args)])
    value = args[name] if index is None else args[name][index]
    with at(case.place):
        try:
            spoiled = eval(what, globals() | {"v": value, "nan": math.nan, "inf": math.inf})
        except (RuntimeError, IndexError, TypeError):
            return  # this value cannot be spoiled so
        spoiled = {**args, name: spoiled if index is None else (*args[name][:index], spoiled, *args[name][index + 1 :])}
        if what in itertools.chain(*TWINS.values()):
            assert all(map(same_bits, outputs(function(**args)), outputs(function(**spoiled)))), "the result differs"
            return
        try:
            outs = outputs(function(**spoiled))
        except (TypeError, ValueError) as error:
            assert len(str(error)) > 10, f"the error says nothing: {error!r}"
            return
    if what == "v.to('meta')" and len(specs(case.args)) == 1:
        assert all(o.is_meta for o in outs)
        return
    assert may_succeed(case, name, what), f"{name} = {what} was accepted"
    exact = {k: v for k, v in spoiled.items() if k != "version"}
    exact = pytree.tree_map(lambda v: cast(DOUBLE, [v.detach()])[0] if isinstance(v, torch.Tensor) else v, exact)
    for o, e in zip(outs, outputs(FUZZED[case.op][1](**exact)), strict=True):
        eps = 50 * torch.finfo(getattr(torch, specs(case.args)[0].dtype)).eps
        torch.testing.assert_close(o.detach().cpu(), e.to(o.dtype), rtol=eps, atol=eps, equal_nan=True)


# ---- transforms: f maps tensors to one

TRANSFORMS = ("jvp", "dual", "vjp", "vmap", "vmap of grad", "jacrev", "jacfwd", "hessian", "twice", "checkpoint")
REFUSED: list[str] = []


def transformed(name: str, f: Any, xs: list) -> Any:
    """The results of a transform of f at xs, with random tangents, gradients and batches."""
    every, leaves = tuple(range(len(xs))), [x.detach().requires_grad_() for x in xs]
    dims = [int(torch.randint(x.ndim + 1, ())) if torch.rand(()) < 0.6 else None for x in xs]
    dims = tuple(dims if any(d is not None for d in dims) else [0, *dims[1:]])
    many = [x if d is None else torch.stack([random(x) for _ in range(3)], d) for x, d in zip(xs, dims, strict=True)]
    tangents, g = [random(x) for x in xs], random(f(*xs))
    if name == "dual":
        with forward_ad.dual_level():
            duals = [x if d is None else forward_ad.make_dual(x, t) for x, d, t in zip(xs, dims, tangents, strict=True)]
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
        return [x.grad for x in leaves]
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
            return torch.cat([o.flatten() for o in outputs(function(**fill(args, every)))])

        torch.manual_seed(seed)
        return [t.detach().cpu() for t in pytree.tree_leaves(transformed(name, f, [tensors[i] for i in where]))]

    try:
        exact = run(FUZZED[case.op][1], {k: v for k, v in args.items() if k != "version"}, cast(DOUBLE, tensors))
    except (RuntimeError, IndexError):
        return  # torch cannot, as of some empty tensors
    with at(case.place):
        try:
            ours = run(function_of(case.op), args, tensors)
        except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            assert any(word in str(error) for word in (case.op, "vmap", "jvp", "forward", "transform", "derivative")), f"unclear: {error!r}"
            return REFUSED.append(f"{case.op} refused {name}: {str(error)[:100]}")
    for a, b in zip(ours, exact, strict=True):
        limit = 1e-9 if a.dtype == torch.float64 else 1e-3
        torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit)


# ---- drawing, running and reporting

RUN = {"valid": run_valid, "nonsense": run_nonsense, "transforms": run_transforms}


@st.composite
def cases(draw: Any, op: str, places: tuple[str, ...], kinds: tuple[str, ...]) -> Case:
    d = Draw(draw, op, draw(st.sampled_from(places)), draw(st.sampled_from(kinds)))
    args, index = FUZZED[op][0](d), None
    if d.kind == "valid":
        return Case(op, d.place, d.kind, args, (d.integer(0, 99), d.pick(1, 2, 0)))
    if d.kind == "transforms":
        first = next(k for k in ("x", "a", "t", "gate", "weight", "logits", "q", "qkv") if k in args)  # has a gradient, if nothing else has
        args |= {} if any(t.grad for t in specs(args)) else {first: dataclasses.replace(args[first], grad=True)}
        return Case(op, d.place, d.kind, args, (d.pick(*TRANSFORMS), d.integer(0, 99)))
    args = pytree.tree_map(lambda v: dataclasses.replace(v, grad=False) if isinstance(v, T) else v, args)
    name = d.pick(*args)
    value = args[name]
    if isinstance(value, tuple) and isinstance(value[0], T) and d.pick(True, False):
        index = d.integer(0, len(value) - 1)
        value = value[index]
    twins = TWINS.get(type(value), ()) if name != "version" else ()
    return Case(op, d.place, d.kind, args, (name, index, d.pick(*ANYTHING, *twins, *twins, *(TENSORS + SHAPES) * isinstance(value, T))))


def fuzz(
    op: str, count: int, seed: int, places: tuple[str, ...] = PLACES, kinds: tuple[str, ...] = tuple(RUN), verbose: bool = False
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
            max_examples=min(100, count - start), deadline=None, database=None, print_blob=False, derandomize=False,
            suppress_health_check=list(hypothesis.HealthCheck), phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        )  # fmt: skip
        try:
            hypothesis.seed(seed * 1_000_003 + start)(settings(hypothesis.given(cases(op, places, kinds))(one)))()
        except Exception as error:
            failures += [str(e) for e in getattr(error, "exceptions", [error])]
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    places, kinds = (options.place,) if options.place else PLACES, (options.kind,) if options.kind else tuple(RUN)
    for i, op in enumerate(ops):
        begin, count = time.time(), options.cases * (i + 1) // len(ops) - options.cases * i // len(ops)
        failures = fuzz(op, count, options.seed, places, kinds, options.verbose)
        print(f"{op}: {count} cases, {len(failures)} failures, {time.time() - begin:.0f} s", *failures, sep="\n  ", flush=True)
        total += len(failures)
    print(*(f"{line} ({count} times)" for line, count in collections.Counter(REFUSED).items()), sep="\n")
    print(f"{options.cases} cases, {total} failures")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
