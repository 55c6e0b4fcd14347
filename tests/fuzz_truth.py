"""What is right: the formula of each op, a rule, and the scales of the errors that its results may have.

A rule takes tensors of one dtype: float64 for the truth, or LongDouble where that of float64 is tested.
Nothing here imports cukern or calls torch's softmaxes, losses and norms, which cukern's CPU path calls too: a
fault of theirs would be in both. Rules use exp, log, sums and products, and autograd differentiates these.
"""

import functools
import itertools
import math
from typing import Any

import torch
from fuzz_cases import Case, fill, specs
from rope_oracle import rotate, te_positions

AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3), "thd": (0, 1, 2)}


def outputs(y):
    return y if isinstance(y, tuple) else (y,)


def shifted(z, dim=-1):
    """z minus the largest of its row, and the sum of the exponentials of that. Rows of -inf alone, or with
    +inf, give NaN."""
    z = z - z.detach().amax(dim, keepdim=True) if z.numel() else z
    return z, z.exp().sum(dim, keepdim=True)


def softmax(x, dim=-1, scale=1.0):
    z, total = shifted(x * float(scale), dim)
    return z.exp() / total


def log_softmax(x, dim=-1, scale=1.0):
    z, total = shifted(x * float(scale), dim)
    return z - total.log()


def logsumexp(z):
    """Along the last dimension, which stays. -inf for a row of -inf alone."""
    most = z.detach().amax(-1, keepdim=True)
    most = most.masked_fill(most.abs() == math.inf, 0.0)
    return most + (z - most).exp().sum(-1, keepdim=True).log()


def linear(x, weight, bias=None):
    y = (x[None] @ weight.mT)[0]
    return y if bias is None else y + bias


def hidden_of(x, window):
    (queries, keys), (i, j) = x.shape[-2:], (torch.arange(n) for n in x.shape[-2:])
    ahead = j - (i[:, None] + keys - queries)
    return (ahead > 0) | (ahead <= -min(window or 1 << 40, 1 << 40))


def with_sink(z, sink):
    if not isinstance(sink, torch.Tensor):
        sink = torch.tensor(-math.inf if sink is None else float(sink), dtype=torch.float64)
    sink = sink.to(z.dtype)
    return torch.cat((z, sink[(..., *(None,) * min(2, z.ndim))].expand(*z.shape[:-1], 1)), -1)


def causal_softmax(x, scale=1.0, window=None, sink=None):
    hidden = hidden_of(x, window)
    z = with_sink((x.masked_fill(hidden, 0.0) * float(scale)).masked_fill(hidden, -math.inf), sink)
    return masked_softmax(z)[0][..., :-1].masked_fill(hidden, 0.0)


def masked_softmax(z):
    """A row of -inf alone gives 0. Also the logarithm of each row's sum of exponentials."""
    most = z.detach().amax(-1, keepdim=True)
    most, none = most.masked_fill(most == -math.inf, 0.0), most == -math.inf
    e = (z - most).exp()
    total = e.sum(-1, keepdim=True).masked_fill(none, 1.0)
    return e / total, (most + total.log()).masked_fill(none, -math.inf)[..., 0]


def attention_weights(q, k, v, scale, causal, softcap, window, sink, key_lengths=None):
    """Also lse, and k and v with each head repeated. The last column is the sink's."""
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale))
    scores = scores if softcap is None else float(softcap) * torch.tanh(scores / float(softcap))
    hidden = hidden_of(scores, window) & torch.tensor(causal)
    if key_lengths is not None:
        query, key = (torch.arange(n) for n in scores.shape[-2:])
        ends = (
            key_lengths[(..., *(None,) * min(3, scores.ndim))] + ((query + 1 - len(query)) * causal)[:, None]
        )
        hidden = key >= ends
    return *masked_softmax(with_sink(scores.masked_fill(hidden, -math.inf), sink)), k, v


