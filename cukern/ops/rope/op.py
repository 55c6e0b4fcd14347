"""rope and rope_: rotary position embedding of one tensor, or of queries and keys together, in new memory or where they stand.

With a the angle of a pair of elements at a token's position, y_1 = x_1 cos a - x_2 sin a and y_2 = x_2 cos a + x_1 sin a
(Su et al., https://arxiv.org/abs/2104.09864). The gradient is the rotation by -a.
"""

from typing import Any

import torch
from torch import Tensor

from cukern.ops.rope import autograd as rope_ops
from cukern.ops.rope import checks as rope_checks
from cukern.ops.rope import gather
from cukern.ops.rope import reference as rope_reference
from cukern.ops.rope.checks import Request
from cukern.ops.rope.memory import check_writable, check_writable_wrapped
from cukern.ops.rope.plan import Inputs, Options, angle_maths, compute_dtype, table_dtypes
from cukern.runtime import backend, checks, interop
from cukern.runtime.registry import transformed

_modes = torch._C._len_torch_dispatch_stack


def rope(
    x: Any,
    cos: Any,
    sin: Any,
    *,
    k: Any = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    position_ids: Any = None,
    mrope_section: tuple[int, ...] | None = None,
    cu_seqlens: Any = None,
    start_positions: Any = None,
    layout: str = "bshd",
    inverse: bool = False,
    scale: float | None = None,
    version: str | None = None,
) -> Any:
    """x, or x and k, with each head's pairs of elements rotated by the angles of the token's position; differentiable any number of times.

    Args:
        x: float16, bfloat16, float32 or float64, of the shape that `layout` says and any strides, which are read as they are: a slice of a
            packed qkv and a transposed view need no copy. 16-bit types are computed in float32 and rounded once, float32 with float64
            tables or angles in float64 (slow on GPUs that have few float64 units), and with float32 tables so that an element errs by at
            most two roundings. Every tensor may also be an array that speaks DLPack. CPU tensors go to plain torch, or to the simulator.
        cos, sin: tables (positions, rotary_dim / 2): one angle for each pair. Or (positions, rotary_dim): each element its own, as
            Hugging Face's `cat((freqs, freqs))`. Or of three dimensions, (batch or 1, sequence, either): the row of each token, with no
            positions. float32, float64 or x's dtype. sin=None: cos holds the angles in radians, of any size; their cosine and sine are
            taken in float64, or of float32 angles for a 16-bit x in float32. The tables have no gradient, and are refused if they
            require one.
            A table whose last columns have cos 1 and sin 0 leaves their pairs alone ("proportional" partial rotary).
        k: keys, rotated in the same launch: as x, but for the number of heads.
        interleaved: False: element i of the rotated slice is paired with i + rotary_dim / 2 (GPT-NeoX). True: 2 i with 2 i + 1 (GPT-J).
        rotary_dim, rotary_offset: the slice of head_dim that is rotated, its length even; by default all. The rest is copied, or in place
            not touched.
        position_ids: int32 or int64 (sequence,) or (batch, sequence): each token's row of the tables; by default its place in the
            sequence. With `mrope_section` (sections, batch, sequence).
        mrope_section: numbers of pairs, 2 or 3 of them, together rotary_dim / 2: the first take the first section's position, and so on.
        cu_seqlens: int32 or int64 (sequences + 1,), layout "thd": where each packed sequence begins, and the last ends. Positions start
            anew in each. Tokens outside of all sequences are copied.
        start_positions: int32 or int64 (batch,) or (sequences,): added to the positions of each sequence. A position below 0 is beyond the
            table, as one behind its end.
        layout: "bshd" (batch, sequence, heads, head_dim), "bhsd", "sbhd", or "thd" (tokens, heads, head_dim).
        inverse: rotate by minus the angles (where the two elements of a pair have different ones: by the transpose).
        scale: a factor of the rotated slice (YaRN's mscale): a number, not a tensor, and unless x is float64 one that float32 can hold.
        version: by default the fastest.

    Returns a new tensor of x's shape and dtype, or the tuple (x, k); dense strides are kept.
    Autocast does not change the dtype: the op computes as if it were off.

    Raises TypeError for the type of an argument or a dtype, ValueError for shapes, devices or options that do not fit, and on the CPU for a
    position beyond the table and for decreasing cu_seqlens. On a GPU, where to look at them would wait for it, a token whose position is
    beyond the table becomes NaN, and decreasing cu_seqlens give some position or NaN; nothing is read out of bounds.
    """
    inputs = Inputs(x, k, cos, sin, position_ids, cu_seqlens, start_positions, mrope_section)
    inputs, options = _checked(inputs, rotary_dim, rotary_offset, interleaved, layout, inverse, scale, version)
    return run(inputs, options)


