"""float32 in the kernels of attention: a number is a sum of bfloat16 numbers, its pieces. Math: kernels_cu/attention/tile.cuh."""

import torch
from torch import Tensor

from cukern.ops.attention import plan, wgmma
from cukern.ops.matmul import tf32_allowed
from cukern.runtime.kernel import Template
from cukern.runtime.tensors import pointers

SPLIT = Template("attention/attention.cu", "attention_v3_split")


def operand(dtype: torch.dtype) -> torch.dtype:
    """The type of the products' operands."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def pieces_of(dtype: torch.dtype) -> int:
    """The number of 16-bit numbers whose sum an element is: of a float32 two if torch's switches allow TF32, else three."""
    return 1 if dtype != torch.float32 else 2 if tf32_allowed() else 3


def empty_pieces(x: Tensor, pieces: int) -> Tensor:
    """A tensor for the pieces of x, (batch, heads, rows, pieces, D)."""
    return x.new_empty((*x.shape[:3], pieces, plan.padded_head_dim(x.shape[3])), dtype=operand(x.dtype))


def split(pieces: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> list[Tensor]:
    """The first pieces of float32 tensors, which the others follow in a row. 16-bit tensors as they are."""
    tensors = [k, v] if q is None else [k, v, q]
    if pieces == 1 or not k.numel():
        return tensors
    (batch, kv_heads, keys, d), (heads, queries) = k.shape, (0, 0) if q is None else q.shape[1:3]
    padded, found = plan.padded_head_dim(d), [empty_pieces(x, pieces) for x in tensors]
    grid = -(-batch * max(heads * queries, kv_heads * keys) * padded // 2048), len(tensors), 1
    SPLIT[operand(k.dtype), pieces, padded].on(k.get_device())(
        grid, (256, 1, 1), 0, *pointers(*[*found, None][:3], *[*tensors, None][:3]), *wgmma.strides(*tensors, k)[:3],
        batch, kv_heads, heads, keys, queries, d,
    )  # fmt: skip
    return [x[:, :, :, 0] for x in found]
