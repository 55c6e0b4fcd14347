"""cukern.rope in torch: gradients, in place under autograd, compile, fake tensors, opcheck."""

import itertools

import pytest
import torch
from helpers import DEVICE, gpu, kernels, places, same_bits
from test_rope import PLACES, VERSIONS, B, H, K, S, assert_right, tables
from torch._subclasses.fake_tensor import FakeTensorMode

import cukern
from cukern.ops.rope import autograd as rope_ops
from cukern.ops.rope.plan import Options

# The formulas and the tracing are the same for all versions.
TWO_PLACES = pytest.mark.parametrize("device, version", [places("rope")[0], places("rope")[-1]])


def inverse(y, cos, sin, **options):
    """The gradient: the output's gradient rotated by minus the angles."""
    return cukern.rope(y, cos, sin, inverse=True, **options)


@TWO_PLACES
def test_gradcheck_and_gradgradcheck(device, version):
    for interleaved, full, in_place in ((False, False, False), (True, True, False), (False, True, True)):
        q, k = (torch.randn(1, 2, 1, 5, dtype=torch.float64, device=device).requires_grad_() for _ in "qk")
        cos, sin = tables(2, 4 if full else 2, device, torch.float64)
        options = {
            "interleaved": interleaved,
            "rotary_dim": 4,
            "rotary_offset": 1,
            "scale": 0.7,
            "version": version,
        }

        def function(q, k, cos=cos, sin=sin, in_place=in_place, options=options):
            return (
                cukern.rope_(q * 1, cos, sin, k=k * 1, **options)
                if in_place
                else cukern.rope(q, cos, sin, k=k, **options)
            )

        assert torch.autograd.gradcheck(function, (q, k)) and torch.autograd.gradgradcheck(function, (q, k))


@PLACES
def test_gradients_of_one_of_two(device, version):
    """If only q or only k needs a gradient, or only one output is used, the other has none."""
    cos, sin = tables(S, 4, device)
    for wants_q, wants_k, uses_q, uses_k in itertools.product((False, True), repeat=4):
        q = torch.randn(B, S, H, 8, device=device, requires_grad=wants_q)
        k = torch.randn(B, S, K, 8, device=device, requires_grad=wants_k)
        if not (wants_q and uses_q) and not (wants_k and uses_k):
            continue
        outs = cukern.rope(q, cos, sin, k=k, version=version)
        douts = [torch.randn_like(y) for y in outs]
        sum(
            (y * d).sum() for y, d, used in zip(outs, douts, (uses_q, uses_k), strict=True) if used
        ).backward()
        for x, d, has in ((q, douts[0], wants_q and uses_q), (k, douts[1], wants_k and uses_k)):
            expected = inverse(d, cos, sin, version=version) if has else torch.zeros_like(d)
            assert torch.equal(torch.zeros_like(d) if x.grad is None else x.grad, expected)


