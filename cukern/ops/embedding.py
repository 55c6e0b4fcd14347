"""embedding: out[..., t, :] = weight[tokens[..., t]] + positions[t]: GPT-2's token and position embeddings in one launch.

    dweight[v] = sum of dout over the rows with token v, dpositions[t] = sum of dout over the batch, both in a fixed order

The op is linear in weight and positions, so that the derivative of each gradient is the op itself. docs/notes/embedding.md has the costs.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from cukern.runtime import backend, checks, interop
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Cost, Differentiable, Op, Version, apply_of, choose, each, raw_op, register, save, watched

THREADS = 256
VECTOR_BYTES = 16
ROWS, CHUNK = 4, 64  # as in embedding.cu: rows of a thread of embedding_v2, and sorted tokens of a block of embedding_v2_bwd
TOKENS = (torch.int32, torch.int64)


def embedding(tokens: Any, weight: Any, positions: Any = None, *, version: str | None = None) -> Tensor:
    """weight[tokens], plus a row of positions for each step of the last dimension. Differentiable any number of times.

        weight = torch.randn(50304, 768, device="cuda", requires_grad=True)
        positions = torch.randn(1024, 768, device="cuda", requires_grad=True)
        tokens = torch.randint(50257, (8, 1024), device="cuda")
        cukern.embedding(tokens, weight, positions).square().sum().backward()  # (8, 1024, 768)

    Args:
        tokens: int32 or int64, of any shape, such as (batch, time); with positions, at least one dimension. No gradient.
        weight: (vocabulary, features), float16, bfloat16, float32 or float64.
        positions: None, or a table (at least time, features) of weight's dtype: row t is added where the last index of tokens is t.
        version: "v1" or "v2"; default: the fastest.

    All are tensors or arrays that support DLPack, on one device. What is not contiguous is copied first. 16-bit types are added in float32
    and rounded once, in the gradients too, which are dense: rows of tokens that do not occur are 0, and so are unused rows of positions.
    v2's gradient of weight sorts the tokens with torch.sort and needs memory for tokens / 32 rows in float32 (float64 for float64). All
    sums have a fixed order, so that two runs give the same bits. CPU tensors use torch's operations, or the simulator.

    A token outside of the vocabulary raises ValueError on the CPU. On a GPU, where finding it would need a synchronization, its row of the
    output is NaN and its row of the gradient is dropped; the same holds in the simulator. In a graph of torch.compile on the CPU, torch
    checks the tokens.

    Returns a new contiguous tensor (*tokens.shape, features) of weight's dtype. Autocast does not change the dtype or the computation.

    Raises TypeError for other dtypes; ValueError for shapes or devices that do not fit, a time longer than the table of positions, an
    unknown version, or a tensor with the negative bit.

    Token and position embeddings: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """
    tokens, weight = interop.to_torch("tokens", tokens), interop.to_torch("weight", weight)
    positions = None if positions is None else interop.to_torch("positions", positions)
    checks.version("embedding", version, VERSIONS)
    _check(tokens, weight, positions)
    if not weight.is_cuda and not backend.simulates(weight):
        if version is not None:
            checks.needs_gpu("embedding", version, weight.device)
        return _on_cpu(tokens, weight, positions)
    if watched(weight, positions):
        return _apply(tokens, weight, positions, version or "")
    return _embedding(tokens, weight, positions, version or "")


def _check(tokens: Tensor, weight: Tensor, positions: Tensor | None) -> None:
    checks.dtype("tokens", tokens, TOKENS)
    checks.dtype("weight", weight, checks.FLOATS)
    if weight.ndim != 2:
        raise ValueError(f"weight must be (vocabulary, features), its shape is {tuple(weight.shape)}")
    if tokens.device != weight.device:
        raise ValueError(f"tokens is on {tokens.device}, weight is on {weight.device}: they must be on one device")
    if positions is None:
        return
    checks.dtype("positions", positions, checks.FLOATS)
    checks.same(weight=weight, positions=positions)
    if positions.ndim != 2 or positions.shape[1] != weight.shape[1]:
        raise ValueError(
            f"positions must be (time, features) with {weight.shape[1]} features as weight, its shape is {tuple(positions.shape)}"
        )
    if tokens.ndim == 0:
        raise ValueError("tokens must have at least one dimension, the time, if positions are given; its shape is ()")
    if tokens.shape[-1] > positions.shape[0]:
        raise ValueError(f"tokens has a time of {tokens.shape[-1]}, the table of positions ends after {positions.shape[0]}")


def reference(weight: Tensor, positions: Tensor | None, tokens: Tensor) -> Tensor:
    out = torch.nn.functional.embedding(tokens, weight)
    return out if positions is None else out + positions[: tokens.shape[-1]]


def _on_cpu(tokens: Tensor, weight: Tensor, positions: Tensor | None) -> Tensor:
    """The reference. The sums of 16-bit gradients are float32, as in the kernels: torch's would round after each row."""
    dtype = weight.dtype
    if dtype.itemsize == 2 and watched(weight, positions):
        weight, positions = weight.float(), None if positions is None else positions.float()
    if torch.compiler.is_compiling():
        return reference(weight, positions, tokens).to(dtype)
    try:
        return reference(weight, positions, tokens).to(dtype)
    except IndexError:
        wrong = tokens[(tokens < 0) | (tokens >= weight.shape[0])]
        raise ValueError(f"tokens has {wrong[0].item()}, it must be in 0..{weight.shape[0] - 1}: weight has that many rows") from None


