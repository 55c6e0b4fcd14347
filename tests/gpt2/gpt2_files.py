"""llm.c's files written with struct from the specification, not by cukern.gpt2; small tensors to fill them;
full disks and kills."""

import builtins
import os
import struct

import torch

from cukern.gpt2 import files
from cukern.gpt2.checkpoint import Config

CONFIG = Config(max_seq_len=8, vocab_size=130, num_layers=2, num_heads=2, channels=4)
T, V, L, C, VP = 8, 130, 2, 4, 256
SHAPES = (  # section 2.1, in order
    ("wte", (VP, C)),
    ("wpe", (T, C)),
    ("ln1w", (L, C)),
    ("ln1b", (L, C)),
    ("qkvw", (L, 3 * C, C)),
    ("qkvb", (L, 3 * C)),
    ("attprojw", (L, C, C)),
    ("attprojb", (L, C)),
    ("ln2w", (L, C)),
    ("ln2b", (L, C)),
    ("fcw", (L, 4 * C, C)),
    ("fcb", (L, 4 * C)),
    ("fcprojw", (L, C, 4 * C)),
    ("fcprojb", (L, C)),
    ("lnfw", (C,)),
    ("lnfb", (C,)),
)


def tensors(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES}
    made["wte"][V:] = 0
    return made


def header(*slots):
    return struct.pack(f"<{len(slots)}i", *slots).ljust(1024, b"\0")


def raw(tensor):
    """The bytes of a tensor, number by number; bfloat16 is the upper half of float32."""
    if tensor.dtype == torch.bfloat16:
        return b"".join(struct.pack("<f", x)[2:] for x in tensor.float().flatten().tolist())
    code = {torch.float32: "f", torch.int32: "i", torch.int64: "i"}[tensor.dtype]
    return struct.pack(f"<{tensor.numel()}{code}", *tensor.flatten().tolist())


def raws(parameters):
    return b"".join(raw(parameters[name]) for name, _ in SHAPES)


def full_disk(monkeypatch, room):
    """Every file opened for writing fails with ENOSPC after `room` bytes, as on a full disk: what fits has
    been written."""

    class File:
        def __init__(self, file):
            self.file, self.left = file, room

        def write(self, data):
            data = bytes(data)
            self.file.write(data[: self.left])
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

    def opened(path, mode):
        return File(builtins.open(path, mode))

    monkeypatch.setattr(files, "open", opened, raising=False)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def kill_before_rename(monkeypatch):
    def stop(*_):
        raise Killed

    monkeypatch.setattr(os, "replace", stop)
    monkeypatch.setattr(os, "remove", stop)  # a killed process does not clean up