@VERSIONS
@kernels
def test_an_expanded_gradient_has_the_plan_of_a_contiguous_one(device, version, monkeypatch):
    """The gradient of a sum has stride 0, and only v1 reads elements that are not adjacent."""
    plans, plan = [], rope_ops.versions.plan
    monkeypatch.setattr(rope_ops.versions, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
    (cos, sin), xs = (
        tables(S, 16, device),
        [torch.randn(B, S, heads, 32, device=device, requires_grad=True) for heads in (4, 2)],
    )
    for narrow in ((1, 1, 1, 1), (B, S, 1, 1), (1, 1, 1, 32)):
        douts = [torch.randn(narrow, device=device).expand(x.shape) for x in xs]
        found = []
        for grads in (douts, [d.contiguous() for d in douts]):
            outs = cukern.rope(xs[0], cos, sin, k=xs[1], version=version)
            found.append((torch.autograd.grad(outs, xs, grads), plans[-1]))
        (expanded, ours), (contiguous, theirs) = found
        assert (ours.launch, ours.grid, ours.block) == (theirs.launch, theirs.grid, theirs.block)
        for a, b in zip(expanded, contiguous, strict=True):
            assert same_bits(a, b) and a.stride() == b.stride()


@PLACES
def test_in_place_is_part_of_the_graph(device, version):
    """Operations before and after it get their gradients. The incoming gradient is not written."""
    x, (cos, sin) = torch.randn(B, S, H, 8, device=device, requires_grad=True), tables(S, 4, device)
    y = x * 2
    out = cukern.rope_(y, cos, sin, version=version)
    assert out is y and y.grad_fn is not None
    dout = torch.randn_like(out)
    before = dout.clone()
    (dx,) = torch.autograd.grad(out * 3, x, dout)
    assert same_bits(dout, before)
    assert_right(dx, 6 * inverse(dout.double(), cos, sin))
    q, k = x * 2, x * 3
    outs = cukern.rope_(q, cos, sin, k=k, version=version)
    assert outs[0] is q and outs[1] is k
    (dx,) = torch.autograd.grad((q, k), x, (dout, dout))
    assert_right(dx, 5 * inverse(dout.double(), cos, sin))


@PLACES
def test_in_place_on_slices_of_a_packed_tensor(device, version):
    """Two views of one tensor with a gradient."""
    w, (cos, sin) = torch.randn(B, S, H + 2 * K, 8, device=device, requires_grad=True), tables(S, 4, device)
    qkv = w * 1
    cukern.rope_(qkv[:, :, :H], cos, sin, k=qkv[:, :, H : H + K], version=version)
    dout = torch.randn_like(qkv)
    (dw,) = torch.autograd.grad(qkv, w, dout)
    assert_right(dw[:, :, : H + K], inverse(dout[:, :, : H + K].double(), cos, sin))
    assert same_bits(dw[:, :, H + K :], dout[:, :, H + K :])


@PLACES
def test_autograd_notices_what_in_place_overwrites(device, version):
    x, (cos, sin) = torch.randn(B, S, H, 8, device=device, requires_grad=True), tables(S, 4, device)
    for no_grad in (False, True):
        y = x * 1
        loss = (y * y).sum()  # saves y
        with torch.set_grad_enabled(not no_grad):
            cukern.rope_(y, cos, sin, version=version)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@PLACES
def test_in_place_where_nothing_needs_a_gradient(device, version):
    p, (cos, sin) = torch.nn.Parameter(torch.randn(B, S, H, 8, device=device)), tables(S, 4, device)
    expected = cukern.rope(p.detach(), cos, sin, version=version)
    with torch.no_grad():
        assert cukern.rope_(p, cos, sin, version=version) is p
    assert same_bits(p.detach(), expected) and p.is_leaf
    with torch.inference_mode():
        x = torch.randn(B, S, H, 8, device=device)
        expected = cukern.rope(x, cos, sin, version=version)
        ids = torch.arange(S, device=device)[None].expand(B, S)  # the op makes them contiguous
        assert same_bits(cukern.rope_(x, cos, sin, position_ids=ids, version=version), expected)


VMAP, JVP = torch.func.vmap, torch.func.jvp


@PLACES
def test_vmap_over_inputs_without_a_gradient(device, version):
    """Tables, angles and positions that differ by batch element: the same as one call for each element."""
    (cos, sin), ids = tables(S, 4, device), torch.randint(S, (2, 3, B, S), device=device)
    x, two = torch.randn(B, S, H, 8, device=device), torch.stack((cos, cos + 1))
    bounds = torch.tensor([[0, 2, 5], [0, 3, 3]], device=device)
    starts = torch.zeros(2, B, dtype=torch.int32, device=device)
    calls = {
        "tables": (lambda c: cukern.rope(x, c, sin, k=x[:, :, :1], version=version)[1], two),
        "angles": (lambda c: cukern.rope(x, c, None, version=version), two),
        "ids": (lambda i: cukern.rope(x, cos, sin, position_ids=i[0], version=version), ids),
        "sections": (
            lambda i: cukern.rope(x, cos, sin, position_ids=i, mrope_section=(1, 1, 2), version=version),
            ids,
        ),
        "starts": (lambda s: cukern.rope(x, cos, sin, start_positions=s, version=version), starts),
        "bounds": (
            lambda b: cukern.rope(x[0], cos, sin, cu_seqlens=b, layout="thd", version=version),
            bounds,
        ),
    }
    for name, (call, batch) in calls.items():
        torch.testing.assert_close(
            VMAP(call)(batch), torch.stack([call(b) for b in batch]), msg=lambda text, n=name: f"{n}: {text}"
        )


@PLACES
def test_tables_with_tangents_are_refused(device, version):
    (cos, sin), x = tables(S, 4, device), torch.randn(B, S, H, 8, device=device)
    for function in (cukern.rope, lambda x, *a, **o: cukern.rope_(x * 1, *a, **o)):
        with pytest.raises(ValueError, match="cos has a tangent, but rope computes no derivative for it"):
            JVP(lambda c, f=function: f(x, c, sin, version=version), (cos,), (cos,))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(sin, sin)
            with pytest.raises(ValueError, match="sin has a tangent"):
                function(x, cos, dual, version=version)
    with pytest.raises(ValueError, match="freqs has a tangent, but apply_rotary_pos_emb"):
        freqs = torch.rand(S, 1, 1, 8, device=device)
        JVP(lambda f: cukern.apply_rotary_pos_emb(x, f, "bshd", version=version), (freqs,), (freqs,))


@PLACES
def test_in_place_under_transforms(device, version):
    """The same result as out of place, or an error before anything is written."""
    (cos, sin), xs = tables(S, 4, device), torch.randn(3, B, S, H, 8, device=device)

    def in_place(x, k=None):
        return cukern.rope_(x, cos, sin, k=k, version=version)

    expected = torch.stack([cukern.rope(x, cos, sin, version=version) for x in xs])
    mine = xs.clone()
    assert same_bits(VMAP(in_place)(mine), expected) and same_bits(mine, expected)
    for y in JVP(in_place, (xs[0].clone(),), (xs[0].clone(),)):
        torch.testing.assert_close(y, expected[0])
    q, k = VMAP(lambda x: in_place(x[:, :, :1], x[:, :, 1:]))(xs.clone())
    assert same_bits(torch.cat((q, k), 3), expected)
    gradient = VMAP(torch.func.grad(lambda x: (in_place(x * 1) * expected[0]).sum()))(xs)
    torch.testing.assert_close(gradient, inverse(expected[0], cos, sin, version=version).expand_as(xs))
    outside = xs[0].clone()
    refused = {
        "x comes from outside": lambda: VMAP(lambda c: cukern.rope_(outside, c, sin, version=version))(
            torch.stack((cos, cos))
        ),
        "k comes from outside": lambda: torch.func.grad(lambda x: in_place(x * 1, outside)[0].sum())(xs[0]),
        "x and k share memory": lambda: VMAP(lambda x: in_place(x[:, :, :2], x[:, :, 1:]))(outside[None]),
        r"x has shape \(3, .*elements share memory": lambda: VMAP(in_place)(outside.expand_as(xs)),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert same_bits(outside, xs[0])


@PLACES
def test_checkpointing_gives_the_same_gradient(device, version):
    x, (cos, sin) = torch.randn(B, S, H, 8, device=device, requires_grad=True), tables(S, 4, device)

    def block(t):
        return cukern.rope_(t * 1, cos, sin, version=version).square()

    (plain,) = torch.autograd.grad(block(x).sum(), x)
    (again,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum(), x)
    assert same_bits(plain, again)


@pytest.mark.filterwarnings("default")  # torch's compiler emits warnings
@TWO_PLACES
def test_compiled_with_all_arguments(device, version):
    """All kinds of positions, in place and out of place, with and without gradients, in one graph."""
    torch._dynamo.reset()
    cos, sin = tables(20, 4, device)
    ids = torch.randint(20, (3, B, S), device=device)
    starts, cu_seqlens = (
        torch.tensor([2, 9], device=device),
        torch.tensor([0, 3, 8], dtype=torch.int32, device=device),
    )

    def function(x, k):
        q, k = cukern.rope(x, cos, sin, k=k, position_ids=ids[0], version=version)
        q = cukern.rope_(q * 1, cos, sin, start_positions=starts, scale=1.5, version=version)
        q = cukern.rope(q, cos, sin, position_ids=ids, mrope_section=(1, 1, 2), version=version)
        packed = cukern.rope_(
            k.flatten(0, 1) * 1, cos, sin, cu_seqlens=cu_seqlens, layout="thd", version=version
        )
        freqs = ids[1, 0, :, None, None, None].float().expand(-1, 1, 1, 8)
        return q, packed, cukern.apply_rotary_pos_emb(q, freqs, "bshd", version=version)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for grad in (False, True):
        xs = [torch.randn(B, S, h, 8, device=device, requires_grad=grad) for h in (H, K)]
        ours, theirs = compiled(*xs), function(*xs)
        if grad:
            douts = [torch.randn_like(y) for y in theirs]
            ours, theirs = ((*ys, *torch.autograd.grad(ys, xs, douts)) for ys in (ours, theirs))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("default")
@VERSIONS
@kernels
def test_compiled_in_place_writes_the_callers_tensor(device, version):
    torch._dynamo.reset()
    qkv, (cos, sin) = torch.randn(B, S, H + 2 * K, 8, device=device), tables(S, 4, device)
    expected = qkv.clone()
    cukern.rope_(expected[:, :, :H], cos, sin, k=expected[:, :, H : H + K], version=version)

    def function(t):
        cukern.rope_(t[:, :, :H], cos, sin, k=t[:, :, H : H + K], version=version)
        return t * 2

    doubled = torch.compile(function, fullgraph=True, backend="aot_eager")(qkv)
    assert same_bits(qkv, expected) and same_bits(doubled, expected * 2)


def test_fake_tensors_have_the_strides_of_the_real_ones():
    """Needs no GPU: no kernel runs."""
    with FakeTensorMode():
        cos, ids = torch.empty(S, 4, device="cuda"), torch.empty(B, S, dtype=torch.int64, device="cuda")
        for sizes, order in (
            ((B, S, H, 8), (0, 1, 2, 3)),
            ((B, H, S, 8), (0, 2, 1, 3)),
            ((S, B, H, 8), (1, 0, 2, 3)),
        ):
            x = torch.empty(sizes, dtype=torch.float16, device="cuda").permute(order)
            y, z = cukern.rope(x, cos, cos, k=x, position_ids=ids)
            assert (
                y.shape == z.shape == x.shape
                and y.dtype == torch.float16
                and y.stride() == z.stride() == x.stride()
            )
            assert cukern.rope_(x, cos, cos) is x
            assert cukern.apply_rotary_pos_emb(
                x, torch.empty(S, 1, 1, 8, device="cuda"), "bshd"
            ).is_contiguous()


@VERSIONS
@kernels
def test_opcheck(version):
    """The schemas declare what is written. On the CPU in the simulator."""
    q, k = torch.randn(1, 3, 2, 8, device=DEVICE), torch.randn(1, 3, 1, 8, device=DEVICE)
    cos, sin = tables(3, 4, DEVICE)
    positions = torch.tensor([[2, 1, 0]], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([[2, 1, 0]], device=DEVICE)
    tests = ("test_schema", "test_faketensor")
    for options in (
        Options(8, 0, False, False, 1.0, "bshd", version=version),
        Options(4, 2, True, True, 2.0, "bshd", True, version),
    ):
        t = (c[:, : options.rotary_dim // 2].contiguous() for c in (cos, sin))
        arguments = (*t, positions, *options)
        for op in (torch.ops.cukern._rope, torch.ops.cukern._rope_):
            torch.library.opcheck(op.default, (q, k, *arguments), test_utils=tests)
    torch.library.opcheck(
        torch.ops.cukern._rope_positions.default, (cos, ids, None, None, 1, 3, 1, 0), test_utils=tests
    )
    torch.library.opcheck(torch.ops.cukern._rope_angles.default, (cos, True), test_utils=tests)
    three = torch.zeros(3, 3, dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(
        torch.ops.cukern._rope_sections.default, (cos, sin, three, 1, 3, 4, False, 1, 2), test_utils=tests
    )


def test_the_raw_op_refuses_a_cpu_tensor():
    x, (cos, sin) = torch.randn(1, 3, 2, 8), tables(3, 4, "cpu")
    with pytest.raises(ValueError, match="_rope runs kernels, and the tensors are on the CPU"):
        rope_ops.rotate(x, None, cos, sin, None, Options(8, 0, False, False, 1.0, "bshd"))


@gpu
def test_only_the_output_is_allocated():
    """Strided views are not copied. In place, nothing is allocated."""
    qkv, (cos, sin) = (
        torch.randn(4, 512, 48, 128, device="cuda", dtype=torch.bfloat16),
        tables(512, 64, "cuda"),
    )
    q, k = qkv[:, :, :32], qkv[:, :, 32:40]
    cukern.rope_(q, cos, sin, k=k)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    cukern.rope_(q, cos, sin, k=k)
    assert torch.cuda.max_memory_allocated() == before
    out = cukern.rope(q, cos, sin, k=k)
    assert torch.cuda.max_memory_allocated() - before == sum(y.numel() * 2 for y in out)