def rope_(
    x: Any,
    cos: Any,
    sin: Any,
    *,
    k: Any = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    position_ids: Any = None,
    mrope_section: tuple[int, ...] | None = None,
    cu_seqlens: Any = None,
    start_positions: Any = None,
    layout: str = "bshd",
    inverse: bool = False,
    scale: float | None = None,
    version: str | None = None,
) -> Any:
    """The same as `rope`, written over x and k, which are returned. What is outside of the rotated slice is neither read nor written.

    Autograd knows of it, as of torch's own in-place operations; gradients are computed in new memory.

    Raises also ValueError, before anything is written, for what autograd lets nobody write, such as a leaf that requires grad; for an array
    that is read-only; for elements that share memory (an expanded view), for x and k that do, and for a table or positions in their memory.
    """
    inputs = Inputs(x, k, cos, sin, position_ids, cu_seqlens, start_positions, mrope_section)
    inputs, options = _checked(inputs, rotary_dim, rotary_offset, interleaved, layout, inverse, scale, version, _WRITTEN)
    if not torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            rope_checks.autograd_allows_writing(x=inputs.x, k=inputs.k)
        plain = type(inputs.x) is Tensor and not (inputs.x.is_meta or _modes() or transformed())
        (check_writable if plain else check_writable_wrapped)(*inputs[:7])
    return run(inputs, options, in_place=True)


def reference(
    x: Tensor, cos: Tensor, sin: Tensor | None, k: Tensor | None = None, *, interleaved: bool = False, rotary_dim: int | None = None,
    rotary_offset: int = 0, position_ids: Tensor | None = None, mrope_section: tuple[int, ...] | None = None,
    cu_seqlens: Tensor | None = None, start_positions: Tensor | None = None, layout: str = "bshd", inverse: bool = False,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """`rope` in plain torch."""
    inputs = Inputs(x, k, cos, sin, position_ids, cu_seqlens, start_positions, mrope_section)
    return rope_reference.rope(*_checked(inputs, rotary_dim, rotary_offset, interleaved, layout, inverse, scale, None))


def _checked(
    inputs: Inputs, rotary_dim: int | None, rotary_offset: int, interleaved: bool, layout: str, inverse: bool, scale: float | None,
    version: str | None, written: frozenset[str] = frozenset(),
) -> tuple[Inputs, Options]:  # fmt: skip
    """The inputs as tensors, and the options of a call that is allowed. `written`: the names of those that it writes."""
    section = None if inputs.section is None else rope_checks.sections(inputs.section)
    tensors: list[Any] = [
        t if type(t) is Tensor or (t is None and name in _OPTIONAL) else interop.to_torch(name, t, name in written)
        for name, t in zip(_NAMES, inputs, strict=False)
    ]
    inputs = Inputs(*tensors, section)  # type: ignore[call-arg]
    request = Request(*rope_checks.shapes_of(_NAMES, tensors), section)  # type: ignore[arg-type,call-arg]
    options = rope_checks.resolve(request, rotary_dim, rotary_offset, interleaved, layout, inverse, scale, version)
    rope_checks.no_gradient("rope", cos=inputs.cos, sin=inputs.sin)
    return inputs, options


_NAMES = ("x", "k", "cos", "sin", "position_ids", "cu_seqlens", "start_positions")
_OPTIONAL = frozenset(_NAMES) - {"x", "cos"}
_WRITTEN = frozenset({"x", "k"})


def run(inputs: Inputs, options: Options, in_place: bool = False) -> Any:
    """A call that is checked: prepare the tables and the positions, and rotate."""
    x, k, cos, sin, *_ = inputs
    if not x.is_cuda:
        rope_checks.values(inputs, options)
        if not backend.simulates(x):
            return _without_kernels(inputs, options, in_place)
    if sin is None:
        angles = cos if cos.dtype == torch.float64 else cos.float()
        cos, sin = gather.tables_of(angles, angle_maths(x.dtype, angles.dtype) == torch.float64)
    if cos.dtype not in table_dtypes(x.dtype):
        cos, sin = (t.to(compute_dtype(x.dtype, t.dtype)) for t in (cos, sin))
    positions = None
    if inputs.has_positions:
        cos, sin, positions = gather.rows(inputs._replace(cos=cos, sin=sin), options)
    return (rope_ops.rotate_ if in_place else rope_ops.rotate)(x, k, cos, sin, positions, options)


def _without_kernels(inputs: Inputs, options: Options, in_place: bool) -> Any:
    if options.version:
        checks.needs_gpu("rope", options.version, inputs.x.device)
    out = rope_reference.rope(inputs, options)
    return rope_ops.write(inputs.x, inputs.k, out) if in_place else out
