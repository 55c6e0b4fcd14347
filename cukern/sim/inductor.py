"""torch.compile in a block of `cukern.sim.triton`: Inductor generates Triton kernels for CPU tensors.

Inductor has a Triton backend for CPUs, for which it needs a backend of Triton named "cpu". The one here
compiles with Triton's CUDA backend for the target of the block."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

_SETTINGS = {
    "cpu_backend": "triton",
    "compile_threads": 1,  # worker processes do not have the driver of the block
    "fx_graph_cache": False,  # the caches on disk do not distinguish its targets
    "autotune_local_cache": False,
}
# functions of torch.utils._triton that remember what they found out about Triton's driver
_CACHED = "has_triton", "triton_backend", "triton_hash_with_backend"


@contextlib.contextmanager
def block(triton: Any, driver: Any, created: TorchDispatchMode) -> Iterator[None]:
    """Let torch.compile make kernels for `driver`. `created`: the mode of the block, for which torch.compile
    would otherwise leave all functions uncompiled."""
    import torch._dynamo
    import torch._inductor.config
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.utils import clear_caches
    from torch.utils import _triton

    def forget() -> None:
        """Functions that were compiled for another target are compiled again."""
        torch._dynamo.reset()
        clear_caches()
        for name in _CACHED:
            getattr(_triton, name).cache_clear()

    forget()
    created.ignore_compile_internals = lambda: True  # type: ignore[method-assign]
    backend = triton.backends.Backend(_compiler(triton, driver), type(driver))
    measure = driver.get_benchmarker()
    with contextlib.ExitStack() as patches:
        patches.callback(forget)
        patches.enter_context(mock.patch.dict(triton.backends.backends, cpu=backend))
        patches.enter_context(torch._inductor.config.patch(_SETTINGS))
        patches.enter_context(mock.patch.object(benchmarker, "benchmark", lambda fn, **_: measure(fn)[0]))
        yield


def _compiler(triton: Any, driver: Any) -> Any:
    cuda: Any = triton.backends.backends["nvidia"].compiler

    class Compiler(cuda):
        @staticmethod
        def supports_target(target: Any) -> bool:
            return bool(target.backend == "cpu")

        def __init__(self, target: Any) -> None:
            own = driver.get_current_target()
            super().__init__(type(own)("cpu", own.arch, own.warp_size))

    return Compiler
