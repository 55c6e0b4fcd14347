"""embedding: out[..., t, :] = weight[tokens[..., t]] + positions[t], GPT-2's two embeddings. Gradients:
kernels_cu/embedding.cu."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.runtime import checks, recording
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import dispatched, watched
from cukern.runtime.dispatch.higher import differentiable
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.planning import planned
from cukern.runtime.registry import Case, Cost, Op, Version, register
from cukern.runtime.tensors import VECTOR_BYTES, pointers, vector_width, wide

# as in embedding.cu; FEW: the most tokens that are not sorted
THREADS, FEW_THREADS, ROWS, CHUNK, FEW = 128, 256, 2, 64, 2048


@planned("tokens", "weight", "positions")
def embedding(tokens: Any, weight: Any, positions: Any = None, *, version: str | None = None) -> Tensor:
    """weight[tokens], plus a row of positions for each step of the last dimension, as in GPT-2.
    Differentiable any number of times.

        weight, positions = (torch.randn(n, 768, device="cuda", requires_grad=True) for n in (50304, 1024))
        tokens = torch.randint(50257, (8, 1024), device="cuda")
        cukern.embedding(tokens, weight, positions).square().sum().backward()  # of (8, 1024, 768)

    Args:
        tokens: int32 or int64, of any shape, such as (batch, time); with positions, at least one dimension.
            No gradient.
        weight: (vocabulary, features), float16, bfloat16, float32 or float64.
        positions: None, or a table (at least time, features) of weight's dtype (under autocast, of any): row
            t is added where the last index of tokens is t.
        version: "v1" or "v2"; default: the fastest.

    Arrays, CPU tensors, autocast: see `help(cukern)`. What is not contiguous is copied first. Gradients are
    dense: rows of tokens that do not occur, and unused rows of positions, are 0. Two runs give the same bits.

    A token outside of the vocabulary raises ValueError on the CPU. On a GPU, where finding it would need a
    synchronization, its row of the output is NaN and its row of the gradient is dropped; so it is in the
    simulator. Graphs of torch.compile on the CPU leave it to torch.

    Returns a new contiguous tensor (*tokens.shape, features) of weight's dtype. Raises TypeError for other
    dtypes; ValueError for shapes or devices that do not fit, a time longer than the table of positions, an
    unknown version, or a tensor with the negative bit. Source: Radford et al., "Language Models are
    Unsupervised Multitask Learners", 2019.
    """
    weight, positions = (
        interop.floats("weight", weight),
        None if positions is None else interop.floats("positions", positions),
    )
    if positions is not None and autocast.enabled(weight):
        weight, positions = autocast.widest(weight, positions)
    tokens = interop.indices("tokens", tokens, "weight", weight)
    checks.version("embedding", version, VERSIONS)
    if weight.ndim != 2:
        raise ValueError(f"weight must be (vocabulary, features), its shape is {tuple(weight.shape)}")
    positions = None if positions is None else _positions(positions, weight, tokens)
    if backend.uses_torch("embedding", version, weight):
        return _on_cpu(tokens, weight) if positions is None else _on_cpu(tokens, weight, positions)
    return (_apply if watched(weight, positions) else _embedding)(
        tokens, weight, positions, version or in_force.now
    )


def _positions(positions: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    table, shape = positions, tuple(tokens.shape)
    checks.same(weight=weight, positions=table)
    if table.ndim != 2 or table.shape[1] != weight.shape[1]:
        raise ValueError(
            f"positions must be (time, {weight.shape[1]}), as weight has such rows; its shape is "
            f"{tuple(table.shape)}"
        )
    if not shape or shape[-1] > table.shape[0]:
        raise ValueError(
            f"tokens has shape {shape}: its last dimension must be at most the {table.shape[0]} rows of "
            f"positions"
        )
    return table


def reference(weight: Tensor, *rest: Tensor) -> Tensor:  # rest: positions, if any, and tokens
    *positions, tokens = rest
    # torch's second derivative of an embedding of no tokens raises an error
    out = torch.nn.functional.embedding(tokens, weight) if tokens.numel() else weight[tokens.long()]
    return out + positions[0][: tokens.shape[-1]] if positions else out


def _on_cpu(tokens: Tensor, *tables: Tensor) -> Tensor:
    """The reference. The sums of 16-bit gradients are float32, as in the kernels: torch's would round after
    each row."""
    dtype, vocabulary = tables[0].dtype, tables[0].shape[0]
    wide = [t.float() for t in tables] if dtype.itemsize == 2 and watched(*tables) else tables
    try:
        return reference(*wide, tokens).to(dtype)
    except IndexError:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0].item()
        raise ValueError(f"tokens has {wrong}, it must be in the vocabulary, 0..{vocabulary - 1}") from None


# ---- the raw ops


def _launch(tokens: Tensor, weight: Tensor, positions: Tensor | None, version: str) -> Tensor:
    out = weight.new_empty((*tokens.shape, weight.shape[1]))
    if not weight.shape[0]:
        return out.fill_(math.nan)
    if out.numel():
        tensors = (
            out,
            *(None if t is None else t.resolve_neg().contiguous() for t in (tokens, weight, positions)),
        )
        numbers = (
            tokens.numel(),
            tokens.shape[-1] if tokens.ndim else 1,
            *weight.shape,
            tokens.dtype == torch.int64,
        )
        _FORWARD[choose("embedding", version, weight.get_device()).forward](tensors, *numbers)
    return out


def _launch_backward(dout: Tensor, tokens: Tensor, size: int, version: str) -> Tensor:
    dweight, dout = dout.new_zeros((size, dout.shape[-1])), dout.resolve_neg().contiguous()
    if dout.numel() and size:
        # it raises an error for a version that the GPU cannot run
        choose("embedding", version, dout.get_device())
        _add_rows(dweight, dout, tokens.contiguous(), tokens.numel())
    return dweight


def _rule(rule: str, tokens: Tensor, has_positions: bool) -> str:
    """The sharding of a raw op; with positions, the time is not split."""
    dims = "0123456789"[: tokens.ndim]
    return rule.format(dims[:-1] + "." if has_positions else dims or "")


_embedding = raw_op(
    "_embedding(Tensor tokens, Tensor weight, Tensor? positions, str version) -> Tensor", 3, _launch,
    lambda tokens, weight, *_: weight.new_empty((*tokens.shape, weight.shape[1])), sharding=lambda tokens, _,
    positions, *__: _rule("{0}, .c, .c -> {0}c", tokens, positions is not None),
)  # fmt: skip
_backward = raw_op(
    "_embedding_backward(Tensor dout, Tensor tokens, SymInt size, str version) -> Tensor", 2,
    _launch_backward, lambda dout, tokens, size, *_: dout.new_empty((size, dout.shape[-1])),
    sharding=lambda _, tokens, *__: _rule("{0}c, {0} -> .c", tokens, False),
)  # fmt: skip


def _positions_backward(dout: Tensor, table: int) -> Tensor:
    """The sum over the batch, by torch: in a fixed order, and in float32 for 16-bit types. Unused rows of the
    table are 0."""
    total = dout.sum_to_size(dout.shape[-2:])
    whole = checks.known(total.shape[0] == table)
    return total.contiguous() if whole else torch.nn.functional.pad(total, (0, 0, 0, table - total.shape[0]))


def _gradient(
    needed: Sequence[bool], inputs: Sequence[Any], _: Any, dout: Tensor
) -> tuple[Tensor | None, ...]:
    tokens, weight, positions, version = inputs
    dweight = _backward(dout, tokens, weight.shape[0], version) if needed[1] else None
    return None, dweight, _positions_backward(dout, positions.shape[0]) if needed[2] else None


def _in_torch(tokens: Tensor, weight: Tensor, positions: Tensor | None, *_: Any) -> Tensor:
    """The op for derivatives. Sums of 16-bit gradients are float32."""
    inside = ((tokens >= 0) & (tokens < weight.shape[0]))[..., None]
    rows = weight.to(wide(weight.dtype))[torch.where(inside[..., 0], tokens, 0).long()]
    out = torch.where(inside, rows, math.nan)
    return (out if positions is None else out + positions[: tokens.shape[-1]]).to(weight.dtype)


@functools.lru_cache(64)
def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty((), dtype=dtype, device=device).expand(shape)


def _shape_of(table: Tensor | None) -> Tensor | None:
    """A tensor of a table's shape without its memory: the op is linear in the tables, so derivatives need no
    more."""
    if table is None:
        return None
    if type(table) not in checks.PLAIN or dispatched():
        return table.new_empty(()).expand(table.shape)
    placeholder = _placeholder(table.shape, table.dtype, table.device)
    if (recorder := recording.local.recorder) is not None:
        recorder.constant(placeholder)
    return placeholder


_apply = differentiable(
    "_Embedding", _embedding, _in_torch, 3, gradient=_gradient, kept=lambda inputs,
    _: (inputs[0], _shape_of(inputs[1]), _shape_of(inputs[2])),
)  # fmt: skip

# ---- the versions, which have one backward

_V1 = Template("embedding.cu", "embedding_v1")
_V2, _V2_BWD, _FEW = (
    Template("embedding.cu", f"embedding_v2{name}", pdl=True) for name in ("", "_bwd", "_bwd_few")
)


def _run(
    kernel: Kernel,
    groups: int,
    vectors: int,
    tensors: Sequence[Any],
    *numbers: int,
    height: int = 1,
    lanes: int = 0,
) -> None:
    """Launch `groups` rows of blocks, with a thread for each of `vectors` columns, and `height` rows of
    threads (of `lanes`) per block."""
    slices = -(-vectors // (lanes or THREADS))
    grid, block = (groups, slices, 1), (lanes or -(-vectors // slices), height, 1)
    kernel.on(tensors[0].get_device())(grid, block, 0, *pointers(*tensors), *numbers)


def _forward_v1(tensors: Sequence[Tensor], *numbers: int) -> None:
    _run(_V1[tensors[0].dtype], -(-tensors[0].numel() // THREADS), THREADS, tensors, *numbers)


def _forward_v2(tensors: Sequence[Tensor], rows: int, time: int, *numbers: int) -> None:
    width = vector_width(tensors[0], *tensors[2:])
    vectors = tensors[0].shape[-1] // width
    height, time = max(1, THREADS // vectors), time if tensors[3] is not None else -(-rows // ROWS)
    groups = -(-time // height) * -(-rows // (time * ROWS))
    _run(_V2[tensors[0].dtype, width], groups, vectors, tensors, rows, time, *numbers, height=height)


def _add_rows(dweight: Tensor, dout: Tensor, tokens: Tensor, rows: int) -> None:
    (size, features), width, many = dweight.shape, vector_width(dout), rows > FEW
    if many:
        ordered, small, chunks = tokens.view(-1), size < 2**16 - 1, -(-rows // CHUNK)
        # fewer bytes need fewer passes of the radix sort
        if small or (size < 2**31 - 1 and tokens.dtype == torch.int64):
            ordered = ordered.clamp(-1, size).to(torch.int16 if small else torch.int32)
        ordered, order = torch.sort(ordered, stable=True)
        # -1 becomes 65535, outside of the vocabulary too
        ordered = ordered.view(torch.uint16).int() if small else ordered
        partials = dout.new_empty((2 * chunks, features), dtype=wide(dout.dtype))
        tokens = order.new_empty(2 * chunks)
        tensors, kernel = (dweight, partials, tokens, dout, ordered, order), _V2_BWD[dout.dtype, width]
        _run(kernel, chunks, features // width, tensors, rows, size, features, ordered.dtype == torch.int64)
        dout, rows, width = partials, 2 * chunks, vector_width(partials)
    kernel = _FEW[dweight.dtype, dout.dtype, width]
    height = 8 if features // width <= 32 else 4 if width > 1 else 2
    numbers = rows, size, features, tokens.dtype == torch.int64, many
    _run(
        kernel,
        rows,
        features // width,
        (dweight, dout, tokens),
        *numbers,
        height=height,
        lanes=FEW_THREADS // height,
    )


def _instances(dtype: torch.dtype) -> Iterable[Kernel]:
    of_rows = {(dtype, of, n) for of in (dtype, wide(dtype)) for n in (1, VECTOR_BYTES // of.itemsize)}
    return *(_FEW[key] for key in of_rows), *(
        t[dtype, n] for t in (_V2, _V2_BWD) for n in (1, VECTOR_BYTES // dtype.itemsize)
    )


VERSIONS = {
    "v1": Version("one thread per element", lambda dtype: (_V1[dtype], *_instances(dtype))),
    "v2": Version("vectors, sorted tokens", _instances),
}
_FORWARD: dict[str, Callable[..., None]] = {"v1": _forward_v1, "v2": _forward_v2}

# ---- for the tools


def _make(
    positions: bool, dims: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """One token in ten is token 0. The table of positions is longer than the time, unless that is a multiple
    of 8."""
    batch, time, vocabulary, features = dims
    tokens = torch.randint(vocabulary, (batch, time), dtype=torch.int64, device=device)
    tokens[torch.rand(batch, time, dtype=torch.float32, device=device) < 0.1] = 0
    lengths = (vocabulary, -(-time // 8) * 8)[: 1 + positions]
    return *(torch.randn(n, features, dtype=dtype, device=device) for n in lengths), tokens


def _cost(positions: bool, dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    """The forward reads the rows of weight that occur: as many as _make is expected to draw."""
    (batch, time, vocabulary, features), table = dims, -(-dims[1] // 8) * 8
    rows, occurring = batch * time, int(vocabulary * (1 - (1 - 1 / vocabulary) ** (0.9 * batch * time)))
    moved = {"fwd": rows + occurring + positions * time, "bwd": rows + vocabulary + positions * table}
    if positions:
        moved |= {"bwd:weight": rows + vocabulary, "bwd:positions": rows + table}
    return {name: Cost(8 * rows + n * features * itemsize, rows * features) for name, n in moved.items()}


def _tokens_last(weight: Tensor, *rest: Tensor, version: str | None = None) -> Tensor:
    return embedding(rest[-1], weight, *rest[:-1], version=version)


_OP = Op("embedding", "embedding", VERSIONS)
for _name, _inputs in (
    ("embedding", ("weight", "positions", "tokens")),
    ("embedding_tokens", ("weight", "tokens")),
):
    register(Case(
        name=_name, op=_OP, call=_tokens_last, reference=reference, dims="BATCH TIME VOCABULARY FEATURES",
        make=partial(_make, len(_inputs) == 3), inputs=_inputs, cost=partial(_cost, len(_inputs) == 3),
        check_dims=((1, 1, 1, 1), (2, 5, 7, 3), (3, 67, 11, 24), (4, 1024, 1000, 768)),
        sim_dims=((1, 1, 1, 1), (2, 5, 7, 3), (3, 67, 11, 24)),
        bench_dims=((32, 1024, 50304, 768), (8, 1024, 32000, 4096)),
    ))  # fmt: skip
