"""Arrays and tensors as arguments: imports any DLPack array as a torch tensor on the same memory, and checks
tensors for kernels."""

import ctypes
import struct
import sys
from collections.abc import Collection
from typing import Any

import torch

from cukern.runtime import checks
from cukern.runtime.compile.signature import Param
from cukern.runtime.launch import backend

# DLTensor of dlpack.h: data, device, ndim, dtype, shape, strides, byte_offset
_DLTENSOR = struct.Struct("@P2ii4BPPQ")
# what precedes it in DLManagedTensorVersioned: version, manager_ctx, deleter, flags
_VERSIONED = struct.Struct("@2IPPQ")
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Refused(Exception):
    """Raised inside torch.from_dlpack; becomes a ValueError. Other errors become a TypeError."""


class _Producer:
    """Wraps an array for torch.from_dlpack, and checks the capsule first."""

    def __init__(self, name: str, array: Any, written: bool):
        self.name, self.array, self.written = name, array, written

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.array.__dlpack__(**options)
        try:
            address = _pointer_of(capsule, b"dltensor_versioned")
        except ValueError:  # DLPack before 1.0, or not a capsule of DLPack, which raises again
            address = _pointer_of(capsule, b"dltensor")
        else:
            *_, flags = _VERSIONED.unpack(ctypes.string_at(address, _VERSIONED.size))
            address += _VERSIONED.size
            if self.written and flags & _READ_ONLY:
                raise _read_only(self.name, self.array)
        _, _, _, ndim, *_, strides_at, _ = _DLTENSOR.unpack(ctypes.string_at(address, _DLTENSOR.size))
        # none: contiguous
        strides = tuple((ctypes.c_int64 * ndim).from_address(strides_at)) if strides_at else ()
        if any(stride < 0 for stride in strides):  # torch would abort the process
            raise _Refused(
                f"{self.name} has strides {strides}: torch tensors cannot have negative ones, pass a copy"
            )
        return capsule


class _Writable:
    """Presents a read-only NumPy array as writable, because DLPack before 1.0 cannot export read-only
    arrays."""

    def __init__(self, array: Any):
        self.array, interface = array, array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def to_torch(name: str, value: Any, written: bool = False) -> torch.Tensor:
    """`value` as a tensor, without a copy. Raises TypeError if it is neither a tensor nor a DLPack array that
    torch can import, and ValueError for negative strides and, if the tensor will be `written`, for a
    read-only array."""
    if isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "__dlpack__"):
        if hasattr(value, "__cuda_array_interface__"):
            return _of_interface(name, value)
        raise TypeError(
            f"{name} must be a torch.Tensor or an array with __dlpack__, got {type(value).__name__}"
        )
    numpy = sys.modules.get("numpy")
    array = value
    if numpy is not None and isinstance(value, numpy.ndarray) and not value.flags.writeable:
        if written:
            raise ValueError(*_read_only(name, value).args)
        array = numpy.asarray(_Writable(value))
    try:
        return torch.from_dlpack(_Producer(name, array, written))
    except _Refused as error:
        raise ValueError(*error.args) from None
    except Exception as error:
        raise TypeError(f"{name} ({type(value).__name__}) cannot become a tensor: {error}") from error


def floats(name: str, value: Any) -> torch.Tensor:
    """`value` as a tensor of one of checks.FLOATS. Raises TypeError and ValueError."""
    t = value if isinstance(value, torch.Tensor) else to_torch(name, value)
    checks.dtype(name, t, checks.FLOATS)
    return t


def like(name: str, value: Any, first: str, x: torch.Tensor) -> torch.Tensor:
    """`value` as a tensor of the shape, dtype and device of x, whose name is `first`. Raises TypeError and
    ValueError."""
    t = floats(name, value)
    checks.same(**{first: x, name: t})
    checks.shape(name, t, tuple(x.shape), f"the shape of {first}")
    return t


def indices(name: str, value: Any, first: str, x: torch.Tensor) -> torch.Tensor:
    """`value` as a tensor of int32 or int64 on the device of x, whose name is `first`. Raises TypeError and
    ValueError."""
    t = value if isinstance(value, torch.Tensor) else to_torch(name, value)
    checks.dtype(name, t, (torch.int32, torch.int64))
    if t.device != x.device:
        checks.one_device(**{first: x, name: t})
    return t


def of_columns(
    name: str, value: Any, x: torch.Tensor, dtypes: Collection[torch.dtype]
) -> torch.Tensor | None:
    """`value` as a tensor with one value for each column of x, of one of the dtypes; None stays None. Raises
    TypeError and ValueError."""
    if value is None:
        return None
    t = to_torch(name, value)
    checks.dtype(name, t, dtypes)
    checks.one_device(**{"x": x, name: t})
    checks.shape(name, t, tuple(x.shape[-1:]), "one value for each column of x")
    return t


def _of_interface(name: str, value: Any) -> torch.Tensor:
    """An array with __cuda_array_interface__, such as Numba's, as a tensor on the same memory. Does not wait
    for its stream."""
    try:
        return torch.as_tensor(value, device="cuda")
    except Exception as error:
        raise TypeError(f"{name} ({type(value).__name__}) cannot become a tensor: {error}") from error


def argument(param: Param, value: Any, kernel: str) -> torch.Tensor:
    """`value` as a tensor that `kernel` can take for a pointer parameter. Raises TypeError and ValueError."""
    tensor = to_torch(param.name, value)
    if not param.const and type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise ValueError(
            f"{kernel}: {param} is written, and JAX arrays are immutable: pass a torch tensor, or declare it "
            f"const"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{kernel}: the argument for {param} must be a strided tensor, it is {tensor.layout}")
    # for example a FakeTensor, whose address is 0
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{kernel}: the argument for {param} must have memory of its own, a {type(tensor).__name__} has "
            f"none"
        )
    if not tensor.is_cuda and not backend.simulates(tensor):
        raise ValueError(
            f"{kernel}: the argument for {param} must be on a GPU, it is on {tensor.device}; "
            f"{checks.SIMULATOR}"
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"{kernel}: the argument for {param} is a lazy negation or conjugation: pass "
            f".resolve_neg().resolve_conj()"
        )
    if param.dtypes and tensor.dtype not in param.dtypes:
        raise TypeError(
            f"{kernel}: the argument for {param} must be {' or '.join(map(str, param.dtypes))}, it is "
            f"{tensor.dtype}"
        )
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        raise TypeError(
            f"{kernel}: the argument for {param} must have memory of its own, one of a torch.func transform "
            f"has none"
        ) from error
    return tensor


def _read_only(name: str, value: Any) -> _Refused:
    return _Refused(f"{name} ({type(value).__name__}) is read-only, and is written in place: pass a copy")
