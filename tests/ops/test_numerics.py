"""16-bit types in every op of the registry: the CPU path is as accurate as torch's own ops, and no gradient
has a common factor.

What is right are the formulas of fuzz_truth.py in float64, which call neither cukern nor torch's ops of the
same name.
"""

import itertools
import math
import operator
from functools import partial, reduce

import fuzz_truth as truth
import pytest
import torch
from helpers import DEVICE, PLACE, kernels
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cukern.bench.calls import arguments, leaves_of, outputs, wanted_inputs
from cukern.runtime.registry import CASES

HALVES = torch.float16, torch.bfloat16
ROTATED = {"rope": {}, "rope_interleaved": {"interleaved": True}}


def packed(attend, qkv):
    return attend(*(t.transpose(1, 2) for t in qkv.unbind(2))).transpose(1, 2)


def varlen(attend, q, k, v, bounds):
    ends = bounds.tolist()
    parts = [attend(*(t[a:b].transpose(0, 1) for t in (q, k, v))) for a, b in itertools.pairwise(ends)]
    return torch.cat(parts, 1).transpose(0, 1)


def of_torch(q, k, v, is_causal=True, softcap=0.0):
    """Scores are float32, as in torch's fused kernels. The last query sees all keys. `softcap`: of
    flex_attention, in torch's operations."""
    k, v = (
        t if t.shape[-3] == q.shape[-3] else t.repeat_interleave(q.shape[-3] // t.shape[-3], -3)
        for t in (k, v)
    )
    if not softcap:
        hidden = truth.hidden_of(q @ k.mT, None) & torch.tensor(is_causal)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
    s = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    s = softcap * torch.tanh(s / softcap)
    hidden = truth.hidden_of(s, None)
    return (s.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num() @ v.float()).to(q.dtype)


def dense(x, *factors):
    for w in reversed(factors):
        x = x.unflatten(-1, (*(f.shape[0] for f in factors[:-1]), w.shape[0])) if x.ndim == 2 else x
        x = (x @ w).movedim(-1, 1)
    return x.flatten(1)


def quarter(rotate, x, cos, sin):
    return rotate(x, cos, sin, rotary_dim=2 * cos.shape[1])


def both(rotate, q, k, cos, sin, **options):
    return rotate(q, cos, sin, k=k, **options)


def halves_rope(x, cos, sin, **options):
    """With tables of x's dtype, as transformers rotate."""
    return truth.rope(x, cos.to(x.dtype), sin.to(x.dtype), **options)


def moments(rule, *tensors):
    return tuple(
        map(
            torch.stack,
            zip(*[rule(*([t] for t in some)) for some in zip(*tensors, strict=True)], strict=True),
        )
    )


def torch_adamw(params, grads, exp_avgs, exp_avg_sqs):
    """torch's step of 16-bit parameters: of a float32 copy, which is rounded."""
    p, g, m, v = (ts[0].float().clone() for ts in (params, grads, exp_avgs, exp_avg_sqs))
    steps = [torch.zeros(())]
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "lr": 1e-3, "weight_decay": 1e-2, "eps": 1e-8}
    torch.optim._functional.adamw([p], [g], [m], [v], [], steps, maximize=False, **options)
    return p.to(params[0].dtype), m, v


PADDED = {"ignore_index": -1, "reduction": "none", "label_smoothing": 0.1}


def padded(loss, logits, targets, **options):
    columns = logits.shape[-1]
    return loss(
        logits, targets, vocab_size=columns - (47 if columns > 1000 else 3 if columns > 3 else 0), **options
    )


def torch_padded(logits, targets, vocab_size):
    c = 5 * torch.tanh(logits[:, :vocab_size] / 5)
    return F.cross_entropy(c, targets.long(), **PADDED) + 1e-2 * c.logsumexp(-1).square() * (targets != -1)


