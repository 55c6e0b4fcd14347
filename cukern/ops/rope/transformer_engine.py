"""apply_rotary_pos_emb with the semantics of TransformerEngine's function of that name, for code that is
ported from it.

Source of the semantics: transformer_engine.pytorch.attention.rope, its fused form: float32 angles, accurate
sine and cosine, one rounding.
"""

from typing import Any

import torch

from cukern.ops.rope import checks as rope_checks
from cukern.ops.rope import reference as rope_reference
from cukern.ops.rope.checks import Request
from cukern.ops.rope.op import run
from cukern.ops.rope.plan import Inputs, Options, compute_dtype, tokens_of
from cukern.runtime import checks
from cukern.runtime.launch import interop

FORMATS = ("sbhd", "bshd", "thd")


def apply_rotary_pos_emb(
    t: Any, freqs: Any, tensor_format: str = "sbhd", start_positions: Any = None, interleaved: bool = False,
    fused: bool = True, cu_seqlens: Any = None, cp_size: int = 1, cp_rank: int = 0, *,
    version: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """t with the first freqs.shape[-1] elements of each head rotated and the others copied. Differentiable
    any number of times.

        angles = torch.arange(4096.0)[:, None] * 10000.0 ** (-torch.arange(64) / 64)
        freqs = torch.cat((angles, angles), -1)[:, None, None].cuda()
        y = cukern.apply_rotary_pos_emb(torch.randn(4096, 2, 32, 128, device="cuda"), freqs)

    Args:
        t: float16, bfloat16, float32 or float64, with the dimensions of `tensor_format` and any strides.
            Every tensor may also be an array that supports DLPack.
        freqs: (positions, 1, 1, rotary_dim): the angle of each element in radians. The two elements of a pair
            may have different angles. It has no gradient.
        tensor_format: "sbhd" (sequence, batch, heads, head_dim), "bshd" or "thd" (tokens, heads, head_dim).
        start_positions: int32 or int64 (batch,) or (sequences,), added to the positions of each sequence.
        interleaved: pairs of neighbours, instead of i and i + rotary_dim / 2.
        fused: accepted for compatibility, without effect.
        cu_seqlens: int32 or int64 (sequences + 1,), for "thd": where each packed sequence begins, counted
            over all GPUs, and the end of the last. Tokens outside all sequences are copied.
        cp_size, cp_rank: context parallelism: t has chunks cp_rank and 2 cp_size - 1 - cp_rank of the 2
            cp_size chunks of each sequence.
        version: "v1", "v2" or "v3"; default: the fastest.

    Returns a contiguous tensor of t's shape and dtype. Autocast does not change the dtype or the computation.

    Raises TypeError for the type of an argument or a dtype, ValueError for shapes or options that do not fit.
    Positions outside freqs are treated as in `cukern.rope`.
    """
    return run(
        *_checked(
            t,
            freqs,
            tensor_format,
            start_positions,
            interleaved,
            fused,
            cu_seqlens,
            cp_size,
            cp_rank,
            version,
        )
    )


def reference(t: torch.Tensor, freqs: torch.Tensor, **options: Any) -> torch.Tensor:
    """`apply_rotary_pos_emb` in torch's operations."""
    return rope_reference.rope(*_checked(t, freqs, **options))


def _checked(
    t: Any, freqs: Any, tensor_format: str = "sbhd", start_positions: Any = None, interleaved: bool = False,
    fused: bool = True, cu_seqlens: Any = None, cp_size: int = 1, cp_rank: int = 0,
    version: str | None = None,
) -> tuple[Inputs, Options]:  # fmt: skip
    t, freqs = interop.to_torch("t", t), interop.to_torch("freqs", freqs)
    starts = None if start_positions is None else interop.to_torch("start_positions", start_positions)
    cu_seqlens = None if cu_seqlens is None else interop.to_torch("cu_seqlens", cu_seqlens)
    checks.choice("tensor_format", tensor_format, FORMATS)
    checks.flag("fused", fused)
    cp_size, cp_rank = (
        checks.integer("cp_size", cp_size, 1, (1 << 31) - 1),
        checks.integer("cp_rank", cp_rank),
    )
    checks.dtype("t", t, checks.FLOATS)
    if t.ndim != len(tensor_format):
        raise ValueError(
            f"t must have {len(tensor_format)} dimensions in {tensor_format!r}, its shape is {tuple(t.shape)}"
        )
    checks.dtype("freqs", freqs, checks.FLOATS)
    if freqs.ndim != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[3] > t.shape[-1]:
        raise ValueError(
            f"freqs has shape {tuple(freqs.shape)}, it must be (positions, 1, 1, at most head_dim = "
            f"{t.shape[-1]})"
        )
    rope_checks.no_gradient("apply_rotary_pos_emb", freqs=freqs)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank}, it must be in 0..cp_size - 1, and cp_size is {cp_size}")
    sequence = tokens_of(t.shape, tensor_format)[1]
    if tensor_format != "thd" and cp_size > 1 and (sequence % 2 or sequence * cp_size > freqs.shape[0]):
        raise ValueError(
            f"with cp_size {cp_size} the sequence here, {sequence}, must be even, and {cp_size} times it at "
            f"most {freqs.shape[0]}"
        )
    angles, dtype = freqs.flatten(1), compute_dtype(t.dtype)
    angles = angles if angles.dtype == dtype else angles.to(dtype)
    x, angle, start, bounds = rope_checks.shapes_of(
        ("t", "freqs", "start_positions", "cu_seqlens"), (t, angles, starts, cu_seqlens)
    )
    request = Request(x, None, angle, None, None, bounds, start, None)  # type: ignore[arg-type]
    options = rope_checks.resolve(
        request, angles.shape[1], 0, interleaved, tensor_format, False, None, version
    )
    return Inputs(t, None, angles, None, None, cu_seqlens, starts, None, cp_size, cp_rank), Options(
        *options[:6], True, options.version
    )
