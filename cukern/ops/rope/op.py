"""rope and rope_: rotary position embedding of one tensor, or of queries and keys together, out of place or
in place.

With a the angle of a pair of elements at a token's position, y_1 = x_1 cos a - x_2 sin a and y_2 = x_2 cos
a + x_1 sin a (Su et al., https://arxiv.org/abs/2104.09864). The gradient is the rotation by -a.
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
    x: Any, cos: Any, sin: Any, *, k: Any = None, interleaved: bool = False, rotary_dim: int | None = None,
    rotary_offset: int = 0, position_ids: Any = None, mrope_section: tuple[int, ...] | None = None,
    cu_seqlens: Any = None, start_positions: Any = None, layout: str = "bshd", inverse: bool = False,
    scale: float | None = None, version: str | None = None,
) -> Any:  # fmt: skip
    """x, or x and k, with each head's pairs of elements rotated by the angles of the token's position.
    Differentiable any number of times.

        q = torch.randn(2, 4096, 32, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        k = torch.randn(2, 4096, 8, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        cos, sin = cukern.rope_tables(4096, 128, device="cuda")
        q, k = cukern.rope(q, cos, sin, k=k)

    Args:
        x: float16, bfloat16, float32 or float64, with the dimensions of `layout`.
        cos, sin: (positions, rotary_dim / 2), an angle per pair, or (positions, rotary_dim), one per element;
            or (batch or 1, sequence, either). If sin is None, cos holds angles in radians. No gradient.
        k: keys, rotated in the same launch.
        interleaved: element 2 i is paired with 2 i + 1 (GPT-J), instead of i with i + rotary_dim / 2
            (GPT-NeoX).
        rotary_dim, rotary_offset: the slice of head_dim that is rotated; default: all.
        position_ids: int32 or int64 (sequence,) or (batch, sequence): rows of the tables. With
            `mrope_section` (sections, batch, sequence).
        mrope_section: 2 or 3 numbers of pairs with the sum rotary_dim / 2: of each section.
        cu_seqlens: int32 or int64 (sequences + 1,), layout "thd": where each packed sequence begins, and the
            end of the last.
        start_positions: int32 or int64 (batch,) or (sequences,): added to the positions.
        layout: "bshd" (batch, sequence, heads, head_dim), "bhsd", "sbhd", or "thd" (tokens, heads, head_dim).
        inverse: rotate by minus the angles.
        scale: a factor for the rotated slice (YaRN).
        version: "v1", "v2" or "v3"; default: the fastest.

    Returns a new tensor like x, or the tuple (x, k).

    Raises TypeError for types, ValueError for shapes, devices or options. Positions outside the table raise
    ValueError on CPUs and give NaN on GPUs. Source: Su et al., arXiv 2104.09864.
    """
    inputs, options = _checked(
        x, cos, sin, k, interleaved, rotary_dim, rotary_offset, position_ids, mrope_section, cu_seqlens,
        start_positions, layout, inverse, scale, version,
    )  # fmt: skip
    return run(inputs, options)


def rope_(
    x: Any, cos: Any, sin: Any, *, k: Any = None, interleaved: bool = False, rotary_dim: int | None = None,
    rotary_offset: int = 0, position_ids: Any = None, mrope_section: tuple[int, ...] | None = None,
    cu_seqlens: Any = None, start_positions: Any = None, layout: str = "bshd", inverse: bool = False,
    scale: float | None = None, version: str | None = None,
) -> Any:  # fmt: skip
    """`rope` in place: x and k are overwritten and returned. Elements outside the rotated slice are neither
    read nor written.

        qkv = torch.randn(2, 512, 48, 128, device="cuda")
        cos, sin = cukern.rope_tables(512, 128, device="cuda")
        cukern.rope_(qkv[:, :, :32], cos, sin, k=qkv[:, :, 32:40])

    Autograd records it like torch's in-place operations. Gradients are computed in new memory.

    Arguments and errors as in `rope`. Also raises ValueError, before anything is written, for a tensor that
    autograd does not allow to be written, such as a leaf that requires grad; for a read-only array; if
    elements of x or k share memory (an expanded view), or x and k do; and if a table or positions are in
    their memory.
    """
    inputs, options = _checked(
        x, cos, sin, k, interleaved, rotary_dim, rotary_offset, position_ids, mrope_section, cu_seqlens,
        start_positions, layout, inverse, scale, version, frozenset(("x", "k")),
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
    x: Any, cos: Any, sin: Any, k: Any = None, interleaved: bool = False, rotary_dim: int | None = None,
    rotary_offset: int = 0, position_ids: Any = None, mrope_section: Any = None, cu_seqlens: Any = None,
    start_positions: Any = None, layout: str = "bshd", inverse: bool = False, scale: float | None = None,
    version: str | None = None, written: frozenset[str] = frozenset(),
) -> tuple[Inputs, Options]:  # fmt: skip
    """The inputs as tensors, and the options. `written`: the names of the tensors that the call writes."""
    section = None if mrope_section is None else rope_checks.sections(mrope_section)
    tensors: list[Any] = [
        t
        if type(t) is Tensor or (t is None and name in _OPTIONAL)
        else interop.to_torch(name, t, name in written)
        for name, t in zip(_NAMES, (x, k, cos, sin, position_ids, cu_seqlens, start_positions), strict=True)
    ]
    request = Request(*rope_checks.shapes_of(_NAMES, tensors), section)  # type: ignore[arg-type,call-arg]
    options = rope_checks.resolve(
        request, rotary_dim, rotary_offset, interleaved, layout, inverse, scale, version
    )
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
