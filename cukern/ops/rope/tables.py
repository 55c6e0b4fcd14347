"""rope_tables: tables of cosines and sines for rope."""

from typing import Any

import torch

from cukern.runtime import checks
from cukern.runtime.launch import interop


def rope_tables(
    positions: Any, dim: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float32, device: Any = None
) -> Any:
    """(cos, sin) of the angles position * base^(-2 i / dim), i < dim / 2, computed in float64 and rounded
    once to `dtype`.

        cos, sin = cukern.rope_tables(4096, 128, device="cuda")
        y = cukern.rope(torch.randn(2, 4096, 32, 128, device="cuda"), cos, sin)

    `positions` is an int n, for the positions 0 to n - 1, or a tensor (sequence,) or (batch, sequence) of
    int32, int64, float32 or float64. `dim` is the rotary_dim, even. The tables are (n, dim / 2), or have
    positions' shape and then dim / 2. They are on `device`; default: that of `positions`, or torch's for an
    int.
    Raises TypeError for an argument of another type or dtype; ValueError if dim is odd or less than 2, if
    base is not positive and finite, if n is negative, or if positions has another number of dimensions.
    Formula: https://arxiv.org/abs/2104.09864.
    """
    if isinstance(positions, int | torch.SymInt) or not (
        isinstance(positions, torch.Tensor) or hasattr(positions, "__dlpack__")
    ):
        positions = torch.arange(checks.integer("positions", positions, 0), dtype=torch.int64, device=device)
    positions, dim = interop.to_torch("positions", positions), checks.integer("dim", dim, 2)
    checks.dtype("positions", positions, (torch.int32, torch.int64, torch.float32, torch.float64))
    if positions.ndim not in (1, 2):
        raise ValueError(f"positions must be (sequence,) or (batch, sequence), got {tuple(positions.shape)}")
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}")
    base = checks.number("base", base)
    if base <= 0:
        raise ValueError(f"base must be positive, got {base}")
    checks.one_of("dtype", dtype, checks.FLOATS)
    positions = positions.to(device, torch.float64)
    angles = positions[..., None] * base ** (
        -torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)
