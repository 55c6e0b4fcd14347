"""Arrays of other libraries come in, and go out, without a copy."""

import numpy
import pytest
import torch
from helpers import gpu, run_python

import cukern
from cukern.runtime.interop import to_torch


def test_tensors_pass_as_they_are():
    x = torch.randn(3, requires_grad=True)
    assert to_torch("x", x) is x


def test_numpy_shares_its_memory_both_ways():
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3).T
    tensor = to_torch("x", array)
    assert tensor.data_ptr() == array.ctypes.data and tensor.shape == (3, 2) and tensor.stride() == (1, 3)
    array[0, 0] = 7
    assert tensor[0, 0] == 7
    y = cukern.square(tensor)
    assert numpy.from_dlpack(y).ctypes.data == y.data_ptr()


@pytest.mark.parametrize(
    "array",
    [numpy.array(["a"]), numpy.arange(3, dtype=">f4"), numpy.ones(3, dtype=numpy.longdouble)],
    ids=["text", "byte order", "long double"],
)
def test_arrays_that_dlpack_cannot_carry_are_refused_by_name(array):
    with pytest.raises((TypeError, ValueError), match="x "):
        to_torch("x", array)


def test_negative_strides_are_refused_and_do_not_end_the_process():
    """torch.from_dlpack aborts on them."""
    code = """
import numpy, cukern
try:
    print(cukern.square(numpy.arange(4, dtype=numpy.float32)[::-1]).tolist())
except (TypeError, ValueError) as error:
    print("refused:", error)
"""
    out = run_python(code).stdout
    assert out.startswith(("refused: x ", "[9.0, 4.0, 1.0, 0.0]"))


@pytest.mark.parametrize("value", [None, 1.0, [1.0], "x", object()], ids=lambda v: type(v).__name__)
def test_what_is_no_array_is_refused(value):
    with pytest.raises(TypeError, match=f"^y must be a torch.Tensor or an array with __dlpack__, got {type(value).__name__}$"):
        to_torch("y", value)


@gpu
def test_cupy_shares_its_memory_both_ways():
    cupy = pytest.importorskip("cupy")
    array = cupy.asarray(numpy.random.default_rng(0).standard_normal((4, 6)).astype("float32"))
    for view in (array, array.T, array[1:, ::2], array[:0]):
        tensor = to_torch("x", view)
        assert tensor.is_cuda and tuple(tensor.shape) == view.shape
        assert tensor.numel() == 0 or tensor.data_ptr() == view.data.ptr
        assert [s * 4 for s in tensor.stride()] == list(view.strides) or not tensor.numel()
        y = cukern.square(view)
        assert torch.equal(y, torch.square(tensor))
        back = cupy.from_dlpack(y)
        assert back.shape == view.shape and (y.numel() == 0 or back.data.ptr == y.data_ptr())


@gpu
def test_an_array_written_on_cupys_stream_is_seen_whole():
    """The import waits for the producer's stream; later work on torch's stream sees what CuPy wrote."""
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    host = numpy.full(1 << 24, 3, dtype=numpy.float32)
    with stream:
        array = cupy.empty(1 << 24, dtype="float32")
        array.set(host, stream=stream)
        y = cukern.square(array)
    torch.cuda.synchronize()
    assert (y == 9).all()
