"""Arrays of other libraries come in, and go out, without a copy."""

import datetime

import numpy
import pytest
import torch
from helpers import gpu

import cukern
from cukern.runtime.launch.interop import to_torch


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


class Producer:
    """An array of another library: it exports NumPy's DLPack capsule, changed by `changes`."""

    def __init__(self, array, **changes):
        self.array, self.changes = array, changes

    def __dlpack_device__(self):
        return self.changes.get("device", (1, 0))

    def __dlpack__(self, **options):
        if "error" in self.changes:
            raise self.changes["error"]
        return self.changes["capsule"] if "capsule" in self.changes else self.array.__dlpack__(**options)


USED = numpy.ones(3).__dlpack__()
torch.from_dlpack(USED)
MISBEHAVING = [
    *({"error": error} for error in (KeyError("no"), AssertionError())),
    # USED: somebody took it already
    *({"capsule": capsule} for capsule in (5, None, USED, datetime.datetime_CAPI)),
    *({"device": device} for device in (None, ())),
]


# objects that are not arrays, arrays that DLPack cannot carry, and producers that break its rules
NO_TENSORS = [
    *(
        (v, TypeError, f"^x must be a torch.Tensor or an array with __dlpack__, got {type(v).__name__}$")
        for v in (None, 1.0, [1.0], "x")
    ),
    (object(), TypeError, "^x must be a torch.Tensor or an array with __dlpack__, got object$"),
    *(
        (a, (TypeError, ValueError), "x ")
        for a in (numpy.array(["a"]), numpy.arange(3, dtype=">f4"), numpy.ones(3, numpy.longdouble))
    ),
    *(
        (Producer(numpy.ones(3, "f4"), **changes), TypeError, r"^x \(Producer\) cannot become a tensor")
        for changes in MISBEHAVING
    ),
]


@pytest.mark.parametrize("value, error, says", NO_TENSORS)
def test_what_cannot_become_a_tensor_is_refused_by_name(value, error, says):
    with pytest.raises(error, match=says):
        to_torch("x", value)


def test_negative_strides_do_not_end_the_process():
    """torch.from_dlpack aborts on them."""
    try:
        assert cukern.square(numpy.arange(4, dtype=numpy.float32)[::-1]).tolist() == [9.0, 4.0, 1.0, 0.0]
    except (TypeError, ValueError) as error:
        assert str(error).startswith("x ")
    with pytest.raises(ValueError, match=r"x has strides \(-1,\): torch tensors cannot have negative ones"):
        to_torch("x", Producer(numpy.arange(4, dtype=numpy.float32)[::-1]))
    array = Producer(numpy.ones(3, dtype=numpy.float32))
    array.strides = "weird"  # an attribute of this name must not be used
    assert to_torch("x", array).shape == (3,)


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_read_and_not_written(tmp_path):
    cos = sin = torch.ones(2, 2)
    written = numpy.memmap(tmp_path / "x", dtype=numpy.float32, mode="w+", shape=(1, 2, 1, 4))
    written[:] = 1
    written.flush()
    mapped = numpy.memmap(tmp_path / "x", dtype=numpy.float32, mode="r", shape=(1, 2, 1, 4))
    array = numpy.ones((1, 2, 1, 4), dtype=numpy.float32)
    array.flags.writeable = False
    for x in (mapped, array, array[..., ::1]):
        assert to_torch("x", x).data_ptr() == x.ctypes.data, "no copy"
        assert torch.equal(cukern.square(x), torch.ones(1, 2, 1, 4))
        for name, options in {"x": {"x": x}, "k": {"x": torch.ones(1, 2, 1, 4), "k": x}}.items():
            with pytest.raises(
                ValueError, match=rf"{name} \({type(x).__name__}\) is read-only, and is written in place"
            ):
                cukern.rope_(**options, cos=cos, sin=sin)
        assert (x == 1).all() and not x.flags.writeable
    # TypeError: torch before DLPack 1.0
    with pytest.raises((TypeError, ValueError), match=r"x \(Producer\) .*read-?only"):
        cukern.rope_(Producer(array), cos, sin)


@gpu
def test_cupy_shares_its_memory_both_ways():
    cupy = pytest.importorskip("cupy")
    arrays = [
        cupy.asarray(numpy.random.default_rng(0).standard_normal((4, 6)).astype(f"float{bits}"))
        for bits in (32, 16, 64)
    ]
    for view in (*arrays, arrays[0].T, arrays[0][1:, ::2], arrays[0][:0]):
        tensor = to_torch("x", view)
        assert tensor.is_cuda and tuple(tensor.shape) == view.shape
        assert tensor.numel() == 0 or tensor.data_ptr() == view.data.ptr
        assert [s * view.itemsize for s in tensor.stride()] == list(view.strides) or not tensor.numel()
        y = cukern.square(view)
        assert torch.equal(y, torch.square(tensor))
        back = cupy.from_dlpack(y)
        assert (
            back.shape == view.shape
            and back.dtype == view.dtype
            and (y.numel() == 0 or back.data.ptr == y.data_ptr())
        )


@gpu
def test_an_array_written_on_cupys_stream_is_complete():
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
