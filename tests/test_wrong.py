"""The tests have teeth: each kernel in wrong/ has one planted bug, and the same numbers that pass the shipped kernel catch it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import Guarded, assert_accurate, gpu

import cukern
from cukern.runtime.kernel import Kernel
from cukern.runtime.sources import kernels_dir

WRONG = Path(__file__).parent / "wrong"
THREADS = 256  # a block; as the op launches
SIZES = (1, 3, 64, 255, 256, 1000, 1024, 1025)

# file: kernel, what it computes, how many inputs it has, and what the check says of the bug
CASES = {
    "square_tail.cu": ("square_v2<float, 4>", lambda x: x * x, 1, "elements are wrong"),
    "square_bound.cu": ("square_v1<float>", lambda x: x * x, 1, "wrote outside of its output"),
    "square_gradient.cu": ("square_v2_bwd<float, 4>", lambda x, dout: 2 * x * dout, 2, "elements are wrong"),
}

Launch = Callable[..., None]  # out, inputs..., n


def check(launch: Launch, function: Callable[..., torch.Tensor], inputs: int, device: str) -> None:
    """Run a kernel on buffers between margins, its output full of NaN, and compare with float64; each size in turn."""
    for n in SIZES:
        xs = [Guarded((n,), torch.float32, device).tensor.copy_(torch.randn(n)) for _ in range(inputs)]
        out = Guarded((n,), torch.float32, device)
        launch(out.tensor, *xs, n)
        out.check(f"{n} elements")
        assert_accurate(out.tensor, function(*xs), function(*(x.double() for x in xs)), f"{n} elements")


def launcher(kernel: Kernel) -> Launch:
    width = int(re.findall(r"(\d+)>", kernel.name)[0]) if "v2" in kernel.name else 1

    def launch(*args: torch.Tensor | int) -> None:
        kernel(*args, grid=-(-int(args[-1]) // (THREADS * width)), block=THREADS)

    return launch


def test_every_wrong_kernel_has_its_case():
    assert {p.name for p in WRONG.glob("*.cu")} == set(CASES)


@pytest.mark.parametrize("file", CASES)
def test_wrong_kernels_compile(file):
    """What does not compile is caught for another reason than its bug."""
    name, *_ = CASES[file]
    kernel = cukern.load(WRONG / file, name)
    assert kernel.compile("sm_90a").code and kernel.params == cukern.load(kernels_dir() / "square.cu", name).params


@gpu
@pytest.mark.parametrize("file", CASES)
def test_wrong_kernels_are_caught(file):
    name, function, inputs, words = CASES[file]
    with pytest.raises(AssertionError, match=words):
        check(launcher(cukern.load(WRONG / file, name)), function, inputs, "cuda")


@gpu
@pytest.mark.parametrize("file", CASES)
def test_shipped_kernels_pass_the_same_check(file):
    name, function, inputs, _ = CASES[file]
    check(launcher(cukern.load(kernels_dir() / "square.cu", name)), function, inputs, "cuda")


@gpu
def test_fresh_memory_is_poisoned():
    assert torch.empty(1000, device="cuda").isnan().all() and torch.empty_like(torch.ones(9, device="cuda").half()).isnan().all()


# ---- the check itself, on the CPU: the same bugs, planted in torch


def right(out: torch.Tensor, x: torch.Tensor, n: int) -> None:
    out.copy_(x * x)


def no_tail(out: torch.Tensor, x: torch.Tensor, n: int) -> None:
    whole = n // 4 * 4
    out[:whole] = x[:whole] ** 2


def one_too_far(out: torch.Tensor, x: torch.Tensor, n: int) -> None:
    right(out, x, n)
    out.as_strided((1,), (1,), out.storage_offset() + n).fill_(1)


def before_the_start(out: torch.Tensor, x: torch.Tensor, n: int) -> None:
    right(out, x, n)
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(1)


def one_element_off(out: torch.Tensor, x: torch.Tensor, n: int) -> None:
    right(out, x, n)
    out[-1] *= 1 + 4 * torch.finfo(out.dtype).eps


def half_precision(out: torch.Tensor, x: torch.Tensor, n: int) -> None:
    out.copy_((x.half() * x.half()).float())


def test_check_passes_what_is_right():
    check(right, lambda x: x * x, 1, "cpu")


@pytest.mark.parametrize("bug", [no_tail, one_too_far, before_the_start, one_element_off, half_precision], ids=lambda bug: bug.__name__)
def test_check_catches(bug):
    with pytest.raises(AssertionError, match=r"are wrong|wrote outside"):
        check(bug, lambda x: x * x, 1, "cpu")
