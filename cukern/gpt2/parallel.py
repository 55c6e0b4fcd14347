"""More than one process. torchrun starts them; torch's DistributedDataParallel averages their gradients, or with llm.c's -z 1 FSDP2, which
gives each process a part of each parameter and of the optimizer's state. If a process dies, torchrun ends the others and names it."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed

from cukern.gpt2.files import expect


@contextlib.contextmanager
def processes(device: str) -> Iterator[tuple[int, int]]:
    """Inside the block, this process's rank and the number of processes that torchrun has started; 0 and 1 without torchrun."""
    count = int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        yield 0, 1
        return
    if device == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        expect(local < gpus, f"at most one process for each of the {gpus} GPUs", f"local rank {local}")
        torch.cuda.set_device(local)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(minutes=5))
    yield distributed.get_rank(), count
    distributed.destroy_process_group()  # not after an error: it could wait for processes that have ended


def _is_one_of_many() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def wrap(model: Any, zero: int) -> Any:
    """A module that computes as `model`, and whose backward averages the gradients over the processes. With `zero`, the parameters of the
    model are DTensors from then on, sharded along their first dimension, except during a forward and its backward."""
    if not _is_one_of_many():
        return model
    if not zero:
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    count = distributed.get_world_size()
    model.config.shapes_of(count)  # refuses sizes that the processes cannot divide
    return fully_shard(model, mesh=init_device_mesh(model.wte.device.type, (count,)), reshard_after_forward=False)


def averaged(network: Any, now: bool) -> contextlib.AbstractContextManager:
    """Inside the block, a backward averages the gradients if `now`; otherwise it adds to those of this process."""
    if hasattr(network, "set_requires_gradient_sync"):  # FSDP2
        network.set_requires_gradient_sync(now)
    return network.no_sync() if hasattr(network, "no_sync") and not now else contextlib.nullcontext()


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
    """This process's part of a DTensor; another tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def full(x: Any) -> Tensor:
    """All of a DTensor, in each process; another tensor as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(p: Any, part: Tensor) -> Tensor:
    """`part` in the shape of p. If p is a DTensor, so is the result, and `part` is its shard of this process."""
    part = part.view(local(p).shape)
    if not hasattr(p, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part.to(p.device), p.device_mesh, p.placements)