def attention(
    q, k, v, scale=None, causal=True, softcap=None, window=None, sink=None, return_lse=False, key_lengths=None
):
    weights, lse, _, v = attention_weights(q, k, v, scale, causal, softcap, window, sink, key_lengths)
    # a sink that is NaN makes the result NaN, also where there are no keys
    out = weights[..., :-1] @ v + 0.0 * weights[..., -1:]
    return (out, lse) if return_lse else out


def attention_packed(qkv, **options):
    out = outputs(attention(*(t.transpose(1, 2) for t in qkv.unbind(2)), **options))
    return (out[0].transpose(1, 2), *out[1:])


def sequences(q, k, v, cu_seqlens, cu_seqlens_k):
    bounds = [
        itertools.pairwise(t.tolist())
        for t in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    ]
    for (a, b), (c, d) in zip(*bounds, strict=True):
        yield tuple(t.transpose(0, 1) for t in (q[a:b], k[c:d], v[c:d]))


def attention_varlen(q, k, v, cu_seqlens, cu_seqlens_k=None, **options):
    each = [outputs(attention(*some, **options)) for some in sequences(q, k, v, cu_seqlens, cu_seqlens_k)]
    out, *lse = (torch.cat(some, 1) for some in zip(*each, strict=True))
    return (out.transpose(0, 1), *lse)


def attention_scales(dtype, douts, q, k, v, scale, sink, return_lse, wide=1.0, **rest):
    """The sums of the absolute values of all terms. Each exponent's rounding, `wide` of one of q's dtype, is
    part of its row. A softcap's slope is at most 1. A weight and its gradient may be subnormal numbers of 16
    bits: `least` times 4 roundings is the smallest of them."""
    least = torch.finfo(dtype).tiny / 4 if dtype.itemsize == 2 else 0.0
    kv_heads, (p, _, k, v) = k.shape[-3:-2], attention_weights(q, k, v, scale, sink=sink, **rest)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    q, k, v, g, *dlse = (t.abs() for t in (q, k, v, *douts))
    lse = (
        1
        + (q @ k.mT * scale).sum(-1, keepdim=True)
        + (abs(torch.as_tensor(0.0 if sink is None else sink))[..., None, None])
    )
    p = p * (1 + wide * (lse - 1)) + least
    p, column = p[..., :-1], p[..., -1:]
    dp = g @ v.mT
    total = (p * dp).sum(-1, keepdim=True) + (dlse[0][..., None] if dlse else 0)
    ds = scale * (p * (dp + total) + least)
    dk, dv = (
        t.unflatten(-3, (*kv_heads, -1)).sum(-3) if kv_heads and any(kv_heads) else t
        for t in (ds.mT @ q, p.mT @ g)
    )
    dsink = [(column * total).sum((-2, -1)).sum_to_size(sink.shape)] if isinstance(sink, torch.Tensor) else []
    return [p @ v, *[lse.expand(*p.shape[:-1], 1)[..., 0]] * return_lse, ds @ k, dk, dv, *dsink]


def packed_scales(dtype, douts, qkv, **options):
    count, qkv = len(douts), (t.transpose(1, 2) for t in qkv.unbind(2))
    out, *rest = attention_scales(dtype, [douts[0].transpose(1, 2), *douts[1:]], *qkv, **options)
    grads = torch.stack([t.transpose(1, 2) for t in rest[count - 1 : count + 2]], 2)
    return [out.transpose(1, 2), *rest[: count - 1], grads, *rest[count + 2 :]]


def varlen_scales(dtype, douts, q, k, v, cu_seqlens, cu_seqlens_k, **options):
    ends, count = cu_seqlens.tolist()[1:-1], len(douts)
    parts = zip(*(d.tensor_split(ends, 1) for d in (douts[0].transpose(0, 1), *douts[1:])), strict=True)
    some = zip(parts, sequences(q, k, v, cu_seqlens, cu_seqlens_k), strict=True)
    every = list(zip(*(attention_scales(dtype, part, *xs, **options) for part, xs in some), strict=True))
    out, *grads = (torch.cat(every[i], 1).transpose(0, 1) for i in (0, *range(count, count + 3)))
    return [out, *(torch.cat(lse, 1) for lse in every[1:count]), *grads, *map(sum, every[count + 3 :])]


