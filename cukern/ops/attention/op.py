"""attention: softmax(scale q k^T) v. Checks, versions and the public functions."""

import math
from typing import Any

import torch
from torch import Tensor

from cukern.ops.attention import fused, launch, materialised, plan, wgmma
from cukern.ops.attention.reference import Options, reference, reference_of_pages
from cukern.ops.causal_softmax import checked_sink
from cukern.ops.softmax import checked_scale
from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import transformed
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.planning import planned
from cukern.runtime.registry import Version


@planned("q", "k", "v", "sink", "key_lengths", "block_table", "bias", "alibi_slopes")
def attention(
    q: Any, k: Any, v: Any, *, causal: bool = True, scale: float | None = None, softcap: float | None = None,
    window: int | None = None, sink: Any = None, return_lse: bool = False, key_lengths: Any = None,
    block_table: Any = None, num_splits: int | None = None, dropout_p: float = 0.0, bias: Any = None,
    alibi_slopes: Any = None, version: str | None = None,
) -> Any:  # fmt: skip
    """softmax(scale q k^T) v, with a causal mask unless `causal` is False. Differentiable.

        options = dict(device="cuda", dtype=torch.bfloat16, requires_grad=True)
        q, k, v = (torch.randn(4, 12, 1024, 64, **options) for _ in range(3))
        cukern.attention(q, k, v).square().sum().backward()  # (batch, heads, time, head_dim)

    Args:
        q: (..., heads, queries, head_dim), float16, bfloat16, float32 or float64: a tensor or a DLPack
            array. The heads may be missing.
        k: (..., kv_heads, keys, head_dim); each of its heads serves heads / kv_heads neighbouring heads of q.
        v: (..., kv_heads, keys, value_dim). All have one dtype and device.
        causal: query i sees the keys up to i + keys - queries. False: every key.
        scale: a finite number, at least 0; None: 1 / sqrt(head_dim).
        softcap: a positive number; scaled scores become softcap * tanh(scores / softcap).
        window: the most keys that a query sees, the last that `causal` allows; None: no limit.
        sink: the unscaled logit of one more key without a value: a number, or a tensor that broadcasts to q's
            dimensions before the queries, such as (heads,). It has a gradient. -inf means no sink.
        return_lse: also return the logarithm of each query's sum of exponentials. It has a gradient.
        key_lengths: int32, q's dimensions before the heads: how many keys each sequence has; None: all. It
            replaces `keys` in `causal`.
        block_table: int32, key_lengths' dimensions and pages: the pages of each sequence in k and v, (pages,
            page_size, kv_heads, D); page_size: 16, 32, 64, ...
        num_splits: parts of the keys in decoding; None: chosen by size. With 1, results do not depend on the
            batch.
        dropout_p: the probability that a weight is dropped, in [0, 1), by a seed of torch's generator.
        bias: added to the scaled scores; of q's dtype or float32, broadcasts to (..., heads, queries, keys).
            -inf hides a key. Its gradient takes memory of that shape.
        alibi_slopes: float32, (heads,) or q's dimensions before the queries: adds -slope * |query + keys -
            queries - key|. Excludes bias; both exclude dropout_p, key_lengths and block_table.
        version: default: the last that the GPU runs, or that of `cukern.use`: docs/ops/attention.md.

    Returns a new tensor (..., heads, queries, value_dim) of q's dtype; with `return_lse` also lse, (...,
    heads, queries), float32, or float64 for float64. A query that sees no key gives 0, gradient 0, and lse
    -infinity. Autocast casts q, k and v. CPU tensors use torch's operations, or the simulator.

    Raises TypeError for other dtypes and options of another type; ValueError for shapes or devices that do
    not fit, a head_dim that the requested "v3" does not support, or an option outside its range.
    Source: arXiv 1706.03762.
    """
    checks.version("attention", version, (*VERSIONS, "sdpa"))
    q, k, v, table = _checked_cache(q, k, v, block_table)
    options, return_lse, sink = _options(
        version, q, k, v, causal, scale, softcap, window, return_lse, sink, num_splits, table
    )
    leading, lead = q.shape[:-1], q.ndim - 3
    (q,) = _batched(lead, q)
    k, v = _batched(lead, k, v) if table is None else (k, v)
    options, seed = _dropout(options, dropout_p, q)
    others = {"dropout_p": dropout_p or None, "key_lengths": key_lengths, "block_table": table}
    extra = _bias(bias, alibi_slopes, others, leading, q, k)
    extra = seed if extra is None else extra
    if table is None and key_lengths is None:
        if extra is None:  # which counts from the first key
            q, k, v, options = _in_window(q, k, v, options)
        out, lse = _attend(version, q, k, v, options, return_lse or sink is not None, extra=extra)
    elif seed is not None:
        raise ValueError(f"dropout_p and key_lengths exclude each other, got dropout_p={dropout_p}")
    else:
        out, lse = _of_lengths(version, q, k, v, options, key_lengths, leading[:-2], table)
    out = out.view(*leading, v.shape[-1]) if lead != 1 else out
    lse = lse.view(leading) if lse is not None and lead != 1 else lse
    return _outputs(out, lse, sink, return_lse)