RULES = {  # name: the formula, torch's own op
    "square": (lambda x: x * x, torch.square),
    "softmax": (truth.softmax, partial(torch.softmax, dim=-1)),
    "log_softmax": (truth.log_softmax, partial(torch.log_softmax, dim=-1)),
    "causal_softmax": (truth.causal_softmax, lambda x: x.masked_fill(truth.hidden_of(x, None),
                                                                     -math.inf).softmax(-1).nan_to_num()),
    "attention": (truth.attention, of_torch),
    "attention_grouped": (partial(truth.attention, softcap=3.0), partial(of_torch, softcap=3.0)),
    "attention_packed": (partial(packed, truth.attention), partial(packed, of_torch)),
    "attention_varlen": (partial(varlen, truth.attention), partial(varlen, of_torch)),
    "attention_decode": (truth.attention, of_torch),
    "cross_entropy": (truth.cross_entropy, F.cross_entropy),
    "cross_entropy_padded": (
        partial(padded, partial(truth.cross_entropy, z_loss=1e-2, softcap=5.0, **PADDED)),
        partial(padded, torch_padded),
    ),
    "linear_cross_entropy": (truth.linear_cross_entropy,
                             lambda x, w, targets: F.cross_entropy(F.linear(x, w).float(), targets)),
    "embedding": (lambda w, p, t: truth.embedding(t, w, p),
                  lambda w, p, t: F.embedding(t, w) + p[: t.shape[-1]]),
    "embedding_tokens": (lambda w, t: truth.embedding(t, w), lambda w, t: F.embedding(t, w)),
    "gelu": (partial(truth.gated, approximate="none"), F.gelu),
    "gelu_tanh": (partial(truth.gated, approximate="tanh"), partial(F.gelu, approximate="tanh")),
    "gelu_bias": (lambda x, b: truth.gated(x, 1.0, b, "tanh"),
                  lambda x, b: F.gelu(x + b, approximate="tanh")),
    "swiglu": (truth.gated, lambda gate, up: F.silu(gate) * up),
    "geglu": (partial(truth.gated, approximate="none"), lambda gate, up: F.gelu(gate) * up),
    "kron_linear": (lambda x, *ws: truth.kron_linear(x, ws), lambda x, *ws: truth.kron_linear(x, ws)),
    "matmul": (torch.matmul, torch.matmul),
    "linear": (truth.linear, F.linear),
    "linear_gelu": (lambda *args: truth.gated(truth.linear(*args), approximate="none"),
                    lambda *args: F.gelu(F.linear(*args))),
    "rope": (truth.rope, halves_rope),
    "rope_qk": (partial(both, truth.rope), partial(both, halves_rope)),
    "rope_interleaved": (partial(both, truth.rope, interleaved=True),
                         partial(both, halves_rope, interleaved=True)),
    "rope_quarter": (partial(quarter, truth.rope), partial(quarter, halves_rope)),
    "rope_packed": (
        lambda x, cos, sin, bounds: truth.rope(x, cos, sin, cu_seqlens=bounds, layout="thd"),
        lambda x, cos, sin, bounds: halves_rope(x, cos, sin, cu_seqlens=bounds, layout="thd"),
    ),
    "rope_te": (truth.te, lambda t, freqs: halves_rope(t, freqs[:, 0, 0].cos(), freqs[:, 0, 0].sin(),
                                                       layout="sbhd")),
    "layernorm": (truth.layernorm, lambda x, w, b: F.layer_norm(x, w.shape, w, b)),
    "rmsnorm": (truth.rmsnorm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6)),
    "layernorm_residual": (
        lambda x, r, w, b: truth.layernorm(x, w, b, residual=r),
        lambda x, r, w, b: (F.layer_norm(x + r, w.shape, w, b), x + r),
    ),
    "adamw": (partial(moments, truth.adamw), partial(moments, torch_adamw)),
}  # fmt: skip
SAME = {"kron_linear_rectangular": "kron_linear", "rope_in_place": "rope_qk", "rope_strided": "rope_qk"}
EVERY = pytest.mark.parametrize("name", CASES)
# of the gradients whose common factor is measured. 1 / 510, of the targets that count, is 1.0039 / 510 in
# bfloat16
DIMS = {
    "attention": (1, 40, 16), "attention_grouped": (1, 40, 16), "attention_packed": (1, 40, 16),
    "attention_varlen": (40, 3, 1, 16), "cross_entropy": (510, 9), "cross_entropy_padded": (680, 9),
    "linear_cross_entropy": (680, 40, 24), "causal_softmax": (70, 40), "embedding": (3, 67, 11, 24),
    "embedding_tokens": (3, 67, 11, 24), "kron_linear": (20, 8, 8),
    "kron_linear_rectangular": (20, 8, 5, 8, 9), "matmul": (24, 40, 24), "linear": (24, 40, 24),
    "linear_gelu": (24, 40, 24), "gelu_bias": (24, 64), "square": (1023,), "rope": (2, 20, 3, 16),
    "rope_quarter": (2, 20, 2, 64), "rope_te": (20, 2, 2, 16), "rope_packed": (40, 3, 2, 16),
}  # fmt: skip
DIMS |= dict.fromkeys(("rope_qk", "rope_interleaved", "rope_in_place", "rope_strided"), (1, 20, 3, 2, 16))
ROWS = 70, 33  # of the other ops
NUMBERS, MORE = 500, 8000  # MORE: of attention on a GPU, whose probabilities are rounded too
if PLACE != "sim":
    DIMS |= dict.fromkeys(("attention", "attention_grouped", "attention_packed"), (32, 40, 16))