def softmax_scales(dtype, douts, x, scale, sink=None, dim=None, window=None, log=False):
    """What errors of the softmaxes are relative to: the exponents' rounding, in float32 of 16-bit types, is
    part of every term. `tiny` times the rounding is the error of a subnormal result, which the gradient
    multiplies: the backward gets the rounded result."""
    wide, tiny = (
        (2.0**-13, max(1e-7, torch.finfo(dtype).tiny))
        if dtype.itemsize == 2
        else (1.0, torch.finfo(dtype).tiny)
    )
    causal, dim = dim is None, -1 if dim is None or not x.ndim else dim
    z, g = (t.movedim(dim, -1) if t.ndim else t[None] for t in (x * scale, douts[0]))
    z = with_sink(z.masked_fill(hidden_of(x, window), -math.inf) if causal else z, sink)
    z, g = z.clamp(-1e300, 1e300), with_sink(g, 0.0).abs()
    y, most = softmax(z).nan_to_num(0.0), z.abs().masked_fill(z == -1e300, 0.0)
    loss = z - logsumexp(z)
    a = 1 + wide * (most + most.amax(-1, keepdim=True)) + (loss.abs().clamp(max=1e4) if log else 0)
    total = (
        (a * y * g).sum(-1, keepdim=True) + a * (y * g).sum(-1, keepdim=True) + tiny * g.sum(-1, keepdim=True)
    )
    total = (
        a * y * g.sum(-1, keepdim=True) + (a * y * g.sum(-1, keepdim=True)).sum(-1, keepdim=True) * y
        if log
        else total * y
    )
    dx = abs(scale) * (total + (g if log else a * y * g + tiny * g))
    back = [
        t[..., :-1].movedim(-1, dim) if x.ndim else t[0] for t in (a * loss.abs() + a if log else a * y, dx)
    ]
    if not isinstance(sink, torch.Tensor):
        return back
    return [*back, ((total + a * y * g)[..., -1].sum(-1)).sum_to_size(sink.shape)]


def cross_entropy_terms(logits, targets, ignore_index, smoothing, softcap, vocab):
    """What is not a number in `share` and `valid`: the logits, each class's share, and which rows count."""
    c, flat = logits[..., :vocab].reshape(-1, vocab or logits.shape[-1]), targets.reshape(-1).long()
    c = c if softcap is None else softcap * torch.tanh(c / softcap)
    share = (torch.arange(c.shape[1]) == flat[:, None]).to(c.dtype) * (1 - float(smoothing)) + c.new_full(
        (), float(smoothing)
    ) / c.shape[1]
    outside = (flat != ignore_index) & ((flat < 0) | (flat >= c.shape[1]))
    return c, share.masked_fill(outside[:, None], math.nan), flat != ignore_index


def reduced(rows, valid, reduction, shape):
    rows = rows.masked_fill(~valid, 0.0)
    return (
        rows.view(shape) if reduction == "none" else rows.sum() / (valid.sum() if reduction == "mean" else 1)
    )


def cross_entropy(logits, targets, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0,
                  softcap=None, vocab_size=None,
                  inplace_backward=False):  # fmt: skip
    softcap = None if softcap is None else float(softcap)
    c, share, valid = cross_entropy_terms(logits, targets, ignore_index, label_smoothing, softcap, vocab_size)
    lse = logsumexp(c)[:, 0]
    rows = -(share * log_softmax(c)).sum(-1) + float(z_loss) * lse * lse
    return reduced(rows, valid, reduction, targets.shape)