@planned("qkv", "sink")
def attention_packed(
    qkv: Any, *, causal: bool = True, scale: float | None = None, softcap: float | None = None,
    window: int | None = None, sink: Any = None, return_lse: bool = False, dropout_p: float = 0.0,
    version: str | None = None,
) -> Any:  # fmt: skip
    """`attention` of packed queries, keys and values, without a copy of them; their gradient is one tensor
    too. Differentiable.

        qkv = torch.randn(4, 1024, 3, 12, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        cukern.attention_packed(qkv).flatten(2).sum().backward()  # (4, 1024, 768)

    Args:
        qkv: (batch, time, 3, heads, head_dim), such as a linear layer's output, viewed. dtypes as in
            `attention`.
        causal, scale, softcap, window, sink, return_lse, dropout_p, version: see `attention`.

    Returns (batch, time, heads, head_dim), contiguous with v3; with `return_lse` also lse, (batch, heads,
    time). Errors as in `attention`.
    """
    checks.version("attention", version, (*VERSIONS, "sdpa"))
    (qkv,) = autocast.of_product(interop.floats("qkv", qkv))
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv must be (batch, time, 3, heads, head_dim), got {tuple(qkv.shape)}")
    q, k, v = fused.parts(qkv)
    options, return_lse, sink = _options(version, q, k, v, causal, scale, softcap, window, return_lse, sink)
    options, seed = _dropout(options, dropout_p, qkv)
    out, lse = _attend(version, q, k, v, options, return_lse or sink is not None, qkv, extra=seed)
    return _outputs(out, lse, sink, return_lse, transposed=True)


