"""More than one process. torchrun starts them. After a backward, one all-reduce averages their gradients,
which a CUDA graph may contain. With llm.c's -z 1 it is FSDP2, which gives each process a part of each
parameter and of the optimizer's state. If a process dies, torchrun, or without it watch.py, ends the others
and names it."""

import contextlib
import datetime
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed

from cukern.gpt2.files import expect
from cukern.gpt2.watch import Watch

TIMEOUT = datetime.timedelta(minutes=5)  # of processes that wait for each other


@dataclass(frozen=True)
class Start:
    """What torchrun says in variables. `method`: an init_method of torch.distributed, such as
    tcp://10.0.0.1:12345."""

    method: str
    rank: int
    count: int
    local_rank: int

    def __post_init__(self) -> None:
        expect(0 <= self.rank < self.count, "0 <= rank < processes", f"{self.rank} and {self.count}")


def started(start: Start | None = None) -> tuple[int, int]:
    """This process's rank and the number of processes that torchrun has started; 0 and 1 without torchrun."""
    return (
        (start.rank, start.count)
        if start
        else (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    )


@contextlib.contextmanager
def processes(device: str, start: Start | None = None) -> Iterator[tuple[int, int]]:
    """Inside the block, the processes are connected: `started`. A process that fails there says its rank on
    stderr."""
    rank, count = started(start)
    if count == 1:
        yield 0, 1
        return
    if device == "cuda":
        local, gpus = start.local_rank if start else int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        expect(local < gpus, f"at most one process for each of the {gpus} GPUs", f"local rank {local}")
        torch.cuda.set_device(local)
    where: dict[str, Any] = {}
    watch = None
    if start:
        store, *_ = next(distributed.rendezvous(start.method, rank, count))
        watch = Watch(
            store, urlsplit(start.method).hostname or "localhost", rank, count, TIMEOUT.total_seconds()
        )
        where = {"store": store, "rank": rank, "world_size": count}
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT, **where)
    try:
        yield rank, count
    except Exception as error:
        print(f"rank {rank} of {count} ends: {error}", file=sys.stderr, flush=True)
        raise
    if watch:
        watch.done()
    distributed.destroy_process_group()  # not after an error: it could wait for processes that have ended


def _is_one_of_many() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def wrap(model: Any, zero: int) -> Any:
    """A module that computes as `model`, with the parameters of the first process. With `zero`, the
    parameters of the model are DTensors from then on, sharded along their first dimension, except during a
    forward and its backward, which averages the gradients."""
    if not _is_one_of_many():
        return model
    for p in model.parameters():
        distributed.broadcast(p.detach(), 0)
    if not zero:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(model.wte.device.type, (distributed.get_world_size(),))
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def backward_averages(network: Any, now: bool) -> None:
    """With FSDP2, the next backward averages the gradients if `now`; otherwise it adds to those of this
    process."""
    if hasattr(network, "set_requires_gradient_sync"):
        network.set_requires_gradient_sync(now)


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Over the processes, unless FSDP2 has done so. The gradients are then parts of one array."""
    found = [p for p in parameters if p.grad is not None and not hasattr(p, "to_local")]
    if not found or not _is_one_of_many():
        return
    flat = torch.cat([p.grad.reshape(-1) for p in found])  # type: ignore[union-attr]
    flat.div_(distributed.get_world_size())
    distributed.all_reduce(flat)
    for p, part in zip(found, flat.split([p.numel() for p in found]), strict=True):
        p.grad = part.view(p.shape)


def mean(x: Tensor) -> Tensor:
    """The mean over the processes."""
    if _is_one_of_many():
        x = x / distributed.get_world_size()
        distributed.all_reduce(x)
    return x


def barrier() -> None:
    if _is_one_of_many():
        distributed.barrier()


def local(x: Any) -> Tensor:
    """This process's part of a DTensor, padded with zeros to the size of the first process's part; another
    tensor as it is."""
    if not hasattr(x, "to_local"):
        return x
    part = x.to_local()
    missing = -(-x.shape[0] // x.device_mesh.size()) - len(part)
    return torch.cat([part, part.new_zeros(missing, *x.shape[1:])]) if missing else part


def full(x: Any) -> Tensor:
    """All of a DTensor, in each process; another tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(p: Any, x: Tensor, whole: bool = True) -> Tensor:
    """The numbers x in the shape of p. If p is a DTensor, so is the result; without `whole`, x is what
    `local` gave for it."""
    if not hasattr(p, "to_local"):
        return x.view(p.shape)
    from torch.distributed.tensor import DTensor

    rows, count = -(-p.shape[0] // p.device_mesh.size()), len(p.to_local())
    start = distributed.get_rank() * rows if whole else 0
    part = x.view(-1, *p.shape[1:])[start : start + count].to(p.device)
    return DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