def cross_entropy_scales(
    dtype, douts, logits, targets, reduction, ignore_index, label_smoothing, z_loss, softcap, vocab_size,
    rounding=0.0, **_,
):  # fmt: skip
    """The terms' absolute values, with the exponents' rounding in float32 and without the softcap's slope,
    which is at most 1. `rounding`: the magnitude of the errors of the logits."""
    z, wide = abs(z_loss), 2.0**-10 if dtype.itemsize == 2 else 1.0
    c, share, valid = cross_entropy_terms(logits, targets, ignore_index, label_smoothing, softcap, vocab_size)
    lse = logsumexp(c)
    more = (
        rounding[..., :vocab_size].reshape(c.shape)
        if isinstance(rounding, torch.Tensor)
        else torch.zeros_like(c)
    )
    most = more.amax(-1, keepdim=True)
    rows = ((1 + 2 * z * lse.abs()) * most + lse.abs() + z * lse.square())[:, 0] + (
        share * (c.abs() + more)
    ).sum(-1)
    g = (
        douts[0].reshape(-1)
        if reduction == "none"
        else douts[0].expand(len(c)) / (valid.sum() if reduction == "mean" else 1)
    )
    p = (c - lse).exp() * (
        1 + wide * ((c - lse).abs().clamp(max=1e3) + (softcap or 0.0)) + more + most
    ) + 1e-30 * (dtype != torch.float64)
    dx = (g.abs() * valid)[:, None] * ((1 + 2 * z * (lse.abs() + most)) * p + share)
    dx = torch.nn.functional.pad(dx, (0, logits.shape[-1] - c.shape[1])).view(logits.shape)
    return [reduced(rows, valid, reduction, targets.shape), dx]


def linear_cross_entropy(x, weight, targets, chunk_rows=None, **rest):
    return cross_entropy((x[None] @ weight.mT)[0], targets, **rest)


def linear_cross_entropy_scales(dtype, douts, x, weight, targets, **rest):
    """The gradients of the logits are rounded, and may be subnormal."""
    logits, magnitude = (x[None] @ weight.mT)[0], (x.abs()[None] @ weight.abs().mT)[0]
    out, dlogits = cross_entropy_scales(dtype, douts, logits, targets, rounding=magnitude, **rest)
    dlogits = (dlogits + torch.finfo(dtype).tiny * douts[0].abs()).reshape(targets.numel(), len(weight))
    return [
        out,
        (dlogits @ weight.abs()).view(x.shape),
        dlogits.mT @ x.abs().reshape(len(dlogits), x.shape[-1]),
    ]


def adamw(
    params, grads, exp_avgs, exp_avg_sqs, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2,
    lerp=None,
):  # fmt: skip
    """The bias corrections are numbers of float64, as torch's AdamW has them. `lerp`: torch's, m + (g - m)
    (1 - beta), may overflow."""
    (one, two), steps = betas, []
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        m, v = (
            lerp(m, g.to(m.dtype), 1 - one) if lerp else m * one + g * (1 - one),
            v * two + g * g * (1 - two),
        )
        p = p * (1 - lr * weight_decay) - lr / (1 - one**step) * (m / ((v / (1 - two**step)).sqrt() + eps))
        steps.append((p, m, v))
    return tuple(itertools.chain(*zip(*steps, strict=True)))


def rope(x, cos, sin=None, k=None, interleaved=False, rotary_dim=None, rotary_offset=0, position_ids=None,
         mrope_section=None,
         cu_seqlens=None, start_positions=None, layout="bshd", inverse=False, scale=None, cp_size=1,
         cp_rank=0, sign=0):  # fmt: skip
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
        row = te_positions(
            "thd" if packed else "bshd",
            (sequence,) if packed else (batch, sequence),
            starts,
            bounds,
            cp_size,
            cp_rank,
        )
        rows = torch.tensor(row, dtype=torch.int64).view(batch, sequence, 1).expand(-1, -1, half)
    options = {
        "interleaved": interleaved,
        "offset": rotary_offset,
        "inverse": inverse,
        "scale": 1.0 if scale is None else float(scale),
    }

    def turned(x):
        y = rotate(x[None] if packed else x.permute(axes), cos, sin, rows, **options)
        return y[0] if packed else y.permute(axes)

    return turned(x) if k is None else (turned(x), turned(k))