@planned("q", "k", "v", "cu_seqlens", "cu_seqlens_k", "sink")
def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens: Any, cu_seqlens_k: Any = None, *, causal: bool = True,
    scale: float | None = None, softcap: float | None = None, window: int | None = None, sink: Any = None,
    return_lse: bool = False, version: str | None = None,
) -> Any:  # fmt: skip
    """`attention` of sequences of different lengths, packed without padding: each query sees keys of its own
    sequence only. Differentiable.

        # three sequences, of 40, 1 and 19 tokens
        cu_seqlens = torch.tensor([0, 40, 41, 60], device="cuda", dtype=torch.int32)
        q, k, v = torch.randn(3, 60, 12, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        cukern.attention_varlen(q, k, v, cu_seqlens).square().sum().backward()

    Args:
        q: (tokens, heads, head_dim). k: (key tokens, kv_heads, head_dim), v: (key tokens, kv_heads,
            value_dim). dtypes as in `attention`.
        cu_seqlens: int32 or int64 (sequences + 1,), on q's device: 0, then the end of each sequence's
            queries; the last is q's number of tokens. int32 saves a conversion.
        cu_seqlens_k: the same for the keys; None: cu_seqlens. A sequence may have other numbers of queries
            and of keys, and none.
        causal, scale, softcap, window, sink, return_lse: see `attention`, for each sequence. In each, the
            last query sees all keys.
        version: as in `attention`, without "sdpa".

    The lengths stay on the GPU: a call does not synchronize, and a CUDA graph can be replayed with other
    lengths.

    Returns (tokens, heads, value_dim); with `return_lse` also lse, (heads, tokens). Errors as in `attention`.
    Raises TypeError if cu_seqlens is not int32 or int64; ValueError for its shape or device, and for
    different numbers of sequences. CPU tensors also raise ValueError if it does not begin at 0, decreases, or
    does not end at the number of tokens. On a GPU this is not checked: the first counts as 0, tokens behind
    the last sequence give 0, and other bounds give wrong results, but no access out of bounds.
    """
    checks.version("attention", version, (*VERSIONS, "sdpa"))
    tensors = [interop.floats(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
    if [x.ndim for x in tensors] != [3, 3, 3]:
        shapes = [tuple(x.shape) for x in tensors]
        raise ValueError(
            f"q, k and v must be (tokens, heads, D), (key tokens, kv_heads, D) and (key tokens, kv_heads, "
            f"E), got {shapes}"
        )
    q, k, v = _checked(*(x.transpose(0, 1) for x in tensors))
    bounds = _checked_bounds(cu_seqlens, cu_seqlens_k, version, q, k)
    options, return_lse, sink = _options(version, q, k, v, causal, scale, softcap, window, return_lse, sink)
    out, lse = _attend(version, q[None], k[None], v[None], options, True, bounds=bounds)
    assert lse is not None
    return _outputs(out[0], lse[0], sink, return_lse, transposed=True)


def _checked_bounds(
    cu_seqlens: Any, cu_seqlens_k: Any, version: str | None, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """cu_seqlens and cu_seqlens_k, checked, as int32. q and k: (heads, tokens, D)."""
    given = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens if cu_seqlens_k is None else cu_seqlens_k}
    bounds = {name: interop.to_torch(name, x) for name, x in given.items()}
    for (name, x), tokens in zip(bounds.items(), (q.shape[1], k.shape[1]), strict=True):
        checks.dtype(name, x, (torch.int32, torch.int64))
        if x.ndim != 1 or not x.shape[0]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be (sequences + 1,)")
        checks.one_device(q=q, **{name: x})
        if _readable(x) and (x[0] != 0 or x[-1] != tokens or (x.diff() < 0).any()):
            raise ValueError(
                f"{name} must begin at 0, not decrease, and end at the number of tokens, {tokens}, got "
                f"{x.tolist()}"
            )
    one, two = bounds.values()
    if one.shape != two.shape:
        raise ValueError(
            f"cu_seqlens and cu_seqlens_k must have the same shape, got {tuple(one.shape)} and "
            f"{tuple(two.shape)}"
        )
    if version == "sdpa":
        raise ValueError("version 'sdpa' has no cu_seqlens; the others have")
    one = one.int().contiguous()
    if cu_seqlens_k is not None:
        return one, two.int().contiguous()
    # torch.compile takes no tensor twice as inputs of a Function
    return one, one.clone() if torch.compiler.is_compiling() else one


def _readable(x: Tensor) -> bool:
    """True for a CPU tensor with values."""
    traced = torch.compiler.is_compiling() or transformed() or torch._C._len_torch_dispatch_stack()
    return not traced and x.device.type == "cpu" and type(x) is Tensor


def _in_window(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Options]:
    """The same without the first keys, if no query sees them."""
    queries, window = q.shape[2], options.window
    if not window or not checks.known(queries + window <= k.shape[2]):
        return q, k, v, options
    return (
        q,
        k[:, :, 1 - queries - window :],
        v[:, :, 1 - queries - window :],
        options._replace(window=window if queries > 1 else 0),
    )


def _of_lengths(
    version: str | None, q: Tensor, k: Tensor, v: Tensor, options: Options, key_lengths: Any,
    shape: tuple[int, ...], table: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse with a checked key_lengths, which must have this shape. With a table k and v are in pages,
    (pages, kv heads, page size, D)."""
    if key_lengths is None:
        raise ValueError("block_table needs key_lengths, the number of keys of each sequence, got None")
    lengths = interop.to_torch("key_lengths", key_lengths)
    checks.dtype("key_lengths", lengths, (torch.int32,))
    checks.shape("key_lengths", lengths, tuple(shape), "q's dimensions before the heads")
    checks.one_device(q=q, key_lengths=lengths)
    if version not in (None, *_FUSED):
        raise ValueError(f"version {version!r} has no key_lengths; version None, 'v3' and 'v4' have")
    kernels = chosen(version, q) in _FUSED and fused.supported(q, k, v)
    if table is not None:
        _check_table(table, q, lengths, k.shape[2])
        attend_pages = fused.with_pages if kernels else reference_of_pages
        return attend_pages(q, k, v, options, table.reshape(q.shape[0], table.shape[-1]), lengths.flatten())
    if options.window:
        raise ValueError(f"window and key_lengths exclude each other, got window={options.window}")
    return (fused.with_lengths if kernels else reference)(q, k, v, options, lengths.flatten())


def _check_table(table: Tensor, q: Tensor, lengths: Tensor, page_size: int) -> None:
    """`lengths` has the table's shape without its last dimension."""
    pages, keys = table.shape[-1], table.shape[-1] * page_size
    checks.dtype("block_table", table, (torch.int32,))
    checks.shape("block_table", table, (*lengths.shape, pages), "q's dimensions before the heads, pages")
    checks.one_device(q=q, block_table=table)
    if _readable(lengths) and (lengths > keys).any():
        raise ValueError(
            f"key_lengths must be at most {keys}, the {pages} pages of block_table times the page size "
            f"{page_size}, got {lengths.tolist()}"
        )


def _checked_cache(q: Any, k: Any, v: Any, block_table: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Checked q, k and v, and the table. With a table k and v are (pages, kv heads, page size, D)."""
    if block_table is None:
        return *_checked(q, k, v), None
    table = interop.to_torch("block_table", block_table)
    return *_checked_pages(q, k, v, table), table


def _batched(lead: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The same as (batch, heads, rows, D), of tensors with `lead` dimensions before the heads."""
    tensors = tuple(x[(None,) * -lead] if lead < 0 else x for x in tensors)
    return tuple(x[None] if lead <= 0 else x.flatten(0, lead - 1) for x in tensors)


def _checked_pages(q: Any, k: Any, v: Any, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, and k and v as (pages, kv heads, page size, D)."""
    q, k, v = autocast.of_product(*(interop.floats(name, x) for name, x in (("q", q), ("k", k), ("v", v))))
    checks.same(q=q, k=k, v=v)
    if q.ndim < 3 or (k.ndim, v.ndim) != (4, 4) or q.shape[-1:] != k.shape[-1:] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"with block_table, q, k and v must be (..., heads, queries, D), (pages, page_size, kv_heads, D) "
            f"and (pages, page_size, kv_heads, E), got {[tuple(x.shape) for x in (q, k, v)]}"
        )
    if not table.ndim or k.shape[1] not in _PAGE_SIZES:
        raise ValueError(
            f"block_table must be (..., pages), and the page size a power of two from 16 to "
            f"{_PAGE_SIZES[-1]}, got {tuple(table.shape)} and {k.shape[1]}"
        )
    _check_heads(q, k.shape[2])
    return q, k.transpose(1, 2), v.transpose(1, 2)


def _outputs(
    out: Tensor, lse: Tensor | None, sink: Tensor | None, return_lse: bool, transposed: bool = False
) -> Any:
    """The result of a call: out, or out and lse, with the sink applied, which multiplies out by exp(lse) /
    (exp(lse) + exp(sink)). `transposed`: return out as (..., rows, heads, D)."""
    if sink is not None and lse is not None:
        least = torch.finfo(lse.dtype).min  # for -inf: lse - logit is not NaN where no key is visible
        logit = torch.where(sink < math.inf, sink, math.nan).to(lse.dtype).clamp(min=least)[..., None]
        factor = torch.nn.functional.logsigmoid(lse - logit).exp()  # sigmoid is 0 below -88, where exp is not
        out = (out * factor[..., None]).to(out.dtype)
        if return_lse:
            # logaddexp's second derivative may be NaN
            lse = torch.stack(torch.broadcast_tensors(lse, logit)).logsumexp(0)
            lse = lse.masked_fill(lse == least, -math.inf)
    out = out.transpose(-3, -2) if transposed else out
    return (out, lse) if return_lse else out


def _options(
    version: str | None, q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: Any, softcap: Any, window: Any,
    return_lse: Any, sink: Any, num_splits: Any = None, table: Tensor | None = None,
) -> tuple[Options, bool, Tensor | None]:  # fmt: skip
    """Checked arguments: Options, return_lse, sink."""
    if version in _FUSED and q.dtype in plan.DTYPES and not fused.supported(q, k, v):
        raise ValueError(
            f"version {version!r} supports a head_dim that is a multiple of 8, from 8 to "
            f"{plan.most_head_dim(q.dtype)} for {q.dtype},"
            f" and the same for q, k and v, got {q.shape[-1]} and {v.shape[-1]} for v; version None takes any"
        )
    if softcap is not None and not checks.number("softcap", softcap, 1e30) >= 1e-30:
        raise ValueError(f"softcap must be positive, at least 1e-30, got {softcap!r}")
    causal, window = (
        checks.flag("causal", causal),
        0 if window is None else checks.integer("window", window, 1),
    )
    if window and not causal:
        raise ValueError(f"window needs causal=True, got window={window}")
    keys = k.shape[-2] if table is None else k.shape[-2] * table.shape[-1]
    window = 0 if checks.known(window >= keys) else window
    splits = 0 if num_splits is None else checks.integer("num_splits", num_splits, 1)
    options = Options(causal, scale_of(q, scale), float(softcap or 0), window=window, splits=splits)
    return options, checks.flag("return_lse", return_lse), None if sink is None else checked_sink(q, sink)


def _dropout(options: Options, dropout_p: Any, x: Tensor) -> tuple[Options, Tensor | None]:
    """The options with a checked dropout_p, and a new seed, on x's device, if weights are dropped."""
    p = checks.number("dropout_p", dropout_p)
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    options = options._replace(dropout=float(p))
    if not options.threshold:
        return options._replace(dropout=0.0), None
    return options, torch.randint(1 << 62, (1,), dtype=torch.int64, device=x.device)


def _bias(
    bias: Any, slopes: Any, others: dict[str, Any], shape: tuple[int, ...], q: Tensor, k: Tensor
) -> Tensor | None:
    """The checked bias with 4 dimensions, or slopes with 2. `shape`: that of q before it was batched, without
    the last dimension. `others`: the options that exclude it."""
    if bias is None and slopes is None:
        return None
    name, given = ("bias", bias) if bias is not None else ("alibi_slopes", slopes)
    others = {"alibi_slopes": slopes, **others} if bias is not None else others
    for other, value in others.items():
        if value is not None:
            raise ValueError(f"{name} and {other} exclude each other, got {other}={checks.brief(value)}")
    x = interop.to_torch(name, given)
    checks.dtype(name, x, (torch.float32,) if bias is None else dict.fromkeys((q.dtype, torch.float32)))
    checks.one_device(q=q, **{name: x})
    if bias is None:
        if x.shape not in (shape[-2:-1], shape[:-1]):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be (heads,) or {tuple(shape[:-1])}")
        return x.detach().reshape(-1, q.shape[1]).contiguous()
    full = *shape, k.shape[2]
    sizes = (1,) * (len(full) - x.ndim) + tuple(x.shape)
    if len(sizes) != len(full) or any(n not in (1, m) for n, m in zip(sizes, full, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, it must broadcast to {full}: heads, queries, keys"
        )
    x = x[(None,) * (max(4, len(full)) - x.ndim)]
    return x if len(full) <= 4 else x.expand(*shape[:-2], *x.shape[-3:]).flatten(0, len(full) - 4)


def scale_of(q: Tensor, scale: Any) -> float | None:
    """The checked scale. A trace leaves the default to the raw op, because head_dim may be dynamic."""
    if scale is None:
        return None if torch.compiler.is_compiling() else max(q.shape[-1], 1) ** -0.5
    scale = checked_scale(q, scale)
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale!r}")
    return float(scale)


def _checked(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = autocast.of_product(*(interop.floats(name, x) for name, x in (("q", q), ("k", k), ("v", v))))
    checks.same(q=q, k=k, v=v)
    if (
        q.ndim < 2
        or q.shape[:-3] != k.shape[:-3]
        or q.ndim != k.ndim
        or q.shape[-1:] != k.shape[-1:]
        or k.shape[:-1] != v.shape[:-1]
    ):
        shapes = [tuple(x.shape) for x in (q, k, v)]
        raise ValueError(
            f"q, k and v must be (..., heads, queries, D), (..., kv_heads, keys, D) and (..., kv_heads, "
            f"keys, E), got {shapes}"
        )
    if q.ndim > 2:
        _check_heads(q, k.shape[-3])
    return q, k, v


def _check_heads(q: Tensor, kv_heads: int) -> None:
    if q.shape[-3] % kv_heads if kv_heads else q.shape[-3]:
        raise ValueError(
            f"q has {q.shape[-3]} heads, which must be a multiple of the {kv_heads} heads of k and v"
        )


# ---- the versions

_PAGE_SIZES = tuple(1 << i for i in range(4, 17))
_FUSED = "v3", "v4"
VERSIONS = {
    "v1": Version("scores in memory, cukern.softmax"),
    "v2": Version("scores in memory, cukern.causal_softmax"),
    "v3": Version("fused, scores in registers", launch.instances, 80),
    "v4": Version("fused, wgmma and TMA", launch.wgmma_instances, 90),
}


def _attend(
    version: str | None, q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool,
    qkv: Tensor | None = None, bounds: tuple[Tensor, ...] = (), extra: Tensor | None = None,
) -> materialised.Outputs:  # fmt: skip
    """out and lse. `qkv`: the tensor of which q, k and v are parts. `bounds`: cu_seqlens of the queries and
    of the keys. `extra`: as in `reference`; v4 does not have it together with a softcap."""
    version = chosen(version, q)
    options = options._replace(wgmma=version == "v4")
    if extra is not None and options.softcap:
        options = options._replace(wgmma=False)
    kernels = version in _FUSED and fused.supported(q, k, v)
    if options.window:
        kernels = kernels and options.wgmma and wgmma.available(q)
    if kernels and extra is None:
        return fused.fused((q, k, v, *bounds) if qkv is None else (qkv,), options)
    if qkv is not None and not (torch.compiler.is_compiling() or transformed()):
        q, k, v = fused.Parts.apply(qkv)
    if kernels and extra is not None:
        return fused.fused((q, k, v, extra), options)
    return _with_scores(version, q, k, v, options, return_lse, bounds, extra)


def _with_scores(
    version: str, q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool,
    bounds: tuple[Tensor, ...], extra: Tensor | None,
) -> materialised.Outputs:  # fmt: skip
    """`_attend` without a fused kernel."""
    lengths = (bounds[0], bounds[1]) if bounds else None
    if version == "sdpa":
        return materialised.by_sdpa(q, k, v, options, return_lse, extra)
    if not (q.is_cuda or backend.simulates(q)):
        return reference(q, k, v, options, lengths, extra)
    if lengths is not None:
        return materialised.by_softmax(q, k, v, options, lengths=lengths)
    attend = materialised.by_softmax if version == "v1" else materialised.by_causal_softmax
    return attend(q, k, v, options, return_lse, extra=extra)


def chosen(version: str | None, q: Tensor) -> str:
    """The version that computes a call."""
    kernels = q.is_cuda or backend.simulates(q)
    if version in _FUSED and not kernels:
        checks.needs_gpu("attention", version, q.device)
    return version or (_default(in_force.now, q.get_device()) if kernels else "v1")


@checks.constant
def _default(version: str, device: int) -> str:
    return choose("attention", version, device).forward