def run(function, case, inputs, douts):
    """The outputs, and the gradients of all inputs that have one."""
    leaves = leaves_of(inputs, wanted_inputs(case, "bwd", inputs))
    outs = outputs(function(*arguments(case, leaves)))
    wanted = [x for x in leaves if x.requires_grad]
    if not wanted:
        return list(outs), []
    return [o.detach() for o in outs], list(
        torch.autograd.grad(outs, wanted, [d.to(o) for d, o in zip(douts, outs, strict=True)])
    )


def cases(name, dims, dtype, change, device="cpu"):
    """The op, its inputs, gradients of its outputs, and the results of the formula and of torch's op."""
    case, (rule, torchs) = CASES[name], RULES[SAME.get(name, name)]
    inputs = [x.cpu() for x in case.make(dims, dtype, "cpu")]
    inputs = [
        change(i, x).to(x.dtype) if case.has_gradient(n, x) or n == "grad" else x
        for i, (n, x) in enumerate(zip(case.names(inputs), inputs, strict=False))
    ]
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    douts = [
        (torch.randn if o.ndim else torch.ones)(o.shape, dtype=torch.float64).to(dtype)
        for o in outputs(rule(*exact))
    ]
    right = reduce(operator.iadd, run(rule, case, exact, [d.double() for d in douts]), [])
    return (
        case,
        [x.to(device) for x in inputs],
        douts,
        right,
        reduce(operator.iadd, run(torchs, case, inputs, douts), []),
    )


def mixed(i, x):
    return x.double() * 10 ** (3 * torch.rand(x.shape, dtype=torch.float64) - 2)


def large(name, i, x):
    return 8 * x.double() if i == 0 or (i == 1 and name.startswith("attention")) else x


@EVERY
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_types_on_the_cpu_are_as_accurate_as_torch(name, dtype):
    for change in (partial(large, name), mixed):
        for dims in CASES[name].sim_dims:
            case, inputs, douts, right, torchs = cases(name, dims, dtype, change)
            ours = reduce(operator.iadd, run(case.call, case, inputs, douts), [])
            for i, (y, p, t) in enumerate(zip(ours, torchs, right, strict=True)):
                if y.numel():
                    error, allowed = ((z.double() - t).abs().max() for z in (y, p))
                    rounding = torch.finfo(y.dtype).eps * t.abs().max()
                    assert error <= 2 * allowed + rounding, (
                        f"{change}, {dims}: result {i} errs by {error:.2g}, torch's by {allowed:.2g}"
                    )


