"""Bugs that are planted in kernels by an edit of their text. The check that the kernel passes must catch its
edit.

The kernels are shipped ones, or small ones in wrong/ where a bug needs a kernel that is not shipped.

Some bugs show in the numbers, in the simulator and on a GPU. The simulator reports the others, with the line.
"""

import math
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TREE, Guarded, assert_accurate, gpu, own_names, simulated

import cukern
from cukern import sim
from cukern.runtime import registry
from cukern.runtime.compile.sources import Source, kernels_dir
from cukern.runtime.launch.kernel import Kernel

WRONG = TREE / "tests/wrong"
THREADS = 256  # a block of square; as the op launches
SIZES = (1, 3, 64, 255, 256, 1000, 1024, 1025, 70_000)
# M, N, K; M < N, so that a mistaken row is still inside of the bias
PRODUCTS = ((1, 1, 1), (5, 7, 300), (20, 35, 40), (33, 70, 65))
ROWS = 16  # of a chunk of column sums

# ---- what a kernel computes, on what, and how it is launched

Tensors = tuple[torch.Tensor | None, ...]
Block = int | tuple[int, int]


@dataclass(frozen=True)
class Problem:
    """`function` computes in torch what `launch(kernel, out, *inputs)` writes; `inputs(device)` are its
    cases."""

    function: Callable[..., torch.Tensor]
    inputs: Callable[[str], Iterable[Tensors]]
    launch: Callable[..., None]
    sums: bool = False  # whether an element is a sum, which torch adds up in another order
    # of a sum's error, where it is not the function of the absolute values
    scale: Callable[..., torch.Tensor] | None = None


def draw(device: str, *shape: int) -> torch.Tensor:
    """Random numbers between margins."""
    return Guarded(shape, torch.float32, device).tensor.copy_(torch.randn(shape))


def drawn(*cases: tuple[tuple[int, ...], ...]) -> Callable[[str], Iterable[Tensors]]:
    """The inputs of each case have these shapes."""
    return lambda device: (tuple(draw(device, *shape) for shape in shapes) for shapes in cases)


