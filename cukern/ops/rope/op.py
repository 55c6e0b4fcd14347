"""rope and rope_: rotary position embedding of one tensor, or of queries and keys together, out of place or in place.

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
from cukern.runtime import checks
from cukern.runtime.dispatch.autograd import transformed
from cukern.runtime.dispatch.versions import in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.planning import planned

_modes = torch._C._len_torch_dispatch_stack


@planned("x", "cos", "sin", "k", "position_ids", "cu_seqlens", "start_positions")
def rope(
    x: Any, cos: Any, sin: Any, *, k: Any = None, interleaved: bool = False, rotary_dim: int | None = None, rotary_offset: int = 0,
    position_ids: Any = None, mrope_section: tuple[int, ...] | None = None, cu_seqlens: Any = None, start_positions: Any = None,
    layout: str = "bshd", inverse: bool = False, scale: float | None = None, version: str | None = None,
) -> Any:  # fmt: skip
    """x, or x and k, with each head's pairs of elements rotated by the angles of the token's position. Differentiable any number of times.

        q, k = (torch.randn(2, 4096, heads, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True) for heads in (32, 8))
        cos, sin = cukern.rope_tables(4096, 128, device="cuda")
        q, k = cukern.rope(q, cos, sin, k=k)

    Args:
        x: float16, bfloat16, float32 or float64, with the dimensions of `layout` and any strides: slices of a packed qkv and transposed
            views are not copied. 16-bit types are computed in float32 and rounded once. float32 is computed in float64 if the tables or
            angles are float64 (slow on GPUs with few float64 units); with float32 tables an element errs by at most two roundings. Every
            tensor may also be an array that supports DLPack. CPU tensors use torch's operations, or the simulator.
        cos, sin: tables (positions, rotary_dim / 2) with one angle per pair, as from `rope_tables`; or (positions, rotary_dim) with one
            angle per element, as Hugging Face's `cat((freqs, freqs))`; or (batch or 1, sequence, either width) with a row for each token,
            without positions. float32, float64 or x's dtype. If sin is None, cos holds the angles in radians, of any size. Their cosine
            and sine are computed in float64, or in float32 for float32 angles and a 16-bit x. The tables have no gradient, and must not
            require one. A table whose last columns have cos 1 and sin 0 leaves their pairs unchanged ("proportional" partial rotary).
        k: keys, rotated in the same launch. Like x except for the number of heads.
        interleaved: False: element i of the rotated slice is paired with i + rotary_dim / 2 (GPT-NeoX). True: 2 i with 2 i + 1 (GPT-J).
        rotary_dim, rotary_offset: the slice of head_dim that is rotated, of even length; default: all. The rest is copied, or in place not
            touched.
        position_ids: int32 or int64 (sequence,) or (batch, sequence): each token's row of the tables; default: its index in the sequence.
            With `mrope_section` (sections, batch, sequence).
        mrope_section: 2 or 3 numbers of pairs with the sum rotary_dim / 2. The first pairs use the first section's position, and so on.
        cu_seqlens: int32 or int64 (sequences + 1,), layout "thd": the first token of each packed sequence, and the end of the last.
            Positions restart in each sequence. Tokens outside all sequences are copied.
        start_positions: int32 or int64 (batch,) or (sequences,): added to the positions of each sequence. A position below 0 is outside the
            table, like one behind its end.
        layout: "bshd" (batch, sequence, heads, head_dim), "bhsd", "sbhd", or "thd" (tokens, heads, head_dim).
        inverse: rotate by minus the angles. If the two elements of a pair have different angles: multiply by the transpose.
        scale: a factor for the rotated slice (YaRN's mscale): a number, not a tensor; for x other than float64 within float32's range.
        version: "v1", "v2" or "v3"; default: the fastest.

    Returns a new tensor of x's shape and dtype, or the tuple (x, k). Dense strides are kept. Autocast does not change the dtype or the
    computation.

    Raises TypeError for the type of an argument or a dtype, ValueError for shapes, devices or options that do not fit; for CPU tensors also
    for a position outside the table and for decreasing cu_seqlens. On a GPU these are not checked, because reading them would synchronise:
    a token whose position is outside the table becomes NaN, and decreasing cu_seqlens give some position or NaN. Nothing is read out of
    bounds.
    """
    inputs, options = _checked(
        x, cos, sin, k, interleaved, rotary_dim, rotary_offset, position_ids, mrope_section, cu_seqlens, start_positions, layout, inverse,
        scale, version,
    )  # fmt: skip
    return run(inputs, options)


def rope_(
    x: Any, cos: Any, sin: Any, *, k: Any = None, interleaved: bool = False, rotary_dim: int | None = None, rotary_offset: int = 0,
    position_ids: Any = None, mrope_section: tuple[int, ...] | None = None, cu_seqlens: Any = None, start_positions: Any = None,
    layout: str = "bshd", inverse: bool = False, scale: float | None = None, version: str | None = None,
) -> Any:  # fmt: skip
    """`rope` in place: x and k are overwritten and returned. Elements outside the rotated slice are neither read nor written.

        qkv, (cos, sin) = torch.randn(2, 512, 48, 128, device="cuda"), cukern.rope_tables(512, 128, device="cuda")
        cukern.rope_(qkv[:, :, :32], cos, sin, k=qkv[:, :, 32:40])

    Autograd records it like torch's in-place operations. Gradients are computed in new memory.

    Arguments and errors as in `rope`. Also raises ValueError, before anything is written, for a tensor that autograd does not allow to be
    written, such as a leaf that requires grad; for a read-only array; if elements of x or k share memory (an expanded view), or x and k do;
    and if a table or positions are in their memory.
    """
    inputs, options = _checked(
        x, cos, sin, k, interleaved, rotary_dim, rotary_offset, position_ids, mrope_section, cu_seqlens, start_positions, layout, inverse,
        scale, version, frozenset(("x", "k")),
    )  # fmt: skip
    if not torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            rope_checks.autograd_allows_writing(x=inputs.x, k=inputs.k)
        plain = type(inputs.x) is Tensor and not (inputs.x.is_meta or _modes() or transformed())
        (check_writable if plain else check_writable_wrapped)(*inputs[:7])
    return run(inputs, options, in_place=True)


def reference(x: Tensor, cos: Tensor, sin: Tensor | None, k: Tensor | None = None, **options: Any) -> Any:
    """`rope` in torch's operations. `options` as in rope."""
    return rope_reference.rope(*_checked(x, cos, sin, k, **options))


def _checked(
    x: Any, cos: Any, sin: Any, k: Any = None, interleaved: bool = False, rotary_dim: int | None = None, rotary_offset: int = 0,
    position_ids: Any = None, mrope_section: Any = None, cu_seqlens: Any = None, start_positions: Any = None, layout: str = "bshd",
    inverse: bool = False, scale: float | None = None, version: str | None = None, written: frozenset[str] = frozenset(),
) -> tuple[Inputs, Options]:  # fmt: skip
    """The inputs as tensors, and the options. `written`: the names of the tensors that the call writes."""
    section = None if mrope_section is None else rope_checks.sections(mrope_section)
    tensors: list[Any] = [
        t if type(t) is Tensor or (t is None and name in _OPTIONAL) else interop.to_torch(name, t, name in written)
        for name, t in zip(_NAMES, (x, k, cos, sin, position_ids, cu_seqlens, start_positions), strict=True)
    ]
    request = Request(*rope_checks.shapes_of(_NAMES, tensors), section)  # type: ignore[arg-type,call-arg]
    options = rope_checks.resolve(request, rotary_dim, rotary_offset, interleaved, layout, inverse, scale, version)
    rope_checks.no_gradient("rope", cos=tensors[2], sin=tensors[3])
    return Inputs(*tensors, section), options  # type: ignore[call-arg]


_NAMES = ("x", "k", "cos", "sin", "position_ids", "cu_seqlens", "start_positions")
_OPTIONAL = frozenset(_NAMES) - {"x", "cos"}


def run(inputs: Inputs, options: Options, in_place: bool = False) -> Any:
    """Prepare the tables and positions of a checked call, and rotate."""
    x, k, cos, sin, *_ = inputs
    if not x.is_cuda:
        rope_checks.values(inputs, options)
        if not backend.simulates(x):
            if options.version:
                checks.needs_gpu("rope", options.version, x.device)
            out = rope_reference.rope(inputs, options)
            return rope_ops.write(x, k, out) if in_place else out
    if not options.version and (named := in_force.now):
        options = options._replace(version=named)
    if sin is None:
        angles = cos if cos.dtype == torch.float64 else cos.float()
        cos, sin = gather.tables_of(angles, angle_maths(x.dtype, angles.dtype) == torch.float64)
    if cos.dtype not in table_dtypes(x.dtype):
        cos, sin = (t.to(compute_dtype(x.dtype, t.dtype)) for t in (cos, sin))
    positions = None
    if inputs.has_positions:
        cos, sin, positions = gather.rows(inputs._replace(cos=cos, sin=sin), options)
    return (rope_ops.rotate_ if in_place else rope_ops.rotate)(x, k, cos, sin, positions, options)
