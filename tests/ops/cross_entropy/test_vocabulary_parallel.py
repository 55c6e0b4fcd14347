"""linear_cross_entropy(group=...): the weight's rows on two CPU processes (gloo), against float64 with all of
them."""

import itertools

import pytest
import torch
from helpers import run_two

import cukern

ROWS, COLUMNS, CLASSES = 19, 12, 26
OPTIONS = [
    {"reduction": "mean", "ignore_index": 3},
    {"reduction": "sum", "label_smoothing": 0.2, "chunk_rows": 5},
    {"reduction": "none", "z_loss": 1e-2, "softcap": 2.0, "ignore_index": 3, "chunk_rows": 8},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 1.5, "vocab_size": 20, "bias": True},
    {"vocab_size": 13, "label_smoothing": 0.1, "softcap": 1.0},  # the second rank has only padding
    {"class_weights": True, "token_weights": True, "bias": True, "ignore_index": 3},
]


def drawn(options, dtype):
    """The inputs, the same on all ranks, with all classes. 3 is a target that occurs."""
    torch.manual_seed(0)
    vocab = options.get("vocab_size", CLASSES)
    x, weight = torch.randn(ROWS, COLUMNS, dtype=dtype), torch.randn(CLASSES, COLUMNS, dtype=dtype)
    targets = torch.randint(vocab, (ROWS,)).index_fill_(0, torch.tensor([2, 7]), 3)
    sizes = {"bias": CLASSES, "class_weights": CLASSES, "token_weights": ROWS}
    return x, weight, targets, {n: torch.rand(k, dtype=dtype) for n, k in sizes.items() if n in options}


def exact(x, weight, targets, more, options):
    """In float64, row by row, by the definition."""
    given = {"ignore_index": -100, "z_loss": 0.0, "label_smoothing": 0.0, "reduction": "mean"} | options
    z = x @ weight.T + more.get("bias", 0)
    z = z[:, : options.get("vocab_size", CLASSES)]
    z = options["softcap"] * torch.tanh(z / options["softcap"]) if "softcap" in options else z
    lse, smoothing = z.logsumexp(1), given["label_smoothing"]
    rows = lse - (1 - smoothing) * z[range(ROWS), targets] - smoothing * z.mean(1) + given["z_loss"] * lse**2
    valid = (targets != given["ignore_index"]).double()
    factors = valid * more.get("token_weights", 1)
    factors = factors * (more["class_weights"][targets] if "class_weights" in more else 1)
    rows = rows * factors
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / factors.sum()}[given["reduction"]]


def check(rank, group, options, dtype):
    """The loss, and the gradients by the rank's rows and by what all ranks have."""
    x, weight, targets, more = drawn(options, dtype)
    whole = {"x": x, "weight": weight, **more}
    whole = {name: t.double().requires_grad_() for name, t in whole.items()}
    given = {name: value for name, value in options.items() if value is not True}
    others = {name: whole[name] for name in more}
    right = exact(whole["x"], whole["weight"], targets, others, given)
    upstream = torch.randn(right.shape, dtype=torch.float64)
    wanted = dict(zip(whole, torch.autograd.grad(right, list(whole.values()), upstream), strict=True))
    own = slice(rank * CLASSES // 2, (rank + 1) * CLASSES // 2)
    split = {"weight", "bias"}
    leaves = {n: (t[own] if n in split else t).detach().to(dtype).requires_grad_() for n, t in whole.items()}
    loss = cukern.linear_cross_entropy(targets=targets, group=group, **leaves, **given)
    found = torch.autograd.grad(loss, list(leaves.values()), upstream.to(loss.dtype))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for name, ours in {"loss": loss, **dict(zip(leaves, found, strict=True))}.items():
        theirs = right if name == "loss" else wanted[name]
        part = theirs[own] if name in split else theirs
        error = (ours.double() - part).abs().max() / theirs.abs().max()
        assert error < bound, f"{options} {dtype} {name}: {error:.1e}"


def main(rank, store):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = distributed.group.WORLD
    for options, dtype in itertools.product(OPTIONS, (torch.float64, torch.float32, torch.bfloat16)):
        check(rank, group, options, dtype)
    with cukern.backend("sim"):
        check(rank, group, OPTIONS[0], torch.float32)
    x, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="weight must have as many rows on each rank, got 5 to 6"):
        cukern.linear_cross_entropy(x, torch.randn(5 + rank, 4), targets, group=group)
    weight = torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"targets must be in 0\.\.9"):
        cukern.linear_cross_entropy(x, weight, targets + 8, group=group)
    with pytest.raises(ValueError, match="version must be None with group="):
        cukern.linear_cross_entropy(x, weight, targets, group=group, version="v1")
    with pytest.raises(NotImplementedError, match=r"no rule for torch\.compile"):
        torch.func.grad(lambda x: cukern.linear_cross_entropy(x, weight, targets, group=group))(x)
    leaf = x.requires_grad_()
    cukern.linear_cross_entropy(leaf[:0], weight, targets[:0], group=group, reduction="sum").backward()
    assert leaf.grad.abs().sum() == 0
    distributed.destroy_process_group()


def test_two_ranks_against_float64(tmp_path):
    run_two(__file__, tmp_path, timeout=120)


def test_what_is_no_group():
    with pytest.raises(TypeError, match=r"group must be a torch\.distributed\.ProcessGroup or None, got"):
        cukern.linear_cross_entropy(torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2]), group="tp")