# ---- the raw ops: the gradient is that of weight, or without tokens that of positions


def _launch(tokens: Tensor, weight: Tensor, positions: Tensor | None, version: str) -> Tensor:
    out = _fake(tokens, weight)
    if out.numel():
        tokens, weight, positions = (None if t is None else t.contiguous() for t in (tokens, weight, positions))
        choose("embedding", version, weight.get_device()).forward(out, tokens, weight, positions)
    return out


def _fake(tokens: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]))


def _launch_backward(dout: Tensor, tokens: Tensor | None, size: int, version: str) -> Tensor:
    if not dout.numel() or not size:
        return dout.new_zeros((size, dout.shape[-1]))
    dout, tokens = dout.resolve_neg().contiguous(), None if tokens is None else tokens.contiguous()
    return choose("embedding", version, dout.get_device()).backward(dout, tokens, size)


def _fake_backward(dout: Tensor, tokens: Tensor | None, size: int, *_: Any) -> Tensor:
    return dout.new_empty((size, dout.shape[-1]))


_embedding = raw_op("_embedding(Tensor tokens, Tensor weight, Tensor? positions, str version) -> Tensor", 3, _launch, _fake)
_embedding_backward = raw_op(
    "_embedding_backward(Tensor dout, Tensor? tokens, SymInt size, str version) -> Tensor", 2, _launch_backward, _fake_backward
)


class _Embedding(Differentiable):
    @staticmethod
    def forward(tokens, weight, positions, version):
        return _embedding(tokens, weight, positions, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tokens, weight, positions, ctx.version = inputs
        ctx.vocabulary, ctx.table = weight.shape[0], 0 if positions is None else positions.shape[0]
        ctx.shape = output.shape
        save(ctx, tokens)

    @staticmethod
    def backward(ctx, dout):
        (tokens,) = ctx.saved_tensors
        dweight = _apply_backward(dout, tokens, ctx.vocabulary, ctx.version) if ctx.needs_input_grad[1] else None
        dpositions = _apply_backward(dout, None, ctx.table, ctx.version) if ctx.needs_input_grad[2] else None
        return None, dweight, dpositions, None

    @staticmethod
    def tangent(ctx, _, dweight, dpositions, __):
        (tokens,) = ctx.saved_tensors
        if dweight is None:
            return dpositions[: ctx.shape[-2]].expand(ctx.shape).contiguous()
        return _apply(tokens, dweight, dpositions, ctx.version)

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply, info.batch_size, in_dims, args)


class _EmbeddingBackward(Differentiable):
    @staticmethod
    def forward(dout, tokens, size, version):
        return _embedding_backward(dout, tokens, size, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        dout, tokens, ctx.size, ctx.version = inputs
        ctx.shape = dout.shape
        save(ctx, tokens)

    @staticmethod
    def backward(ctx, d):
        (tokens,) = ctx.saved_tensors
        ddout = d[: ctx.shape[-2]].expand(ctx.shape) if tokens is None else _apply(tokens, d, None, ctx.version)
        return ddout, None, None, None

    @staticmethod
    def tangent(ctx, ddout, *_):
        return _apply_backward(ddout, *ctx.saved_tensors, ctx.size, ctx.version)

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply_backward, info.batch_size, in_dims, args)


