"""What is right: each op in plain torch, a rule, and the scales of the errors that its results may have.

A rule takes tensors of one dtype: float64 for the truth, or LongDouble where that of float64 is tested.
"""

import functools
import itertools
import math
from typing import Any

import torch
from fuzz_cases import Case, fill, specs
from rope_oracle import rotate, te_positions

from cukern.bench.calls import outputs

AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3), "thd": (0, 1, 2)}


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


def te(t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False, fused=True, cu_seqlens=None, cp_size=1, cp_rank=0, sign=0):
    rest = {"layout": tensor_format, "rotary_dim": freqs.shape[-1], "interleaved": interleaved, "sign": sign}
    return rope(t, freqs[:, 0, 0], None, start_positions=start_positions, cu_seqlens=cu_seqlens, cp_size=cp_size, cp_rank=cp_rank, **rest)


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


def kron_linear(x, factors, bias=None, scale=1.0, residual=None):
    if any(w.ndim == 3 for w in factors):
        each = [kron_linear(x[i], [w[i] if w.ndim == 3 else w for w in factors]) for i in range(x.shape[0])]
        y = torch.stack(each) if each else x.new_zeros(*x.shape[:-1], math.prod(w.shape[-1] for w in factors))
    else:
        w = functools.reduce(lambda a, b: (a[:, None, :, None] * b[:, None]).reshape(-1, a.shape[1] * b.shape[1]), factors)
        y = (x[None] @ w)[0]
    return y * float(scale) + (0 if bias is None else bias) + (0 if residual is None else residual)


def lokr_linear(x, w1, w2, **rest):
    return kron_linear(x, (w1.mT, (w2[0] @ w2[1] if isinstance(w2, tuple) else w2).mT), **rest)


def gated(gate, up=1.0, bias=None, approximate=None):
    """silu without `approximate`."""
    v = gate if bias is None else gate + bias
    two = v.new_full((), 2.0)
    if approximate == "none":
        return v * (torch.erfc(-v / two.sqrt()) / 2) * up
    square, factor = (v * v).clamp(max=1e4), (two / two.new_ones(()).atan()).sqrt()  # sqrt(8 / pi)
    return v * torch.sigmoid(v if approximate is None else factor * v * (1 + 0.044715 * square)) * up


def embedding(tokens, weight, positions=None):
    out = weight[tokens.long()]
    return out if positions is None else out + positions[: tokens.shape[-1]]


def results(function: Any, args: dict, tensors: list, douts: Any) -> list[torch.Tensor]:
    """The outputs, and the gradients of the tensors that have one, for the gradients `douts(outputs)`."""
    leaves = [x.detach().requires_grad_(t.grad) for x, t in zip(tensors, specs(args), strict=True)]
    outs = outputs(function(**fill(args, leaves)))
    wanted, some = [x for x in leaves if x.requires_grad], [o.requires_grad for o in outs]
    grads = list(itertools.compress(douts(outs), some))
    if not grads:
        return [*outs, *map(torch.zeros_like, wanted)]
    return [*(o.detach() for o in outs), *torch.autograd.grad(list(itertools.compress(outs, some)), wanted, grads, materialize_grads=True)]


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
