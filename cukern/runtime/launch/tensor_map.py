"""Tensor maps: the 128-byte descriptors (CUtensorMap) by which the Tensor Memory Accelerator (TMA) copies
boxes of a tensor (sm_90).

For a tensor on a GPU the driver encodes the map (cuTensorMapEncodeTiled, through ctypes). Its format is not
documented. For a CPU tensor the map has a format of our own, `_LAYOUT`, which the simulator reads. The rules
for arguments are those of the CUDA driver API.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cukern.runtime import checks, recording
from cukern.runtime.compile import bindings

BYTES = 128
SWIZZLES = (0, 32, 64, 128)  # bytes; the index is the driver's code, as for the three tables below
L2_SIZES = (0, 64, 128, 256)
FILLS = ("zeros", "nan")
_CODES = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.bool: 0,
    torch.float8_e4m3fn: 0,
    torch.float8_e5m2: 0,
    torch.uint16: 1,
    torch.int16: 1,
}
_CODES |= {
    torch.uint32: 2,
    torch.int32: 3,
    torch.uint64: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
}
_CODES |= {torch.bfloat16: 9}
TF32 = 11
_FLOATS = (6, 7, 8, 9, TF32)  # the codes that may be filled with NaN
_MAGIC = b"cukernTM"
# Magic, address; rank, bytes of an element, code of the dtype, swizzle, l2, fill; sizes minus 1, strides in
# bytes, box; innermost first
_LAYOUT = struct.Struct("<8sQ6B2x5I4x4Q5H")
MAGIC_NUMBER = int.from_bytes(_MAGIC, "little")
# The fields of this format by their names in PTX's tensormap.replace: offset, and dtype of one of its
# elements
FIELDS: dict[str, tuple[int, np.dtype]] = {
    **{
        name: (at, np.dtype(np.uint64))
        for name, at in (("magic", 0), ("global_address", 8), ("global_stride", 48))
    },
    **{
        name: (at, np.dtype(np.uint8))
        for name, at in (("rank", 16), ("itemsize", 17), ("elemtype", 18), ("swizzle_mode", 19))
    },
    **{
        "fill_mode": (21, np.dtype(np.uint8)),
        "global_dim": (24, np.dtype(np.uint32)),
        "box_dim": (80, np.dtype(np.uint16)),
    },
}


class Box(NamedTuple):
    """The content of a tensor map, innermost dimension first. `strides`: in bytes, of all dimensions but the
    innermost."""

    address: int
    itemsize: int
    code: int  # of the dtype
    swizzle: int  # bytes, 0 for none
    l2: int
    fill: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class TensorMap(ctypes.Structure):
    """A tensor map as an argument for `const __grid_constant__ CUtensorMap`. It does not keep the tensor's
    memory on a GPU alive."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]
    tensor: torch.Tensor  # which the simulator lets the kernel access


