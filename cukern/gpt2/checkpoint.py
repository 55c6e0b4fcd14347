"""GPT-2's weights, optimizer state and debug state in llm.c's files, byte for byte.

Parameters, gradients and moments are dicts from llm.c's names to tensors stacked over the layers, in the
order of PARAMETERS. Matrices are (out, in), as in torch.nn.Linear; qkvw and qkvb hold all rows of q, then k,
then v; the head is wte. Readers check a file before they use it and raise ValueError with the expected and
the found value. Writers replace a file in one step.
"""

import dataclasses
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from cukern.gpt2.data import LoaderState, Mt19937
from cukern.gpt2.files import (
    HEADER_BYTES,
    PathLike,
    check_size,
    expect,
    read,
    read_tensor,
    replace,
    write_header,
    write_tensors,
)
from cukern.gpt2.parallel import barrier

MODEL, DEBUG, STATE = 20240326, 20240327, 20240527  # magic numbers
DTYPES = {3: torch.float32, 5: torch.bfloat16}  # version of a model file -> dtype of all its tensors
Parameters = Mapping[str, Tensor]
# in the order of the files: shape, name at Hugging Face ({} is the layer). V: padded vocabulary, T: positions
PARAMETERS = {
    "wte": ("V C", "wte.weight"),
    "wpe": ("T C", "wpe.weight"),
    "ln1w": ("L C", "h.{}.ln_1.weight"),
    "ln1b": ("L C", "h.{}.ln_1.bias"),
    "qkvw": ("L 3C C", "h.{}.attn.c_attn.weight"),
    "qkvb": ("L 3C", "h.{}.attn.c_attn.bias"),
    "attprojw": ("L C C", "h.{}.attn.c_proj.weight"),
    "attprojb": ("L C", "h.{}.attn.c_proj.bias"),
    "ln2w": ("L C", "h.{}.ln_2.weight"),
    "ln2b": ("L C", "h.{}.ln_2.bias"),
    "fcw": ("L 4C C", "h.{}.mlp.c_fc.weight"),
    "fcb": ("L 4C", "h.{}.mlp.c_fc.bias"),
    "fcprojw": ("L C 4C", "h.{}.mlp.c_proj.weight"),
    "fcprojb": ("L C", "h.{}.mlp.c_proj.bias"),
    "lnfw": ("C", "ln_f.weight"),
    "lnfb": ("C", "ln_f.bias"),
}


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT-2. `padded_vocab_size` is the number of rows of wte; 0 means vocab_size rounded up
    to a multiple of 128."""

    max_seq_len: int = 1024
    vocab_size: int = 50257
    num_layers: int = 12
    num_heads: int = 12
    channels: int = 768
    padded_vocab_size: int = 0

    def __post_init__(self) -> None:
        if self.padded_vocab_size == 0:
            object.__setattr__(self, "padded_vocab_size", -(-self.vocab_size // 128) * 128)
        expect(min(self.sizes) > 0, "sizes of at least 1", self)
        expect(self.channels % self.num_heads == 0, "channels that are a multiple of num_heads", self)
        expect(self.padded_vocab_size >= self.vocab_size, "a padded_vocab_size of at least vocab_size", self)

    sizes = property(astuple)

    def shapes_of(self, processes: int = 1) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter, in the order of the files. With several processes, of one's part:
        llm.c's -z 1 divides each layer's tensors along their first dimension. Where that leaves a rest, which
        llm.c refuses, the last parts are padded with zeros."""
        C, shapes = self.channels, {}
        sizes = {
            "V": self.padded_vocab_size,
            "T": self.max_seq_len,
            "L": self.num_layers,
            "C": C,
            "3C": 3 * C,
            "4C": 4 * C,
        }
        for name, (text, _) in PARAMETERS.items():
            shape, i = [sizes[size] for size in text.split()], int(text.startswith("L"))
            shape[i] = -(-shape[i] // processes)
            shapes[name] = tuple(shape)
        return shapes

    shapes = property(shapes_of)
    # their elements, the padding of wte included
    num_parameters = property(lambda self: sum(map(math.prod, self.shapes.values())))

    def check(self, tensors: Parameters, what: str = "", processes: int = 1) -> None:
        """Raise ValueError unless the tensors have the names and shapes of `shapes_of`."""
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = self.shapes_of(processes)
        for name in {**found, **expected}:
            expect(
                found.get(name) == expected.get(name),
                f"{what}{name} of shape {expected.get(name)}",
                found.get(name),
            )


def checked(
    config: Config, tensors: Parameters, what: str, dtypes: tuple[torch.dtype, ...], parts: int = 1
) -> list[Tensor]:
    """The tensors in the order of the files. They must have one of the dtypes, and the names and shapes of
    `config`, or of one of `parts`; a whole wte must be 0 in the padding. Raises TypeError and ValueError."""
    config.check(tensors, f"{what} ", parts)
    for name, tensor in tensors.items():
        expect(
            tensor.dtype in dtypes,
            f"{what} {name} of {' or '.join(map(str, dtypes))}",
            tensor.dtype,
            error=TypeError,
        )
        dtypes = (tensor.dtype,)
    clean = parts > 1 or not tensors["wte"][config.vocab_size :].count_nonzero()
    expect(clean, f"zeros in wte from row {config.vocab_size} on", "other values")
    return [tensors[name] for name in PARAMETERS]


def _read_parameters(file: BinaryIO, config: Config, dtype: torch.dtype, parts: int = 1) -> dict[str, Tensor]:
    return {name: read_tensor(file, shape, dtype) for name, shape in config.shapes_of(parts).items()}


def write_model(path: PathLike, config: Config, parameters: Parameters) -> None:
    """Write weights: all float32 (version 3) or all bfloat16 (version 5). The rows of wte beyond the
    vocabulary must be 0."""
    tensors = checked(config, parameters, "parameter", tuple(DTYPES.values()))
    with replace(path, HEADER_BYTES + sum(x.nbytes for x in tensors)) as file:
        write_header(
            file,
            MODEL,
            next(version for version in DTYPES if DTYPES[version] == tensors[0].dtype),
            *config.sizes,
        )
        write_tensors(file, *tensors)


def read_model(path: PathLike, expected: Config | None = None) -> tuple[Config, dict[str, Tensor]]:
    """The sizes and the weights, float32 or bfloat16 as in the file. With `expected`, a file of other sizes
    is refused."""
    with read(path, MODEL, tuple(DTYPES), "a model") as (file, header):
        expect(min(header[2:8]) > 0, "sizes of at least 1 in slots 2 to 7", header[2:8])
        config, dtype = Config(*header[2:8]), DTYPES[header[1]]
        expect(expected in (None, config), expected, config)
        check_size(
            file,
            HEADER_BYTES + config.num_parameters * dtype.itemsize,
            f"{config.num_parameters} parameters of {dtype}",
        )
        return config, _read_parameters(file, config, dtype)


@dataclass(frozen=True)
class DebugState:
    """A batch, and what a correct model computes from it."""

    x: Tensor  # (B, T), int64
    y: Tensor  # (B, T), int64
    logits: Tensor  # (B, T, vocab_size), float32
    loss: float  # mean over B * T
    gradients: Parameters  # float32


def write_debug_state(path: PathLike, config: Config, state: DebugState) -> None:
    gradients = checked(config, state.gradients, "gradient", (torch.float32,))
    y, logits = tuple(state.x.shape), (*state.x.shape, config.vocab_size)
    expect(
        state.logits.dtype == torch.float32, "logits of torch.float32", state.logits.dtype, error=TypeError
    )
    shapes = tuple(state.y.shape), tuple(state.logits.shape)
    expect(shapes == (y, logits), f"y and logits of shapes {y} and {logits}", f"{shapes[0]} and {shapes[1]}")
    with replace(path) as file:
        write_header(file, DEBUG, 2, *y)
        write_tensors(
            file,
            state.x.int(),
            state.y.int(),
            state.logits,
            torch.tensor(state.loss, dtype=torch.float32, device="cpu"),
            *gradients,
        )


def read_debug_state(path: PathLike, config: Config) -> DebugState:
    """The file holds B and T; the other sizes are those of `config`."""
    with read(path, DEBUG, (2,), "a debug state") as (file, header):
        B, T = header[2:4]
        expect(B > 0 and T > 0, "B and T of at least 1", f"{B=}, {T=}")
        numbers = 2 * B * T + B * T * config.vocab_size + 1 + config.num_parameters
        check_size(file, HEADER_BYTES + 4 * numbers, f"{B=}, {T=} and {config}")
        x, y = (read_tensor(file, (B, T), torch.int32).long() for _ in range(2))
        logits = read_tensor(file, (B, T, config.vocab_size), torch.float32)
        loss = read_tensor(file, (), torch.float32).item()
        return DebugState(x, y, logits, loss, _read_parameters(file, config, torch.float32))


@dataclass(frozen=True)
class State:
    """What one rank needs to resume, besides the weights. m, v and master (the weights before rounding) are
    float32."""

    step: int  # completed updates
    m: Parameters
    v: Parameters
    loader: LoaderState
    master: Parameters | None = None
    rng_state: int = 0  # of stochastic rounding: now, and at the start of the last update
    rng_state_last_update: int = 0
    rank: int = 0
    num_processes: int = 1
    parts: int = 1  # num_processes with llm.c's -z 1: m, v and master are the part of this rank


# int32 at 0: magic, version, num_processes, rank, has master, shuffles; 40: step. uint64 at 80: the two rng
# states; 120: shard, sample
_STATE_HEADER = struct.Struct("<6i16xi36x2Q24x2Q")


def write_state(path: PathLike, config: Config, state: State) -> None:
    arrays = {"m": state.m, "v": state.v} | ({"master": state.master} if state.master else {})
    loader = state.loader
    tensors = [
        tensor
        for name, array in arrays.items()
        for tensor in checked(config, array, name, (torch.float32,), state.parts)
    ]
    integers = (
        STATE,
        1,
        state.num_processes,
        state.rank,
        len(arrays) == 3,
        loader.shuffle is not None,
        state.step,
    )
    header = _STATE_HEADER.pack(
        *integers, state.rng_state, state.rng_state_last_update, loader.shard, loader.sample
    )
    *orders, rng = loader.shuffle or (b"",)
    with replace(
        path, HEADER_BYTES + sum(x.nbytes for x in tensors) + sum(8 + 4 * len(x) for x in orders) + len(rng)
    ) as file:
        file.write(header.ljust(HEADER_BYTES, b"\0"))
        write_tensors(file, *tensors)
        for order in orders:
            file.write(struct.pack("<Q", len(order)) + order.astype("<i4").tobytes())
        file.write(rng)


def read_state(
    path: PathLike, config: Config, *, rank: int = 0, num_processes: int = 1, parts: int = 1
) -> State:
    """The state of one rank. The file holds neither the sizes of the model nor its parts: another size is
    refused."""
    with read(path, STATE, (1,), "an optimizer state") as (file, header):
        fields = _STATE_HEADER.unpack_from(struct.pack("<256i", *header))
        processes, found, has_master, shuffles, step, rng, last_rng, shard, sample = fields[2:]
        expect(
            (found, processes) == (rank, num_processes),
            f"rank {rank} of {num_processes} processes",
            f"rank {found} of {processes}",
        )
        count = 3 if has_master else 2
        if not shuffles:
            check_size(
                file, HEADER_BYTES + 4 * count * _elements(config, parts), f"{count} arrays of {config}"
            )
        m, v, *master = (_read_parameters(file, config, torch.float32, parts) for _ in range(count))
        loader = LoaderState(shard, sample, _read_shuffle(file) if shuffles else None)
        return State(
            step, m, v, loader, master[0] if master else None, rng, last_rng, rank, num_processes, parts
        )


def _elements(config: Config, parts: int) -> int:
    return sum(map(math.prod, config.shapes_of(parts).values()))


def _processes_of(path: PathLike, config: Config) -> tuple[int, int]:
    """The number of processes that wrote a state, and of the parts into which they divided it: 1, or as many.
    The file's size tells."""
    with read(path, STATE, (1,), "an optimizer state") as (file, header):
        processes, _, has_master, shuffles = header[2:6]
        expect(processes > 0, "at least 1 process", processes)
        size = file.seek(0, 2)
        for parts in (processes, 1):
            end = HEADER_BYTES + 4 * (3 if has_master else 2) * _elements(config, parts)
            for _ in range(2 if shuffles else 0):  # the orders of shards and samples
                file.seek(min(end, size))
                end += 8 + 4 * int.from_bytes(file.read(8), "little")
            if size == end + (Mt19937.STRUCT.itemsize if shuffles else 0):
                return processes, parts
        return processes, 1  # read_state says what is wrong


def read_any_state(
    folder: PathLike, step: int, config: Config, rank: int, num_processes: int, parts: int
) -> State:
    """The state of a rank, written by any number of processes. If they or their parts were others, m, v and
    master are whole (parts = 1). If the number of processes was another, `num_processes` is theirs, and the
    loader's state is that of their first one."""
    written, theirs = _processes_of(paths(folder, step)[1], config)
    own = rank if written == num_processes else 0

    def state_of(one: int) -> State:
        return read_state(paths(folder, step, one)[1], config, rank=one, num_processes=written, parts=theirs)

    if theirs == 1 or (written, theirs) == (num_processes, parts):
        return state_of(own)
    states = [state_of(one) for one in range(written)]
    expect(
        len({state.step for state in states}) == 1,
        "states of one step",
        [state.step for state in states],
        folder,
    )

    def joined(arrays: list[Parameters]) -> dict[str, Tensor]:
        dims = {name: int(PARAMETERS[name][0].startswith("L")) for name in PARAMETERS}
        whole = {name: torch.cat([part[name] for part in arrays], dim) for name, dim in dims.items()}
        return {name: x.narrow(dims[name], 0, config.shapes[name][dims[name]]) for name, x in whole.items()}

    master = joined([state.master for state in states if state.master]) if states[0].master else None
    m, v = joined([state.m for state in states]), joined([state.v for state in states])
    return dataclasses.replace(states[own], m=m, v=v, master=master, parts=1)


def _read_shuffle(file: BinaryIO) -> tuple[np.ndarray, np.ndarray, bytes]:
    """The end of the file of a loader that shuffles, as in LoaderState."""
    orders = []
    for what in ("shards", "samples"):
        length = int(read_tensor(file, (), torch.int64))
        expect(length > 0, f"a number of {what} before byte {file.tell()}", length)
        order = read_tensor(file, (length,), torch.int32).numpy()
        expect(
            sorted(order) == list(range(length)),
            f"a permutation of {length} {what} before byte {file.tell()}",
            "other numbers",
        )
        orders.append(order)
    check_size(
        file, file.tell() + Mt19937.STRUCT.itemsize, f"{len(orders[0])} shards and {len(orders[1])} samples"
    )
    return orders[0], orders[1], Mt19937.from_bytes(file.read()).to_bytes()


def paths(folder: PathLike, step: int, rank: int = 0) -> tuple[Path, Path, Path]:
    """The files of a checkpoint: the weights, the state of a rank, and the empty file that marks the
    checkpoint as complete."""
    return (
        Path(folder, f"model_{step:08}.bin"),
        Path(folder, f"state_{step:08}_{rank:05}.bin"),
        Path(folder, f"DONE_{step:08}"),
    )


def save(folder: PathLike, config: Config, parameters: Parameters, state: State) -> None:
    """Write the checkpoint of a run after `state.step` updates. Until all of it is on disk, an older one is
    the latest. Each process of the run calls this with its own state. The first one writes the weights."""
    model, optimizer, done = paths(folder, state.step, state.rank)
    Path(folder).mkdir(parents=True, exist_ok=True)
    if state.rank == 0:
        done.unlink(missing_ok=True)
    barrier()
    if state.rank == 0:
        write_model(model, config, parameters)
    write_state(optimizer, config, state)
    barrier()
    if state.rank == 0:
        done.touch()


def latest_step(folder: PathLike) -> int | None:
    """The step of the newest complete checkpoint, or None."""
    found = (re.fullmatch(r"DONE_(\d{8,})", path.name) for path in Path(folder).glob("DONE_*"))
    return max((int(match[1]) for match in found if match), default=None)


def prune(folder: PathLike, newest: int, major_every: int = 0) -> None:
    """Delete the checkpoints up to step `newest`, complete or not, except those at multiples of `major_every`
    that are complete. What a kill has left of a deletion goes too."""
    found = (
        re.fullmatch(r"(?:model|state|DONE)_(\d{8,})(?:_\d{5}\.bin|\.bin)?", path.name)
        for path in Path(folder).iterdir()
    )
    for step in sorted({int(match[1]) for match in found if match and 0 < int(match[1]) <= newest}):
        if not (major_every and step % major_every == 0 and paths(folder, step)[2].exists()):
            delete(folder, step)


def delete(folder: PathLike, step: int) -> None:
    """Delete a checkpoint of any number of processes, the mark of completeness first."""
    model, _, done = paths(folder, step)
    for path in (done, *Path(folder).glob(f"state_{step:08}_*.bin"), model):
        path.unlink(missing_ok=True)