_apply, _apply_backward = apply_of(_Embedding), apply_of(_EmbeddingBackward)

# ---- the versions

_V1, _V1_BWD, _V1_POSITIONS = (Template("embedding.cu", f"embedding_v1{name}") for name in ("", "_bwd", "_bwd_positions"))
_V2, _V2_BWD, _V2_POSITIONS = (Template("embedding.cu", f"embedding_v2{name}", pdl=True) for name in ("", "_bwd", "_bwd_positions"))
_V2_RUNS = Template("embedding.cu", "embedding_v2_bwd_runs", pdl=True)


def _run(kernel: Kernel, blocks: int, block: tuple[int, int], tensors: Sequence[Tensor | None], *numbers: int) -> None:
    pointers = (0 if t is None else t.data_ptr() for t in tensors)
    kernel.on(tensors[0].get_device())((blocks, 1, 1), (*block, 1), 0, *pointers, *numbers)  # type: ignore[union-attr]


def _forward_v1(out: Tensor, tokens: Tensor, weight: Tensor, positions: Tensor | None) -> None:
    numbers = tokens.numel(), _time(tokens), *weight.shape, tokens.dtype == torch.int64
    _run(_V1[out.dtype], -(-out.numel() // THREADS), (THREADS, 1), (out, tokens, weight, positions), *numbers)


def _forward_v2(out: Tensor, tokens: Tensor, weight: Tensor, positions: Tensor | None) -> None:
    rows, features, tensors = tokens.numel(), weight.shape[1], (out, tokens, weight, positions)
    width = _width(features, out, weight, positions)
    threads, slices = _slices(features // width)
    numbers = rows, _time(tokens), weight.shape[0], features, tokens.dtype == torch.int64
    block = threads, THREADS // threads
    _run(_V2[out.dtype, width], slices * -(-rows // (ROWS * block[1])), block, tensors, *numbers)


def _backward_v1(dout: Tensor, tokens: Tensor | None, size: int) -> Tensor:
    grad = _fake_backward(dout, tokens, size)
    blocks, (rows, features) = -(-grad.numel() // THREADS), _rows(dout)
    if tokens is None:
        _run(_V1_POSITIONS[dout.dtype], blocks, (THREADS, 1), (grad, dout), rows, dout.shape[-2], size, features)
    else:
        wide = tokens.dtype == torch.int64
        _run(_V1_BWD[dout.dtype], blocks, (THREADS, 1), (grad, dout, tokens), rows, size, features, wide)
    return grad


def _backward_v2(dout: Tensor, tokens: Tensor | None, size: int) -> Tensor:
    rows, features = _rows(dout)
    width = _width(features, dout)
    if tokens is None:
        grad = _fake_backward(dout, tokens, size)
        kernel, blocks = _V2_POSITIONS[dout.dtype, width], -(-grad.numel() // (THREADS * width))
        _run(kernel, blocks, (THREADS, 1), (grad, dout), rows, dout.shape[-2], size, features)
        return grad
    tokens = tokens.view(-1)
    if tokens.dtype == torch.int64 and size < 2**31 - 1:  # half the passes of the radix sort
        tokens = tokens.clamp(-1, size).int()
    ordered, order = torch.sort(tokens, stable=True)
    grad, chunks = dout.new_zeros((size, features)), -(-rows // CHUNK)
    partials = torch.empty(
        (2 * chunks, features), dtype=torch.float64 if dout.dtype == torch.float64 else torch.float32, device=dout.device
    )
    numbers = rows, size, features, tokens.dtype == torch.int64
    threads, slices = _slices(features // width)
    _run(_V2_BWD[dout.dtype, width], chunks * slices, (threads, 1), (grad, partials, dout, ordered, order), *numbers)
    threads, slices = _slices(features)
    _run(_V2_RUNS[dout.dtype], chunks * slices, (threads, 1), (grad, partials, ordered), *numbers)
    return grad


def _time(tokens: Tensor) -> int:
    return tokens.shape[-1] if tokens.ndim else 1


def _rows(dout: Tensor) -> tuple[int, int]:
    return prod(dout.shape[:-1]), dout.shape[-1]


def _width(features: int, *tensors: Tensor | None) -> int:
    """Elements of a vector: 16 bytes if all rows are aligned to that, else 1."""
    itemsize = tensors[0].element_size()  # type: ignore[union-attr]
    aligned = features * itemsize % VECTOR_BYTES == 0 and all(t is None or t.data_ptr() % VECTOR_BYTES == 0 for t in tensors)
    return VECTOR_BYTES // itemsize if aligned else 1


def _slices(vectors: int) -> tuple[int, int]:
    """The threads of a block that share a row, and the number of slices of a row."""
    threads = min(vectors, THREADS)
    return threads, -(-vectors // threads)


def _instances(dtype: torch.dtype) -> Iterable[Kernel]:
    widths = 1, VECTOR_BYTES // dtype.itemsize
    return [*(template[dtype, width] for template in (_V2, _V2_BWD, _V2_POSITIONS) for width in widths), _V2_RUNS[dtype]]


VERSIONS = {
    "v1": Version("one thread per element", _forward_v1, _backward_v1, lambda dtype: (_V1[dtype], _V1_BWD[dtype], _V1_POSITIONS[dtype])),
    "v2": Version("16-byte vectors; the gradient from sorted tokens", _forward_v2, _backward_v2, _instances),
}

# ---- for the tools


def _make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """One token in ten is token 0. The table of positions is longer than the time, unless that is a multiple of 8."""
    batch, time, vocabulary, features = dims
    tokens = torch.randint(vocabulary, (batch, time), device=device)
    tokens[torch.rand(batch, time, device=device) < 0.1] = 0
    table = -(-time // 8) * 8
    return *(torch.randn(n, features, dtype=dtype, device=device) for n in (vocabulary, table)), tokens


def _cost(dims: Sequence[int], itemsize: int, positions: bool = True) -> dict[str, Cost]:
    """The forward reads the rows of weight that occur, as many as are expected of _make."""
    batch, time, vocabulary, features = dims
    rows, table = batch * time, -(-time // 8) * 8
    occurring = vocabulary * (1 - (1 - 1 / vocabulary) ** (0.9 * rows))
    read, written = rows + int(occurring) + positions * time, rows + vocabulary
    dweight = Cost(8 * rows + written * features * itemsize, rows * features)
    dpositions = Cost((rows + table) * features * itemsize, rows * features)
    forward = Cost(8 * rows + read * features * itemsize, rows * features)
    if not positions:
        return {"fwd": forward, "bwd": dweight}
    both = Cost(dweight.bytes + table * features * itemsize, 2 * rows * features)
    return {"fwd": forward, "bwd": both, "bwd:weight": dweight, "bwd:positions": dpositions}


def _register(name: str, spread: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: tuple[str, ...]) -> None:
    positions = "positions" in inputs
    register(
        Op(
            name=name,
            stem="embedding",
            function=embedding,
            reference=plain,
            versions=VERSIONS,
            dtypes=checks.FLOATS,
            dims="BATCH TIME VOCABULARY FEATURES",
            check_dims=((1, 1, 1, 1), (2, 5, 7, 3), (3, 67, 11, 24), (4, 1024, 1000, 768)),
            sim_dims=((1, 1, 1, 1), (2, 5, 7, 3), (3, 67, 11, 24)),
            bench_dims=((32, 1024, 50304, 768), (8, 1024, 32000, 4096)),
            make=_make if positions else lambda *args: _make(*args)[::2],
            inputs=inputs,
            cost=lambda dims, itemsize: _cost(dims, itemsize, positions),
            bound="memory",
            spread=spread,
        )
    )


_register(
    "embedding",
    lambda weight, positions, tokens, version=None: embedding(tokens, weight, positions, version=version),
    reference,
    ("weight", "positions", "tokens"),
)
_register(
    "embedding_tokens",
    lambda weight, tokens, version=None: embedding(tokens, weight, version=version),
    lambda weight, tokens: reference(weight, None, tokens),
    ("weight", "tokens"),
)