def tensor_map(
    tensor: torch.Tensor, box: Sequence[int], swizzle: int = 0, *, l2: int = 128, fill: str = "zeros"
) -> TensorMap:
    """A tensor map: a kernel with this argument copies boxes of `tensor` to and from shared memory with the
    helpers of common/ptx/tma.cuh.

    Args:
        tensor: 1 to 5 dimensions, the last of stride 1, the other strides multiples of 16 bytes, its address
            a multiple of 16.
        box: the shape of a copy, one size of at most 256 for each dimension, in the order of `tensor.shape`.
            In shared memory the box is contiguous, its last dimension fastest. The last size must be a
            multiple of 16 bytes. In a kernel, a copy's coordinate along the last dimension must be a multiple
            of 16 bytes, and no coordinate of a store may be negative (else: "illegal instruction").
        swizzle: 32, 64 or 128 bytes: a swizzle in shared memory against bank conflicts, see tma.cuh. The last
            size of the box must not exceed it. 0: none.
        l2: 0, 64, 128 or 256: the bytes that a miss fetches into the L2 cache.
        fill: what loads give for elements outside of the tensor, "zeros" or, for floats, "nan". Stores leave
            them out.

    Returns a TensorMap, to pass for a parameter `const __grid_constant__ CUtensorMap map`. Equal calls share
    one encoding. Raises TypeError or ValueError for an argument that breaks a rule, RuntimeError if the
    driver refuses. Example:

        kernel(cukern.tensor_map(x, (64, 64), swizzle=128), out, grid=..., block=...)
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {checks.brief(tensor)}")
    if isinstance(box, str) or not isinstance(box, Sequence):
        raise TypeError(f"box must be a sequence of ints, got {checks.brief(box)}")
    sizes = tuple(checks.integer(f"box[{i}]", n, 1, 256) for i, n in enumerate(box))
    swizzle, l2 = checks.integer("swizzle", swizzle), checks.integer("l2", l2)
    checks.choice("fill", fill, FILLS)
    device = tensor.get_device() if tensor.is_cuda else -1
    data = encode(
        device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        sizes,
        swizzle,
        l2,
        fill,
    )
    made = TensorMap.from_buffer_copy(data)
    made.tensor = tensor
    return made


@functools.lru_cache(4096)
def encode(
    device: int, address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    box: tuple[int, ...], swizzle: int = 0, l2: int = 128, fill: str = "zeros", tf32: bool = False,
) -> bytes:  # fmt: skip
    """The 128 bytes of `tensor_map`, from integers, for ops. `device`: number of the GPU, -1 for the
    simulator; `strides`: in elements; `tf32`: loads round float32 to TF32."""
    sizes_and_box = _checked(address, dtype, shape, strides, box, swizzle, l2, fill)
    if tf32:
        sizes_and_box = sizes_and_box._replace(code=TF32)
    return _by_simulator(sizes_and_box) if device < 0 else _by_driver(sizes_and_box)


@functools.lru_cache(4096)
def encoder(device: int, dtype: torch.dtype, *arguments: Any) -> Callable[[int], bytes]:
    """`encode` as a function of the address."""
    encoded = functools.lru_cache(256)(lambda address: encode(device, address, dtype, *arguments))
    return functools.partial(recording.packed, encoded)


def _checked(
    address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], box: Sequence[int],
    swizzle: int, l2: int, fill: str,
) -> Box:  # fmt: skip
    """The arguments in the driver's order. Raises TypeError or ValueError."""
    if dtype not in _CODES:
        raise TypeError(
            f"a tensor map takes {', '.join(str(d).removeprefix('torch.') for d in _CODES)}, got {dtype}"
        )
    rank, size, code = len(shape), dtype.itemsize, _CODES[dtype]
    if not 1 <= rank <= 5:
        raise ValueError(f"a tensor map needs 1 to 5 dimensions, got the shape {tuple(shape)}")
    if len(box) != rank:
        raise ValueError(f"box must have one size for each of the {rank} dimensions, got {tuple(box)}")
    _require(
        all(1 <= n <= 1 << 32 for n in shape),
        "the sizes of a tensor with a tensor map must be in 1..2^32",
        tuple(shape),
    )
    _require(
        address % 16 == 0, "the address of a tensor with a tensor map must be a multiple of 16", hex(address)
    )
    _require(
        strides[-1] == 1 or shape[-1] == 1,
        "the last stride of a tensor with a tensor map must be 1",
        tuple(strides),
    )
    # A dimension of size 1 may have any stride: 16 bytes satisfy the driver.
    steps = [step * size if n > 1 else 16 for n, step in zip(shape[:-1], strides[:-1], strict=True)]
    for step in steps:
        _require(
            step % 16 == 0,
            "the strides of a tensor with a tensor map, except the last, must be multiples of 16 bytes",
            step,
        )
        _require(
            0 < step < 1 << 40, "the strides of a tensor with a tensor map must be in 1..2^40-1 bytes", step
        )
    _require(swizzle in SWIZZLES, f"swizzle must be one of {SWIZZLES}", swizzle)
    _require(l2 in L2_SIZES, f"l2 must be one of {L2_SIZES}", l2)
    inner = box[-1] * size
    _require(inner % 16 == 0, "the last size of box must be a multiple of 16 bytes", inner)
    _require(
        not swizzle or inner <= swizzle,
        f"the last size of box must be at most the swizzle, {swizzle} bytes",
        inner,
    )
    _require(
        fill == "zeros" or code in _FLOATS,
        f'fill="nan" needs a floating-point tensor that is not 8 bits wide, got {dtype}',
        fill,
    )
    return Box(
        address, size, code, swizzle, l2, fill, tuple(shape[::-1]), tuple(steps[::-1]), tuple(box[::-1])
    )


def _require(holds: bool, rule: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{rule}, got {value}")


# ---- the simulator's format


def _by_simulator(b: Box) -> bytes:
    rank = len(b.sizes)
    codes = rank, b.itemsize, b.code, SWIZZLES.index(b.swizzle), L2_SIZES.index(b.l2), FILLS.index(b.fill)
    sizes, steps, box = (
        (*values, *(0,) * (5 - len(values))) for values in (tuple(n - 1 for n in b.sizes), b.strides, b.box)
    )
    return _LAYOUT.pack(_MAGIC, b.address, *codes, *sizes, *steps[:4], *box).ljust(BYTES, b"\0")


def decode(data: bytes) -> Box | None:
    """The content of a tensor map in the simulator's format; None for other bytes."""
    magic, address, rank, itemsize, code, swizzle, l2, fill, *rest = _LAYOUT.unpack_from(data)
    if magic != _MAGIC:
        return None
    sizes = tuple(n + 1 for n in rest[:rank])
    steps = tuple(rest[5 : 4 + rank])
    box = tuple(rest[9 : 9 + rank])
    return Box(address, itemsize, code, SWIZZLES[swizzle], L2_SIZES[l2], FILLS[fill], sizes, steps, box)


# ---- the driver


@functools.cache
def _encoder() -> Any:
    """cuTensorMapEncodeTiled of the CUDA driver."""
    try:
        function = bindings.library().cuTensorMapEncodeTiled
    except AttributeError:
        raise RuntimeError(
            "the CUDA driver has no cuTensorMapEncodeTiled: tensor maps need a driver of CUDA 12 or newer"
        ) from None
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [
        pointer, ctypes.c_int, word, pointer, pointer, pointer, pointer, pointer, *[ctypes.c_int] * 4,
    ]  # fmt: skip
    return function


def _by_driver(b: Box) -> bytes:
    rank = len(b.sizes)
    room = ctypes.create_string_buffer(2 * BYTES)
    start = -ctypes.addressof(room) % BYTES  # the driver writes to a multiple of 64, the newest one of 128
    sizes, steps = (ctypes.c_uint64 * rank)(*b.sizes), (ctypes.c_uint64 * max(1, rank - 1))(*b.strides)
    box, ones = (ctypes.c_uint32 * rank)(*b.box), (ctypes.c_uint32 * rank)(*[1] * rank)
    codes = 0, SWIZZLES.index(b.swizzle), L2_SIZES.index(b.l2), FILLS.index(b.fill)  # 0: no interleave
    status = _encoder()(
        ctypes.addressof(room) + start, b.code, rank, b.address, sizes, steps, box, ones, *codes
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUresult {status} for {b}")
    return room.raw[start : start + BYTES]