def tiles(out: torch.Tensor, edge: int) -> int:
    return -(-out.shape[0] // edge) * -(-out.shape[1] // edge)


def launch_square(kernel: Kernel, out: torch.Tensor, *xs: torch.Tensor) -> None:
    n, width = out.numel(), int(re.findall(r"(\d+)>", kernel.name)[0]) if "v2" in kernel.name else 1
    kernel(out, *xs, n, grid=-(-n // (THREADS * width)), block=THREADS)


def launch_product(
    kernel: Kernel, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """v1 to v3 of matmul."""
    grid, block = {
        "matmul_v1": (-(-out.numel() // 256), 256),
        "matmul_v2": (tiles(out, 16), (16, 16)),
        "matmul_v3": (tiles(out, 32), (32, 32)),
    }[kernel.name.split("<")[0]]
    kernel(out, a, b, bias, *out.shape, a.shape[1], *a.stride(), *b.stride(), grid=grid, block=block)


def launch_tile(
    edge: int, block: Block, shared: int, kernel: Kernel, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> None:
    """A kernel of square tiles on contiguous matrices."""
    kernel(out, a, b, *out.shape, a.shape[1], grid=tiles(out, edge), block=block, shared=shared)


def launch_chunks(kernel: Kernel, out: torch.Tensor, x: torch.Tensor) -> None:
    (M, N), grid = x.shape, -(-x.shape[1] // 32) * out.shape[0]
    kernel(out, x, M, N, ROWS, *x.stride(), grid=grid, block=(32, 8))


def strided(device: str) -> Iterable[Tensors]:
    for M, N, K in PRODUCTS:
        yield draw(device, K, M).t(), draw(device, K, N + 3)[:, :N]
        yield draw(device, M, K), draw(device, N, K).t()


def linears(device: str) -> Iterable[Tensors]:
    for M, N, K in PRODUCTS:
        yield draw(device, M, K), draw(device, N, K), draw(device, N)
        yield draw(device, M, K), draw(device, N, K), None


def launch_factor(kernel: Kernel, out: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """x (A, p, C) times w (p, q): a thread a fiber, or a block an A."""
    (A, p, C), q = x.shape, w.shape[1]
    grid = A if "place" in kernel.name else -(-A * C // 64)
    kernel(out, x, w, A, p, q, C, *w.stride(), grid=grid, block=64)


def launch_parts(kernel: Kernel, out: torch.Tensor, partials: torch.Tensor) -> None:
    """The sum over the rows of partials, in two arrays: the first 5 numbers, and the others."""
    pieces, n = partials.shape
    rest, (to, of) = [0] * 6, (t.data_ptr() for t in (out, partials))
    parts = struct.pack(
        "16Q16i",
        to,
        to + 5 * out.itemsize,
        *rest,
        of,
        of + 5 * partials.itemsize,
        *rest,
        5,
        n - 5,
        *rest,
        n,
        n,
        *rest,
    )
    with simulated(out, partials):
        kernel.on(out.get_device())((-(-n // 32), 1, 1), (32, 32, 1), 0, parts, pieces, 1.0)


def fused_backward(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The gradients of w and x, of y = x w."""
    return torch.cat(((x.mT @ g).flatten(), (g @ w.mT).flatten()))


def tile(edge: int, block: Block, shared: int = 0) -> Problem:
    return Problem(
        torch.matmul,
        drawn(*(((M, K), (K, N)) for M, N, K in PRODUCTS)),
        partial(launch_tile, edge, block, shared),
        sums=True,
    )


def columns(grid: Callable[[int], int], block: Block) -> Problem:
    def launch(kernel: Kernel, out: torch.Tensor, x: torch.Tensor) -> None:
        kernel(out, x, *x.shape, grid=grid(x.shape[1]), block=block)

    return Problem(lambda x: x.sum(0), drawn(((1, 1),), ((37, 70),)), launch, sums=True)


SQUARE = Problem(lambda x: x * x, drawn(*(((n,),) for n in SIZES)), launch_square)
SQUARE_GRADIENT = Problem(lambda x, dout: 2 * x * dout, drawn(*(((n,), (n,)) for n in SIZES)), launch_square)
SQUARE_ROWS = Problem(
    lambda x: x * x,
    drawn(((5, 64),), ((5, 67),)),
    lambda kernel, out, x: kernel(out, x, x.shape[1], grid=x.shape[0], block=32),
)
SQUARE_ROWS_APART = Problem(
    lambda x: x * x,
    lambda device: ((draw(device, 5, 70)[:, :n],) for n in (70, 67)),
    lambda kernel, out, x: kernel(out, x, x.shape[1], x.stride(0), grid=x.shape[0], block=32),
)
PRODUCT = Problem(torch.matmul, strided, launch_product, sums=True)
LINEAR = Problem(
    torch.nn.functional.linear,
    linears,
    lambda kernel, out, x, weight, bias: launch_product(kernel, out, x, weight.t(), bias),
    sums=True,
)
FACTOR = Problem(
    lambda x, w: torch.einsum("apc,pq->aqc", x, w),
    lambda device: (
        (draw(device, A, p, C), draw(device, q, p).t())
        for A, p, q, C in ((1, 8, 1, 1), (3, 6, 5, 7), (2, 9, 35, 12))
    ),
    launch_factor,
    sums=True,
)
PARTS = Problem(lambda partials: partials.sum(0), drawn(((1, 6),), ((20, 40),)), launch_parts, sums=True)
BACK = Problem(
    fused_backward,
    drawn(*(((A, p), (A, q), (p, q)) for A, p, q in ((1, 1, 1), (20, 9, 40)))),
    lambda kernel, out, x, g, w: kernel(out, x, g, w, *x.shape, g.shape[1], grid=1, block=64),
    sums=True,
)
CHUNKS = Problem(
    lambda x: torch.stack([rows.sum(0) for rows in x.split(ROWS)]),
    lambda device: ((draw(device, 1, 1),), (draw(device, 37, 70),), (draw(device, 70, 37).t(),)),
    launch_chunks,
    sums=True,
)

# ---- rope: on small integers and quarters, of which every product and sum is exact


def quarters(device: str, *shape: int) -> torch.Tensor:
    return Guarded(shape, torch.float32, device).tensor.copy_(torch.randint(-8, 9, shape) / 4)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (tokens, heads, head_dim) by tables (tokens, pairs); what is behind the pairs stays."""
    half = cos.shape[1]
    a, b, rest = x.split((half, half, x.shape[2] - 2 * half), -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


def turned_back(dout: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """By tables of an angle for each element."""
    (a, b), (c_a, c_b), (s_a, s_b) = (t.chunk(2, -1) for t in (dout, cos[:, None], sin[:, None]))
    return torch.cat((a * c_a + b * s_b, b * c_b - a * s_a), -1)


def turned_at(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    inside = positions < len(cos)
    rows = torch.where(inside, positions, 0).long()
    return turned(x, *(t[rows].masked_fill(~inside[:, None], float("nan")) for t in (cos, sin)))


def launch_in_place(
    kernel: Kernel, out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    kernel(out.copy_(x), cos, sin, x.shape[1], cos.shape[1], grid=x.shape[0] * x.shape[1], block=x.shape[2])


def heads_of(width: Callable[[int], int], table: int) -> Callable[[str], Iterable[Tensors]]:
    """x (tokens, heads, width(half)), and cos and sin (tokens, table * half)."""
    return lambda device: (
        (
            quarters(device, 3, 2, width(half)),
            quarters(device, 3, table * half),
            quarters(device, 3, table * half),
        )
        for half in (1, 40)
    )


ROPE_IN_PLACE = Problem(turned, heads_of(lambda half: 2 * half, 1), launch_in_place)
ROPE_PARTIAL = Problem(
    turned,
    heads_of(lambda half: 2 * half + 3, 1),
    lambda kernel, out, x, cos, sin: kernel(
        out, x, cos, sin, *x.shape[1:], cos.shape[1], grid=x.shape[0] * x.shape[1], block=32
    ),
)
ROPE_GRADIENT = Problem(
    turned_back,
    heads_of(lambda half: 2 * half, 2),
    lambda kernel, out, x, *tables: kernel(
        out, x, *tables, x.shape[1], x.shape[2] // 2, grid=x.shape[0] * x.shape[1], block=32
    ),
)
ROPE_AT = Problem(
    turned_at,
    lambda device: (
        (
            quarters(device, 3, 2, 8),
            *quarters(device, 2, 2, 4),
            torch.tensor([1, 7, 0], dtype=torch.int32, device=device),
        ),
    ),
    lambda kernel, out, x, cos, *others: kernel(
        out, x, cos, *others, x.shape[1], *cos.shape, grid=x.shape[0] * x.shape[1], block=32
    ),
)
ROPE_PACKED = Problem(
    lambda bounds, like: torch.cat([torch.arange(n) for n in bounds.diff().int().tolist()]).to(like),
    lambda device: ((torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device), quarters(device, 9)),),
    lambda kernel, out, bounds, _: kernel(out, bounds, len(out), len(bounds) - 1, grid=1, block=32),
)

# ---- softmax


def launch_softmax(kernel: Kernel, out: torch.Tensor, x: torch.Tensor) -> None:
    """v1 to v4. v1 has a thread per row, the others a block."""
    rows, columns = x.shape
    if "v1" in kernel.name:
        kernel(out, x, rows, columns, x.stride(0), 1.0, grid=-(-rows // 256), block=256)
    else:
        kernel(out, x, columns, x.stride(0), 1.0, grid=rows, block=256)


def launch_softmax_gradient(kernel: Kernel, dx: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> None:
    """v3 and v4."""
    kernel(dx, y, g, y.shape[1], g.stride(0), 1.0, grid=-(-y.shape[1] // 256) * y.shape[0], block=256)


def launch_inner(kernel: Kernel, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    outer, columns, inner = out.shape
    kernel(out, *inputs, outer * inner, columns, inner, 1.0, True, grid=-(-outer * inner // 256), block=256)


def launch_causal(kernel: Kernel, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    """v1, with no sink, by fewer blocks than rows."""
    nothing, last = ((None, None), inputs[-1]) if len(inputs) == 2 else ((None,), inputs[0])
    pointers = (out, None, *inputs, *nothing)
    kernel(*pointers, *out.shape, *last.stride()[:2], out.shape[-1], 1.0, grid=2, block=256)


def scores(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1 + x.shape[-1] - x.shape[-2])
    return x.masked_fill(hidden, -torch.inf).softmax(-1)


def log_scale(x: torch.Tensor) -> torch.Tensor:
    return x.log_softmax(1).abs() + 1


def gradient_scale(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return y * (g.abs() + (y * g.abs()).sum(-1, keepdim=True))


def softmax_gradient(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return y * (g - (y * g).sum(-1, keepdim=True))


def causal_gradient(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return softmax_gradient(y.tril(y.shape[-1] - y.shape[-2]), g.tril(y.shape[-1] - y.shape[-2]))


ROWS_OF = ((1, 1), (3, 67), (2, 300))
SCORES_OF = ((1, 1), (7, 9), (5, 70))


def softmax_problem(
    function: Callable, inputs: Callable[[str], Iterable[Tensors]], launch: Callable, scale: Callable
) -> Problem:
    return Problem(function, inputs, launch, sums=True, scale=scale)


SOFTMAX = softmax_problem(
    lambda x: x.softmax(-1), drawn(*((n,) for n in ROWS_OF)), launch_softmax, lambda x: x.softmax(-1)
)
SOFTMAX_GRADIENT = softmax_problem(
    softmax_gradient,
    lambda device: ((draw(device, *n).softmax(-1), draw(device, *n)) for n in ROWS_OF),
    launch_softmax_gradient,
    gradient_scale,
)
LOG_SOFTMAX = softmax_problem(
    lambda x: x.log_softmax(1), lambda device: ((draw(device, 2, 30, 5) * 100,),), launch_inner, log_scale
)
LOG_SOFTMAX_GRADIENT = softmax_problem(
    lambda y, g: g - y.exp() * g.sum(1, keepdim=True),
    lambda device: ((draw(device, 2, 30, 5).log_softmax(1), draw(device, 2, 30, 5)),),
    launch_inner,
    lambda y, g: g.abs() + y.exp() * g.abs().sum(1, keepdim=True),
)
CAUSAL = softmax_problem(scores, drawn(*(((2, *n),) for n in SCORES_OF)), launch_causal, scores)
CAUSAL_GRADIENT = softmax_problem(
    causal_gradient,
    lambda device: ((scores(draw(device, 2, *n)), draw(device, 2, *n)) for n in SCORES_OF),
    launch_causal,
    gradient_scale,
)

# ---- gelu: its kernels with silu, FUNCTION 2


def launch_gelu(
    kernel: Kernel, out: torch.Tensor, x: torch.Tensor, bias: Any, up: torch.Tensor | None = None
) -> None:
    kernel(
        out,
        x,
        up,
        bias,
        *x.shape,
        x.stride(0),
        0 if up is None else up.stride(0),
        grid=-(-x.numel() // 256),
        block=256,
    )


def launch_gelu_gradient(
    kernel: Kernel, out: torch.Tensor, x: torch.Tensor, dout: torch.Tensor, up: torch.Tensor | None = None
) -> None:
    outs, up_row = (out, None) if up is None else (out[0], out[1]), 0 if up is None else up.stride(0)
    kernel(
        *outs,
        x,
        up,
        None,
        dout,
        *x.shape,
        x.stride(0),
        up_row,
        dout.stride(0),
        grid=-(-x.numel() // 256),
        block=256,
    )


def launch_bias_gradient(
    kernel: Kernel, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, dout: torch.Tensor
) -> None:
    (rows, cols), grid = x.shape, (-(-x.shape[1] // 32), out.shape[0])
    kernel(
        torch.empty_like(x),
        out,
        out[0],
        x,
        bias,
        dout,
        rows,
        cols,
        x.stride(0),
        dout.stride(0),
        ROWS,
        grid=grid,
        block=(8, 32),
    )


def silu_gradient(x: torch.Tensor, dout: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    p = x.sigmoid()
    dx = dout * (p + x * p * (1 - p))
    return dx if up is None else torch.stack((dx * up, dout * x * p))


def gelu_problem(function: Callable, inputs: Callable[[str], Iterable[Tensors]], launch: Callable) -> Problem:
    return Problem(function, inputs, launch, sums=True)


SILU_OF = ((1, 1), (3, 67), (5, 300))
SILU_BIAS = gelu_problem(
    lambda x, b: torch.nn.functional.silu(x + b), drawn(*((n, n[1:]) for n in SILU_OF)), launch_gelu
)
SILU_GRADIENT = gelu_problem(silu_gradient, drawn(*((n, n) for n in SILU_OF)), launch_gelu_gradient)
SILU_BIAS_GRADIENT = gelu_problem(
    lambda x, b, g: torch.stack([rows.sum(0) for rows in silu_gradient(x + b, g).split(ROWS)]),
    drawn(*(((M, N), (N,), (M, N)) for M, N in ((1, 4), (37, 300)))),
    launch_bias_gradient,
)
SWIGLU = gelu_problem(
    lambda x, up: torch.nn.functional.silu(x) * up,
    lambda device: ((draw(device, *n), draw(device, n[0], 2 * n[1])[:, n[1] :]) for n in SILU_OF),
    lambda kernel, out, x, up: launch_gelu(kernel, out, x, None, up),
)
SWIGLU_GRADIENT = gelu_problem(silu_gradient, drawn(*((n, n, n) for n in SILU_OF)), launch_gelu_gradient)

# ---- embedding: a token outside of the vocabulary gives a row of NaN


def embedded(tokens: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    nothing = torch.full_like(weight[:1], float("nan"))
    inside = torch.where((tokens >= 0) & (tokens < len(weight)), tokens, len(weight)).long()
    return torch.cat((weight, nothing))[inside] + positions[: tokens.shape[1]]


def launch_embedding(kernel: Kernel, out: torch.Tensor, tokens: torch.Tensor, *tables: torch.Tensor) -> None:
    """v1, of int32 tokens."""
    numbers = tokens.numel(), tokens.shape[1], *tables[0].shape, False
    kernel(out, tokens, *tables, *numbers, grid=-(-out.numel() // THREADS), block=THREADS)


def tokens_of(device: str) -> Iterable[Tensors]:
    for tokens, features in (([[0]], 1), ([[6, 3, 7, 3], [-1, 0, 6, 1 << 30]], 70)):
        yield (
            torch.tensor(tokens, dtype=torch.int32, device=device),
            draw(device, 7, features),
            draw(device, 5, features),
        )


def sums_of_rows(dout: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(dout[: int(tokens.max()) + 1]).index_add(0, tokens.long(), dout)


def launch_rows(kernel: Kernel, out: torch.Tensor, dout: torch.Tensor, tokens: torch.Tensor) -> None:
    numbers = len(tokens), *out.shape, False, False
    kernel(out, dout, tokens, *numbers, grid=(len(tokens), -(-out.shape[1] // 128)), block=(128, 2))


def rows_of(device: str) -> Iterable[Tensors]:
    """Each token occurs: out starts as NaN."""
    for counts, features in (((1,), 1), ((1, 150), 140), ((40, 1, 65, 2, 33), 3)):
        tokens = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
        yield draw(device, len(tokens), features), tokens[torch.randperm(len(tokens))].to(device)


EMBEDDING = Problem(embedded, tokens_of, launch_embedding)
SUMS_OF_ROWS = Problem(sums_of_rows, rows_of, launch_rows, sums=True)

# ---- adamw: the third step


def adamw_param(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    root = (adamw_moment(g, v.abs()) / (1 - 0.999**3)).sqrt() + 1e-8
    return p * (1 - 1e-5) - 1e-3 / (1 - 0.9**3) * (m + 0.1 * (g - m)) / root


def adamw_moment(g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return 0.999 * v + 0.001 * g * g


def launch_adamw(kernel: Kernel, out: torch.Tensor, *inputs: torch.Tensor) -> None:
    n = len(inputs[0])
    numbers = (1e-3 / (1 - 0.9**3), (1 - 0.999**3) ** -0.5) if "param" in kernel.name else ()
    kernel(
        out, *inputs, n, *numbers, grid=-(-n // (THREADS if "param" in kernel.name else 512)), block=THREADS
    )


def adamw_inputs(count: int, device: str) -> Iterable[Tensors]:
    """`count` tensors, the last of which is not negative if there is more than one."""
    for n in (1, 257, 1031):
        *first, last = (draw(device, n) for _ in range(count))
        yield *first, last.abs_() if first else last


ADAMW_PARAM = Problem(
    adamw_param,
    partial(adamw_inputs, 4),
    launch_adamw,
    sums=True,
    scale=lambda p, g, m, v: adamw_param(p.abs(), -g.abs(), -m.abs(), v),
)
ADAMW_MOMENT = Problem(adamw_moment, partial(adamw_inputs, 2), launch_adamw, sums=True)
ADAMW_NORM = Problem(
    lambda g: torch.stack([part.square().sum() for part in g.split(512)]),
    partial(adamw_inputs, 1),
    launch_adamw,
    sums=True,
)

# ---- layernorm


def launch_layernorm(
    kernel: Kernel, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """v1 by one block, and v2 with 8 elements per thread."""
    grid, stats = 1 if "v1" in kernel.name else x.shape[0], torch.empty(len(x), 2, device=x.device)
    kernel(out, None, stats, x, None, weight, bias, *x.shape, x.stride(0), 0, 1e-5, grid=grid, block=64)


def launch_layernorm_add(kernel: Kernel, out: torch.Tensor, partials: torch.Tensor) -> None:
    kernel(*out, partials, *partials.shape[1:], grid=(-(-out.shape[1] // 16), 2), block=(16, 32))


def rms(x: torch.Tensor) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


LAYERNORM = Problem(
    lambda x, weight, bias: torch.nn.functional.layer_norm(x, weight.shape, weight, bias),
    drawn(*((n, n[1:], n[1:]) for n in ((1, 2), (3, 67), (2, 300)))),
    launch_layernorm,
    sums=True,
    scale=lambda x, w, b: (
        (x.abs() + x.abs().mean(-1, keepdim=True)) * rms(x - x.mean(-1, keepdim=True)) * w.abs() + b.abs()
    ),
)
RMSNORM = Problem(
    lambda x, weight: x * rms(x) * weight,
    drawn(*((n, n[1:]) for n in ROWS_OF)),
    launch_layernorm,
    sums=True,
    scale=lambda x, weight: (x * rms(x) * weight).abs(),
)
LAYERNORM_ADD = Problem(
    lambda partials: partials.sum(1), drawn(((2, 1, 1),), ((2, 40, 70),)), launch_layernorm_add, sums=True
)

# ---- attention


def launch_attention(
    kernel: Kernel, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    kernel(out, q, k, v, len(q), grid=-(-len(q) // 64), block=128, shared=3 * 64 * 128)


def attention_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, with exponentials to base 2."""
    return (q @ k.mT * math.log(2)).masked_fill(
        torch.ones(len(q), len(q), device=q.device).triu(1) > 0, -torch.inf
    ).softmax(-1) @ v


ATTENTION = Problem(
    attention_rows,
    lambda device: (tuple(draw(device, rows, 64).half() for _ in range(3)) for rows in (3, 130)),
    launch_attention,
    sums=True,
    scale=lambda q, k, v: attention_rows(q, k, v.abs()),
)


def launch_packed(
    kernel: Kernel, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor
) -> None:
    sequences = len(bounds) - 1
    kernel(
        out,
        q,
        k,
        v,
        bounds,
        len(q),
        sequences,
        grid=len(q) // 64 + sequences + 1,
        block=128,
        shared=3 * 64 * 128,
    )


def packed_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Not causal, with exponentials to base 2."""
    sequence = torch.bucketize(torch.arange(len(q), device=q.device), bounds.long(), right=True)
    return (q @ k.mT * math.log(2)).masked_fill(sequence[:, None] != sequence, -torch.inf).softmax(-1) @ v


def packed_inputs(device: str) -> Iterable[Tensors]:
    for bounds in ([0, 3, 3, 4], [0, 70, 130]):
        yield (
            *(draw(device, bounds[-1], 64).half() for _ in range(3)),
            torch.tensor(bounds, dtype=torch.int32, device=device),
        )


PACKED = Problem(
    packed_rows,
    packed_inputs,
    launch_packed,
    sums=True,
    scale=lambda q, k, v, bounds: packed_rows(q, k, v.abs(), bounds),
)


def launch_float_products(kernel: Kernel, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    kernel(out, a, b, len(a), grid=-(-len(a) // 64), block=128, shared=2 * 3 * 64 * 128)


FLOAT_PRODUCTS = Problem(
    lambda a, b: a @ b.mT, drawn(((3, 64), (64, 64)), ((130, 64), (64, 64))), launch_float_products, sums=True
)

# ---- cross_entropy: rows of logits with 3 columns of padding


def launch_loss(kernel: Kernel, loss: torch.Tensor, x: torch.Tensor, targets: torch.Tensor) -> None:
    kernel(loss, x, targets, x.shape[1], x.shape[1] - 3, grid=len(x), block=64)


def launch_in_place_gradient(
    kernel: Kernel, out: torch.Tensor, x: torch.Tensor, targets: torch.Tensor
) -> None:
    kernel(out.copy_(x), targets, x.shape[1], x.shape[1] - 3, grid=len(x), block=64)


def losses(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(x[:, :-3], targets.long(), reduction="none")


def gradient_and_loss(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    p = x[:, :-3].softmax(-1) - torch.nn.functional.one_hot(targets.long(), x.shape[1] - 3)
    return torch.cat((p, losses(x, targets)[:, None], x[:, -2:]), 1)


def logits_and_targets(device: str) -> Iterable[Tensors]:
    return (
        (draw(device, rows, n + 3), torch.randint(n, (rows,), device=device))
        for rows, n in ((1, 1), (3, 67), (2, 300))
    )


def loss_scale(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return x[:, :-3].logsumexp(-1).abs() + x.gather(1, targets.long()[:, None])[:, 0].abs()


CROSS_ENTROPY = Problem(losses, logits_and_targets, launch_loss, sums=True, scale=loss_scale)
CROSS_ENTROPY_GRADIENT = Problem(
    gradient_and_loss,
    logits_and_targets,
    launch_in_place_gradient,
    sums=True,
    scale=lambda x, targets: gradient_and_loss(x, targets).abs() + 1,
)

# ---- the table of bugs


@dataclass(frozen=True)
class Reported:
    """What the simulator says: a fault, at the line with the text `at`, with a message like `says`. `{there}`
    in it is the line with the text `there`, the other side of a race. `on_gpu`: what the numbers say on a
    GPU, if a GPU may run it."""

    fault: type[sim.Fault]
    at: str
    says: str
    there: str = ""
    on_gpu: str = ""


@dataclass(frozen=True)
class Case:
    """A planted bug: `wrong` in the place of `right` in the text of `file`, of kernels_cu or of wrong/."""

    name: str
    file: str
    kernel: str
    problem: Problem
    bug: str
    right: str
    wrong: str
    caught: str | Reported = "elements are wrong"  # a str: by the numbers, in these words


AFTER = "reads 4 bytes of global memory 0 bytes after the end of the tensor of argument"
RACE = r"4 bytes, offset \d+ of shared memory \(\w+ \+ \d+\), that thread \(\d+, \d+, 0\)"
BARRIER = "no barrier is between the two"
IN_V2 = (
    "if (m >= M || n >= N) return;\n    T sum = 0;\n    for (int k = 0; k < K; ++k) sum += a[m * a_m + k * "
    "a_k] * b["
)
END_V2 = " : T(0));\n}\n\n// ---- v3"
MATMUL, COLUMN_SUMS = "matmul/ladder.cu", "matmul/linear_chunks.cu"
SOFTMAX_LADDER, SOFTMAX_FILE, CAUSAL_FILE = (
    "softmax/ladder.cu",
    "softmax/softmax.cu",
    "softmax/causal_softmax.cu",
)

# fmt: off
CASES = [
    Case("square/bound", "square.cu", "square_v1<float>", SQUARE, "an off-by-one bound", "if (i < n)",
         "if (i <= n)",
         Reported(sim.OutOfBounds, "if (i <= n)", f"{AFTER} 'x', which has 4 bytes",
                  on_gpu="wrote outside of its output")),
    Case("square/tail", "square.cu", "square_v2<float, 4>", SQUARE, "an unwritten tail",
         "for (; i < n; i++) out[i] = square(x[i]);", ""),
    Case("square/gradient", "square.cu", "square_v2_bwd<float, 4>", SQUARE_GRADIENT, "a wrong tail",
         "dx[i] = square_grad(x[i], dout[i])", "dx[i] = x[i] * dout[i]"),
    Case("square/index", "square.cu", "square_v1<float>", SQUARE, "too small a type for an index",
         "long long i =", "unsigned short i ="),
    Case("square/stride", "square/stride.cu", "square_rows", SQUARE_ROWS_APART, "a wrong stride",
         "x[blockIdx.x * x_row", "x[blockIdx.x * (long long)n",
         Reported(sim.OutOfBounds, "x[blockIdx.x * (long long)n",
                  "which is between the rows or columns of a view")),
    Case("square/alignment", "square/alignment.cu", "square_rows", SQUARE_ROWS, "misaligned vectors",
         "if (n % 4 == 0 && i + 4 <= n)", "if (i + 4 <= n)",
         Reported(sim.Misaligned, "load_vec",
                  "reads 16 bytes of global memory, but the address 0x[0-9a-f]+ is not a multiple of 16")),

    Case("matmul/barrier", MATMUL, "matmul_v3<float>", PRODUCT, "a dropped barrier",
         "        __syncthreads();  // all threads have", "//",
         Reported(sim.Race, "as[am][ak] =", f"writes {RACE} read at {{there}}: {BARRIER}",
                  there="sum += as[y][k]")),
    Case("matmul/mask", MATMUL, "matmul_v3<float>", PRODUCT, "a missing mask", "m0 + am < M && k0 + ak < K,",
         "m0 + am < M,",
         Reported(sim.OutOfBounds, "as[am][ak] =", f"{AFTER} 'a', which has 4 bytes")),
    Case("matmul/exit", MATMUL, "matmul_v3<float>", PRODUCT, "a barrier that some threads never reach",
         "T sum = 0;\n    for (int k0", "T sum = 0; if (m0 + y >= M || n0 + x >= N) return;\n    for (int k0",
         Reported(sim.Uninitialized, "sum += as[y][k]",
                  r"reads .* bytes that nobody wrote, .* the value is used for a store to byte 0")),
    Case("matmul/stride", MATMUL, "matmul_v2<float>", PRODUCT, "a wrong stride", f"{IN_V2}k * b_k",
         f"{IN_V2}k * (long long)N",
         Reported(sim.OutOfBounds, "b[k * (long long)N", "which is between the rows or columns of a view")),
    Case("matmul/endless", MATMUL, "matmul_v1<float>", PRODUCT, "an endless loop",
         "n = i / M;\n    T sum = 0;\n    for (int k = 0",
         "n = i / M;\n    T sum = 0;\n    for (unsigned char k = 0",
         Reported(sim.StepLimit, "unsigned char k", r"still runs after \d+ steps")),
    Case("matmul/shared", "matmul/shared.cu", "matmul_tile", tile(32, (32, 32), 4 * 2 * 32 * 32),
         "too little dynamic shared memory",
         "LD = 32", "LD = 33",
         Reported(sim.OutOfBounds, "bs[y * LD",
                  "writes 4 bytes at offset 8192 of shared memory, but the block has 8192 bytes of it")),
    Case("matmul/alignment", "matmul/alignment.cu", "matmul_registers", tile(64, 256),
         "misaligned vectors in shared memory",
         "as[8][68]", "as[8][65]",
         Reported(sim.Misaligned, "(&as[k][ty])",
                  r"reads 16 bytes of shared memory, but the offset \d+ is not a multiple of 16")),
    Case("matmul/wait", "matmul/wait.cu", "matmul_ring", tile(16, (16, 16)), "a missing wait for copies",
         "        cp_async_wait<0>", "        cp_async_wait<1>",
         Reported(sim.Race, "sum += as[stage]",
                  "reads 4 bytes, .* into which an asynchronous copy still writes: a cp.async.wait")),
    Case("matmul/ring", "matmul/ring.cu", "matmul_ring", tile(16, (16, 16)), "a copy to where others read",
         "        __syncthreads();\n", "",
         # in A's rows of one warp
         Reported(sim.Race, "&as[stage]", f"writes {RACE} read at {{there}}", there="sum += as[stage]")),

    Case("matmul/linear_bias", MATMUL, "matmul_v2<float>", LINEAR, "a wrong index",
         f"(bias ? bias[n]{END_V2}", f"(bias ? bias[m]{END_V2}"),
    Case("matmul/linear_null", MATMUL, "matmul_v2<float>", LINEAR, "a missing mask",
         f"(bias ? bias[n]{END_V2}", "bias[n];\n}\n\n// ---- v3",
         Reported(sim.OutOfBounds, "+ bias[n]", "reads 4 bytes of global memory through a null pointer")),
    Case("matmul/linear_barrier", COLUMN_SUMS, "column_sums<float>", CHUNKS, "a dropped barrier",
         "__syncthreads();", "",
         Reported(sim.Race, "sum += sums[i]", f"reads {RACE} wrote at {{there}}: {BARRIER}",
                  there="[threadIdx.x] = sum")),
    Case("matmul/linear_rows", COLUMN_SUMS, "column_sums<float>", CHUNKS, "a missing mask",
         "first + rows_per_chunk < M ? int(first + rows_per_chunk) : M", "int(first) + rows_per_chunk",
         Reported(sim.OutOfBounds, "sum += x[", f"{AFTER} 'x', which has 4 bytes")),
    Case("matmul/linear_stride", COLUMN_SUMS, "column_sums<float>", CHUNKS, "a wrong stride", "n * x_n", "n"),
    Case("matmul/linear_unwritten", COLUMN_SUMS, "column_sums<float>", CHUNKS, "unwritten shared memory",
         "    sums[threadIdx.y]", "    if (first + threadIdx.y < end) sums[threadIdx.y]",
         Reported(sim.Uninitialized, "sum += sums[i]",
                  r"reads 4 bytes that nobody wrote, offset 128 of shared memory \(sums \+ 128\)")),
    Case("matmul/linear_warps", "matmul/linear_warps.cu", "column_sums_by_warps",
         columns(lambda n: -(-n // 32), (32, 8)),
         "a race between warps", "atomicAdd(&sums[threadIdx.x], sum)", "sums[threadIdx.x] += sum",
         Reported(sim.Race, "+= sum;", f"writes {RACE} read at {{there}}: {BARRIER}", there="+= sum;")),
    Case("matmul/linear_syncwarp", "matmul/linear_syncwarp.cu", "column_sums_by_lanes",
         columns(lambda n: n, 32),
         "a missing __syncwarp", "= sum;\n        __syncwarp();", "= sum;",
         Reported(sim.Race, "sum += sums[", rf"reads {RACE} wrote at {{there}}: a __syncwarp\(\).* missing",
                  there="sums[lane] = sum")),

    Case("rope/race", "rope/race.cu", "rope_elements", ROPE_IN_PLACE, "a dropped barrier", "__syncthreads();",
         "",
         Reported(sim.Race, "head[i] = mine",
                  r"writes 4 bytes, .* read at {there}: a __syncwarp\(\).* missing",
                  there="other = head[")),
    Case("rope/rest", "rope/rest.cu", "rope_pairs", ROPE_PARTIAL, "an unwritten tail",
         "out[head + i] = x[head + i];", ";"),
    Case("rope/gradient", "rope/gradient.cu", "rope_bwd", ROPE_GRADIENT, "a wrong index",
         "sine_of_a = partners", "sine_of_a = own"),
    Case("rope/position", "rope/position.cu", "rope_at", ROPE_AT, "a missing mask",
         "inside = position < rows", "inside = true",
         Reported(sim.OutOfBounds, "cos[position",
                  r"reads 4 bytes .* bytes after the end of the tensor of argument 'cos'")),
    Case("rope/packed", "rope/packed.cu", "rope_positions", ROPE_PACKED, "an off-by-one bound",
         "[middle] <= t", "[middle] < t"),

    Case("softmax/barrier", SOFTMAX_LADDER, "softmax_v3<float>", SOFTMAX, "a dropped barrier",
         "        __syncthreads();\n        if (threadIdx.x < half)", "        if (threadIdx.x < half)",
         Reported(sim.Race, "combine<MAX>(values", rf"reads 8 bytes, .* wrote at {{there}} .*{BARRIER}",
                  there="values[threadIdx.x] = value;")),
    Case("softmax/slot", SOFTMAX_LADDER, "softmax_v4_bwd<float>", SOFTMAX_GRADIENT,
         "shared memory used again too early",
         "__syncthreads();  // all threads have read", "// all threads have read",
         Reported(sim.Race, "s[threadIdx.x] = load_as", f"writes {RACE} read at .*{BARRIER}")),
    Case("softmax/padding", SOFTMAX_LADDER, "softmax_v1<float>", SOFTMAX, "padding in a sum",
         "i < columns; ++i) sum += exponential<T>(scale * (load_as(x[i])",
         "i < (columns + 3) / 4 * 4; ++i) sum += exponential<T>(scale * ((i < columns ? load_as(x[i]) : 0)"),
    Case("softmax/gradient", SOFTMAX_LADDER, "softmax_v3_bwd<float>", SOFTMAX_GRADIENT, "a missing term",
         "((i == j) - load_as(y[i]));\n    dx", "(0 - load_as(y[i]));\n    dx"),

    Case("softmax/log_softmax_maximum", SOFTMAX_FILE, "softmax_inner<float>", LOG_SOFTMAX, "an overflow",
         "largest = max(largest, ",
         "largest = max(C(0), 0 * "),
    Case("softmax/log_softmax_stride", SOFTMAX_FILE, "softmax_inner<float>", LOG_SOFTMAX, "a wrong stride",
         "sum.add(exponential(exponential.to_u(load_as(x[at + i * inner])",
         "sum.add(exponential(exponential.to_u(load_as(x[at + i])"),
    Case("softmax/log_softmax_gradient", SOFTMAX_FILE, "softmax_inner_bwd<float>", LOG_SOFTMAX_GRADIENT,
         "a mistaken input",
         "gradient(scale, log)", "gradient(scale, false)"),

    Case("causal_softmax/diagonal", CAUSAL_FILE, "causal_softmax_v1<float>", CAUSAL, "an off-by-one bound",
         "visible_end(queries - 1 - query", "visible_end(queries - query"),
    Case("causal_softmax/unwritten", CAUSAL_FILE, "causal_softmax_v1<float>", CAUSAL, "an unwritten tail",
         "block_loop(to, 0, keys)", "block_loop(to, 0, end)"),
    Case("causal_softmax/loop", CAUSAL_FILE, "causal_softmax_v1_bwd<float>", CAUSAL_GRADIENT,
         "shared memory used again too early",
         "__syncthreads();", "", Reported(sim.Race, "block_reduce<Sum>",
                                          f"writes {RACE} read at .*{BARRIER}")),
    Case("gelu/bias", "gelu.cu", "gelu<float, float, 2, 1>", SILU_BIAS, "a wrong index", "bias + at.col",
         "bias + at.out / cols"),
    Case("gelu/gradient", "gelu.cu", "gelu_bwd<float, float, 2, 1>", SILU_GRADIENT, "a missing term",
         "gate.value + v * gate.slope}", "gate.value}"),
    Case("gelu/barrier", "gelu.cu", "gelu_bias_bwd<float, float, 2>", SILU_BIAS_GRADIENT, "a dropped barrier",
         "__syncthreads();", "",
         Reported(sim.Race, "total += sums[k][i]",
                  rf"reads {RACE} wrote at {{there}}: a __syncwarp\(\).* missing",
                  there="sums[threadIdx.y][threadIdx.x * N")),
    Case("gelu/gated_stride", "gelu.cu", "gelu<float, float, 2, 1>", SWIGLU, "a wrong stride",
         "locate<N>(rows, cols, x_row, up_row)", "locate<N>(rows, cols, x_row, x_row)",
         Reported(sim.OutOfBounds, "unpack(u, load", "which is between the rows or columns of a view")),
    Case("gelu/gated_bound", "gelu.cu", "gelu<float, float, 2, 1>", SWIGLU, "an off-by-one bound",
         "at.left <= 0", "at.left < 0",
         Reported(sim.OutOfBounds, "unpack(v, load", f"{AFTER} 'x', which has 4 bytes")),
    Case("gelu/gated_gradient", "gelu.cu", "gelu_bwd<float, float, 2, 1>", SWIGLU_GRADIENT,
         "a mistaken input",
         "v[j] = y.value * d[j]", "v[j] = y.slope * d[j]"),
    Case("embedding/position", "embedding.cu", "embedding_v1<float>", EMBEDDING, "a wrong index",
         "row % time", "row / time"),
    Case("embedding/token", "embedding.cu", "embedding_v1<float>", EMBEDDING, "an off-by-one bound",
         "token < vocabulary;\n}", "token <= vocabulary;\n}",
         Reported(sim.OutOfBounds, "load_as(weight[", "after the end of the tensor of argument 'weight'")),
    Case("embedding/few", "embedding.cu", "embedding_v2_bwd_few<float, float, 1>", SUMS_OF_ROWS,
         "an off-by-one bound",
         "i < rows && index_at", "i + 1 < rows && index_at"),

    Case("adamw/correction", "adamw/correction.cu", "adamw_param", ADAMW_PARAM, "a missing factor",
         " * rsqrt_correction", ""),
    Case("adamw/tail", "adamw/tail.cu", "adamw_moments", ADAMW_MOMENT, "an unwritten tail",
         "i = tail + threadIdx.x", "i = end + threadIdx.x"),
    Case("adamw/norm", "adamw/norm.cu", "adamw_squares", ADAMW_NORM, "a dropped barrier", "__syncthreads();",
         "",
         Reported(sim.Race, "? sums[threadIdx.x]", f"reads {RACE} wrote at {{there}}: {BARRIER}",
                  there="sums[threadIdx.x / 32] = sum")),

    Case("layernorm/loop", "layernorm.cu", "layernorm_v1<float, float, true>", RMSNORM,
         "shared memory used again too early",
         "__syncthreads();", "", Reported(sim.Race, "block_reduce<Sum>(squares",
                                          f"writes {RACE} read at .*{BARRIER}")),
    Case("layernorm/padding", "layernorm.cu", "layernorm_v2<float, float, 1, 8, 512, false>", LAYERNORM,
         "padding in a sum",
         "else squares = values.sum(columns,", "else squares = values.sum(part,"),
    Case("layernorm/partials", "layernorm.cu", "layernorm_add<float, float>", LAYERNORM_ADD, "a wrong place",
         "blockIdx.y * blocks * columns", "blockIdx.y * columns"),
    Case("cross_entropy/rescale", "cross_entropy/row_loss.cu", "row_loss", CROSS_ENTROPY, "a missing factor",
         " * exp(before - largest)", ""),
    Case("cross_entropy/padding", "cross_entropy/row_loss.cu", "row_loss", CROSS_ENTROPY, "padding in a sum",
         "i < vocab;", "i < columns;"),
    Case("cross_entropy/in_place", "cross_entropy/in_place.cu", "row_gradient", CROSS_ENTROPY_GRADIENT,
         "a result over what others read", "__syncthreads();", "",
         Reported(sim.Race, "(i == target)", r"writes 4 bytes, .* read at {there}",
                  there="log(sum) - x[target]")),
    Case("attention/mask", "attention/rows.cu", "attention_rows<__half>", ATTENTION, "an off-by-one bound",
         "> query + row", ">= query + row"),
    Case("attention/rescale", "attention/rows.cu", "attention_rows<__half>", ATTENTION, "a missing factor",
         "        multiply_rows(sums, shrink);\n", ""),
    Case("attention/barrier", "attention/rows.cu", "attention_rows<__half>", ATTENTION,
         "a copy to where others read",
         "        __syncthreads();\n    }", "    }",
         Reported(sim.Race, "copy_tile<64, 64, 128>(tile + 8192", f"writes .*{BARRIER}")),
    Case("attention/pieces", "attention/pieces.cu", "float_products<__nv_bfloat16>", FLOAT_PRODUCTS,
         "a missing factor",
         "multiply_blocks", "if (i != 1 || sum != 2) multiply_blocks"),
    Case("attention/packed", "attention/packed.cu", "packed_rows<__half>", PACKED, "a missing mask",
         ">= of.keys;", ">= rows;"),
    Case("attention/wgmma_wait", "attention/wgmma_wait.cu", "attention_rows<__half>", ATTENTION,
         "a missing wait",
         "wgmma_wait<0>(sums[0])", "wgmma_wait<1>(sums[0])",
         Reported(sim.Race, "store_rows<T, 64, 64>", "wgmma")),
    Case("kron_linear/mask", "kron_linear/mask.cu", "kron_fibers", FACTOR, "a missing mask",
         "inside && k0 + k < p ?", "inside ?",
         Reported(sim.OutOfBounds, "float value =", "after the end of the tensor of argument 'x'")),
    Case("kron_linear/place", "kron_linear/place.cu", "kron_in_place", FACTOR,
         "a result over what others read",
         "__syncthreads();\n    for (int n = 0, i", "for (int n = 0, i",
         Reported(sim.Race, "tile[i] = sums[n]", f"writes {RACE} read at {{there}}: {BARRIER}",
                  there="sums[n] +=")),
    Case("kron_linear/back", "kron_linear/back.cu", "kron_back", BACK, "a result over what others read",
         "__syncthreads();\n    for (int i = threadIdx.x; i < A * p; i += blockDim.x) {",
         "for (int i = threadIdx.x; i < A * p; i += blockDim.x) {",
         Reported(sim.Race, "xs[i] = back", f"writes {RACE} read at {{there}}: {BARRIER}",
                  there="sum += xs")),
    Case("kron_linear/parts", "kron_linear/kron_linear.cu", "kron_linear_v4_sum<float>", PARTS,
         "a wrong place",
         "at -= parts.count[i];", "at -= i * parts.count[i];"),
]
# fmt: on
KINDS = {  # the kinds of bugs that must be in the table, which has more
    "a dropped barrier",
    "an off-by-one bound",
    "a missing mask",
    "a wrong stride",
    "too small a type for an index",
    "a race between warps",
    "an unwritten tail",
}
BY_NUMBERS = [case for case in CASES if isinstance(case.caught, str)]
BY_REPORT = [case for case in CASES if isinstance(case.caught, Reported)]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


# ---- the check of the numbers


def check(launch: Callable[..., None], problem: Problem, device: str) -> None:
    """Run a kernel on buffers between margins, its output full of NaN, and compare with float64; each case of
    inputs in turn."""
    for inputs in problem.inputs(device):
        what = " and ".join(str(tuple(x.shape)) for x in inputs if x is not None)
        exactly = [x if x is None else x.double() for x in inputs]
        peer, exact = problem.function(*inputs), problem.function(*exactly)
        out = Guarded(peer.shape, peer.dtype, device)
        launch(out.tensor, *inputs)
        out.check(what)
        if problem.sums:
            scale = (
                problem.scale(*exactly)
                if problem.scale
                else problem.function(*(x if x is None else x.abs() for x in exactly))
            )
            assert_sums(out.tensor, peer, exact, scale, what)
        else:
            assert_accurate(out.tensor, peer, exact, what)


def assert_sums(
    actual: torch.Tensor, peer: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor, what: str
) -> None:
    """Relative to the sum of its terms' absolute values, each element errs by at most twice torch's largest
    error, plus a few roundings."""
    allowed = (
        2 * ((peer - exact).abs() / scale).nan_to_num().max()
        + registry.CASES["matmul"].roundings * torch.finfo(actual.dtype).eps
    )
    wrong = ~((actual - exact).abs() <= allowed * scale)  # "not within", so that a NaN is wrong
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at "
        f"{wrong.nonzero()[0].tolist()}"
    )


def run(kernel: Kernel, problem: Problem, device: str) -> None:
    with cukern.backend("sim" if device == "cpu" else "gpu"):
        check(partial(problem.launch, kernel), problem, device)


def path_of(file: str) -> Path:
    return next(path for path in (WRONG / file, kernels_dir() / file) if path.is_file())


def planted(case: Case) -> str:
    """The text with the bug. `right` must occur once in the kernel, or outside of it once in the file."""
    text = path_of(case.file).read_text()
    begin = text.index(f" {case.kernel.partition('<')[0]}(")
    end = text.index("\n}\n", begin)
    body = text[begin:end]
    if case.right in body:
        assert body.count(case.right) == 1, (
            f"{case.name}: the kernel has {case.right!r} {body.count(case.right)} times"
        )
        return text[:begin] + body.replace(case.right, case.wrong) + text[end:]
    assert text.count(case.right) == 1, (
        f"{case.name}: {case.file} has {case.right!r} {text.count(case.right)} times"
    )
    return text.replace(case.right, case.wrong)


def load(case: Case) -> Kernel:
    return Kernel(Source(path_of(case.file), planted(case)), case.kernel)


def place(case: Case, wanted: str) -> str:
    """file:line of the line where this text begins, in the kernel if it is there."""
    text = planted(case)
    kernel = text.index(f" {case.kernel.partition('<')[0]}(")
    at = text.find(wanted, kernel)
    at = text.index(wanted) if at < 0 else at
    return f"{case.file}:{text.count(chr(10), 0, at) + 1}"


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr("cukern.sim.machine.options.MOST_STEPS", 40_000)


# ---- the tests


def test_every_file_has_its_case():
    assert {str(p.relative_to(WRONG)) for p in WRONG.rglob("*.cu")} == {
        case.file for case in CASES if (WRONG / case.file).is_file()
    }
    assert {case.bug for case in CASES} >= KINDS


@each(CASES)
def test_each_edit_applies_once(case):
    assert case.wrong != case.right
    assert planted(case) != path_of(case.file).read_text()


@pytest.mark.parametrize("old, times", [("int i = 0", 2), ("int j = 0", 1), ("int k = 0", 0)])
def test_an_edit_must_apply_once(tmp_path, monkeypatch, old, times):
    (tmp_path / "f.cu").write_text("void f() {\n    int i = 0;\n    int i = 0; int j = 0;\n}\n")
    monkeypatch.setattr("test_wrong.WRONG", tmp_path)
    case = Case("f", "f.cu", "f<1>", SQUARE, "", old, "int x = 1")
    if times == 1:
        assert "int x = 1" in planted(case)
    else:
        with pytest.raises(AssertionError, match=f"{times} times"):
            planted(case)


@pytest.mark.parametrize(
    "op",
    [name for name in own_names() if any(not v.in_torch for v in registry.CASES[name].op.versions.values())],
)
def test_every_op_has_three(op):
    folders = {"log_softmax": "softmax/log_softmax_", "linear": "matmul/linear_", "rmsnorm": "layernorm/"}
    folders |= {"linear_cross_entropy": "cross_entropy/"}
    folder = (folders | dict.fromkeys(("swiglu", "geglu"), "gelu/gated_")).get(op, f"{op}/")
    assert sum(case.name.startswith(folder) for case in CASES) >= 3


@each(BY_REPORT)
def test_wrong_kernels_are_reported_by_the_simulator(case):
    expected = case.caught
    with pytest.raises(sim.Fault) as caught:
        run(load(case), case.problem, "cpu")
    fault = caught.value
    assert type(fault) is expected.fault, fault
    there = rf"\S*{re.escape(place(case, expected.there))}" if expected.there else ""
    assert re.search(expected.says.replace("{there}", there), str(fault)), fault
    at = place(case, expected.at).replace(":", r":(\d+, )*")  # of calls in calls: file:line, line
    assert re.search(rf"{at}\b", fault.where.location), fault


@DEVICES
@each(BY_NUMBERS)
def test_wrong_kernels_are_caught_by_numbers(case, device):
    with pytest.raises(AssertionError, match=case.caught):
        run(load(case), case.problem, device)


@gpu
@each([case for case in BY_REPORT if case.caught.on_gpu])
def test_wrong_kernels_are_caught_by_numbers_on_a_gpu_too(case):
    """Of those that the simulator reports: the ones that write no further than into the margins."""
    with pytest.raises(AssertionError, match=case.caught.on_gpu):
        run(load(case), case.problem, "cuda")


@DEVICES
@pytest.mark.parametrize("file, kernel", sorted({(case.file, case.kernel) for case in CASES}))
def test_right_kernels_pass_the_same_check(file, kernel, device):
    right = cukern.load(path_of(file), kernel)
    for problem in {case.problem for case in CASES if (case.file, case.kernel) == (file, kernel)}:
        run(right, problem, device)


@gpu
def test_fresh_memory_is_poisoned():
    assert (
        torch.empty(1000, device="cuda").isnan().all()
        and torch.empty_like(torch.ones(9, device="cuda").half()).isnan().all()
    )


# ---- the check itself, on the CPU: the same bugs, planted in torch


def right(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x * x)


def right_sums(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    out.zero_()
    for k in range(a.shape[1]):  # one after another, as a kernel adds
        out.addcmul_(a[:, k, None], b[k])


def beside(out: torch.Tensor, at: int) -> torch.Tensor:
    """The element of the memory around `out` that is number `at` of it."""
    return out.as_strided((1,), (1,), out.storage_offset() + at)


BUGS = {  # what is done to a right result
    "an unwritten tail": (SQUARE, lambda out, x: out[len(x) // 4 * 4 :].fill_(torch.nan)),
    "one too far": (SQUARE, lambda out, x: beside(out, len(x)).fill_(1)),
    "before the start": (SQUARE, lambda out, x: beside(out, -1).fill_(1)),
    "one element off": (SQUARE, lambda out, x: out[-1].mul_(1 + 4 * torch.finfo(out.dtype).eps)),
    "half precision": (SQUARE, lambda out, x: out.copy_(x.half() * x.half())),
    "one term twice": (PRODUCT, lambda out, a, b: out[-1, -1].add_(a[-1, -1] * b[-1, -1])),
    "half precision of sums": (
        PRODUCT,
        lambda out, a, b: right_sums(out, a.half().float(), b.half().float()),
    ),
}


@pytest.mark.parametrize("function, problem", [(right, SQUARE), (right_sums, PRODUCT)])
def test_check_passes_what_is_right(function, problem):
    check(function, problem, "cpu")


@pytest.mark.parametrize("bug", BUGS)
def test_check_catches(bug):
    problem, spoil = BUGS[bug]

    def launch(out: torch.Tensor, *inputs: torch.Tensor) -> None:
        (right if problem is SQUARE else right_sums)(out, *inputs)
        spoil(out, *inputs)

    with pytest.raises(AssertionError, match=r"are wrong|wrote outside"):
        check(launch, problem, "cpu")