@EVERY
@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_types_on_the_cpu_are_rounded_once(name, dtype):
    """So nearly all results are the numbers that are nearest to the formula's. linear_cross_entropy says that
    it rounds the logits. Quarters have few bits: their sums, such as x + residual, are exact."""
    if name == "linear_cross_entropy":
        pytest.skip("rounds the logits")
    dims = DIMS.get(name, ROWS) if CASES[name].differentiable else CASES[name].sim_dims[-1]
    case, inputs, douts, right, _ = cases(name, dims, dtype, lambda _, x: (4 * x).round() / 4)
    for i, (y, t) in enumerate(
        zip(reduce(operator.iadd, run(case.call, case, inputs, douts), []), right, strict=True)
    ):
        if y.dtype == dtype:
            assert (y != t.to(dtype)).double().mean() < 0.02, (
                f"result {i}: {(y != t.to(dtype)).double().mean():.1%} are not the nearest"
            )


class MixedProducts(TorchDispatchMode):
    """Refuses operations of a 16-bit tensor and a float32 tensor without dimensions: on a GPU, torch rounds
    the latter to 16 bits first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if func.namespace == "aten" and {"mul", "div", "add", "sub", "pow", "where"} & {
            func._opname.rstrip("_")
        }:
            assert not (
                any(t.ndim and t.itemsize == 2 for t in tensors)
                and any(not t.ndim and t.itemsize > 2 for t in tensors)
            ), func
        return func(*args, **(kwargs or {}))


@EVERY
@pytest.mark.parametrize(
    "device, version",
    [pytest.param("cpu", None, id="cpu"), pytest.param(DEVICE, -1, marks=kernels, id=PLACE)],
)
def test_no_16_bit_tensor_is_multiplied_by_a_float32_number(name, device, version):
    case = CASES[name]
    inputs = [x.to(device) for x in case.make(case.sim_dims[-1], torch.bfloat16, "cpu")]
    with MixedProducts():
        call = case.call if version is None else partial(case.call, version=list(case.op.versions)[version])
        run(call, case, inputs, [torch.randn_like(o) for o in outputs(case.reference(*inputs))])


@EVERY
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "device, version",
    [pytest.param("cpu", None, id="cpu"), pytest.param(DEVICE, -1, marks=kernels, id=PLACE)],
)
def test_gradients_have_no_common_factor(name, dtype, device, version):
    """<gradient, truth> / <truth, truth> deviates from 1 by at most the deviation of torch's own op, plus
    2e-4. Roundings alone move it by 0.25 epsilons / sqrt(numbers), so draws are repeated until enough matter;
    in the simulator, gradients with fewer are left out."""
    if not CASES[name].differentiable:
        pytest.skip("has no gradients")
    sums, simulated = 0, version is not None and PLACE == "sim"
    enough = MORE if "attention" in name and PLACE != "sim" else NUMBERS
    for _ in range(1 if simulated else 400):
        case, inputs, douts, right, torchs = cases(name, DIMS.get(name, ROWS), dtype, lambda _, x: x, device)
        call = case.call if version is None else partial(case.call, version=list(case.op.versions)[version])
        ours = run(call, case, inputs, [d.to(inputs[0].device) for d in douts])[1]
        three = zip(ours, torchs[len(douts) :], right[len(douts) :], strict=True)
        sums = sums + torch.tensor(
            [
                [(y.cpu().double() * t).sum(), (p.double() * t).sum(), t.square().sum(), t.pow(4).sum()]
                for y, p, t in three
            ]
        )
        numbers = sums[:, 2].square() / sums[:, 3]
        if numbers.min() >= enough:
            break
    factors = (sums[:, :2] / sums[:, 2:3])[numbers >= enough]
    assert simulated or len(factors) == len(sums)
    assert ((factors[:, 0] - 1).abs() <= (factors[:, 1] - 1).abs() + 2e-4).all(), (
        f"the factors of cukern and of torch are {factors}"
    )