def te(
    t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False, fused=True, cu_seqlens=None,
    cp_size=1, cp_rank=0, sign=0,
):  # fmt: skip
    rest = {"layout": tensor_format, "rotary_dim": freqs.shape[-1], "interleaved": interleaved, "sign": sign}
    return rope(
        t,
        freqs[:, 0, 0],
        None,
        start_positions=start_positions,
        cu_seqlens=cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
        **rest,
    )


def rmsnorm(x, weight, bias=None, eps=1e-6, residual=None):
    s = x if residual is None else x + residual
    y = s / (s.square().mean(-1, keepdim=True) + eps).sqrt() * (1 if weight is None else weight) + (
        0 if bias is None else bias
    )
    return y if residual is None else (y, s)


def layernorm(x, weight, bias=None, eps=1e-5, residual=None):
    s = x if residual is None else x + residual
    y = rmsnorm(s - s.mean(-1, keepdim=True), weight, bias, eps)
    return y if residual is None else (y, s)


def norm_scales(name, args, douts, most=math.inf):
    """The sums of the absolute values of the terms, times how much s, rounded to 16 bits, changes 1 /
    sqrt(variance). `most`: the sum of squares of a row that overflows."""
    s = args["x"] if args["residual"] is None else args["x"] + args["residual"]
    w, b = (
        t.abs() if t is not None else float(t is args["weight"]) for t in (args["weight"], args.get("bias"))
    )
    size = s.abs().amax(-1, keepdim=True).clamp(min=1.0) if s.shape[-1] else 1.0  # s / size has a square
    t = s / size
    t = t - t.mean(-1, keepdim=True) if name == "layernorm" else t
    r = (t.square().mean(-1, keepdim=True) + (args["eps"] ** 0.5 / size) ** 2).rsqrt() / size
    n = r * (s.abs() + s.abs().mean(-1, keepdim=True))
    n = n.masked_fill(s.square().sum(-1, keepdim=True) >= most, math.inf)
    g, condition = douts[0].abs(), 1 + n.amax(-1, keepdim=True) if s.shape[-1] else 1
    h, rows = condition * g * w, tuple(range(s.ndim - 1))
    dx = r * (h + h.mean(-1, keepdim=True) + n * (n * h).mean(-1, keepdim=True)) + (
        douts[1].abs() if len(douts) > 1 else 0
    )
    grads = {"x": dx, "weight": (condition * g * n).sum(rows), "bias": g.sum(rows), "residual": dx}
    outs = [n * w + (b if isinstance(b, torch.Tensor) else 0), s.abs()][: len(douts)]
    return outs, [grads[k] for k, v in args.items() if isinstance(v, torch.Tensor)]


def kron_linear(x, factors, bias=None, scale=1.0, residual=None):
    if any(w.ndim == 3 for w in factors):
        each = [kron_linear(x[i], [w[i] if w.ndim == 3 else w for w in factors]) for i in range(x.shape[0])]
        y = torch.stack(each) if each else x.new_zeros(*x.shape[:-1], math.prod(w.shape[-1] for w in factors))
    else:
        w = functools.reduce(
            lambda a, b: (a[:, None, :, None] * b[:, None]).reshape(-1, a.shape[1] * b.shape[1]), factors
        )
        y = (x[None] @ w)[0]
    return y * float(scale) + (0 if bias is None else bias) + (0 if residual is None else residual)


def lokr_linear(x, w1, w2, **rest):
    return kron_linear(x, [(w[0] @ w[1] if isinstance(w, tuple) else w).mT for w in (w1, w2)], **rest)


def gated(gate, up=1.0, bias=None, approximate=None, limit=True):
    """silu without `approximate`. `limit`: the derivatives at infinity are 0 and 1, not NaN as of torch."""
    v = gate if bias is None else gate + bias
    two, c = v.new_full((), 2.0), v.clamp(-2e4, 2e4) if limit else v
    if approximate == "none":
        return v * (torch.erfc(-c / two.sqrt()) / 2) * up
    square, factor = (c * c).clamp(max=1e4), (two / two.new_ones(()).atan()).sqrt()  # sqrt(8 / pi)
    return v * torch.sigmoid(c if approximate is None else factor * c * (1 + 0.044715 * square)) * up


def gelu(x, bias=None, approximate="none", **options):
    return gated(x, 1.0, bias, approximate, **options)


def geglu(gate, up, approximate="none", **options):
    return gated(gate, up, None, approximate, **options)


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
    return [
        *(o.detach() for o in outs),
        *torch.autograd.grad(list(itertools.compress(outs, some)), wanted, grads, materialize_grads=True),
    ]


SCALES = {
    "softmax": softmax_scales, "log_softmax": functools.partial(softmax_scales, log=True),
    "causal_softmax": softmax_scales, "cross_entropy": cross_entropy_scales,
    "linear_cross_entropy": linear_cross_entropy_scales, "attention": attention_scales,
    "attention_packed": packed_scales, "attention_varlen": varlen_scales,
}  # fmt: skip


def magnitudes(case: Case, rule: Any, args: dict, tensors: list, grads: list) -> list:
    """What the error of each result is relative to: the sum of the absolute values of its terms."""
    dtype, wanted = getattr(torch, specs(args)[0].dtype), [t.grad for t in specs(args) if "float" in t.dtype]
    if case.op in SCALES:
        # in float32
        scores = (
            {"wide": 2.0**-13}
            if "attention" in case.op and case.place == "reference" and dtype.itemsize == 2
            else {}
        )
        found = SCALES[case.op](dtype, grads, **fill(args, tensors), **scores)
        return [*found[: len(grads)], *itertools.compress(found[len(grads) :], wanted)]
    if case.op == "adamw":
        absolute = fill(args, [x.abs() for x in tensors])
        scales = [
            y.abs() for y in rule(**absolute | {k: [-x for x in absolute[k]] for k in ("grads", "exp_avgs")})
        ]
        count, most = len(scales) // 3, torch.finfo(dtype if dtype == torch.float64 else torch.float32).max
        return [
            *(p.masked_fill(v >= most, math.inf) for p, v in zip(scales, scales[2 * count :], strict=False)),
            *scales[count:],
        ]  # v is infinite
    if "norm" in case.op:
        # kernels compute in float32, as torch's do
        most = math.inf if case.place == "reference" else torch.finfo(torch.float32).max
        outs, every = norm_scales(
            case.op, fill(args, tensors), grads, most if dtype.itemsize == 2 else math.inf
        )
        return [*outs, *itertools.compress(every, [t.grad for t in specs(args)])]
    absolute = {k: abs(v) if k == "scale" and v else v for k, v in args.items()}
    tensors, grads = (
        [x.abs() if x.is_floating_point() or x.is_complex() else x for x in xs] for xs in (tensors, grads)
    )
    if "cos" not in args and "freqs" not in args:
        return results(rule, absolute, tensors, lambda _: grads)
    if args.get("sin") is None:  # angles, which have signs
        angles = args.get("cos"), args.get("freqs")
        tensors = [
            t.build().double() if t in angles else x for t, x in zip(specs(args), tensors, strict=True)
        ]
    plus, minus = (
        results(functools.partial(rule, sign=sign), absolute, tensors, lambda _: grads) for sign in (1, -1)
    )
    return [torch.maximum(a.abs(), b.abs()) for a, b in zip(plus, minus, strict=True)]
