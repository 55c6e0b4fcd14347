"""The ladder of kron_linear: the table of versions that the tools and the public function use."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cukern.ops.kron_linear import backward, forward, v3
from cukern.ops.kron_linear.reference import PRODUCTS, Epilogue, with_epilogue
from cukern.runtime.kernel import Kernel
from cukern.runtime.registry import Version


def _v4_instances(dtype: torch.dtype) -> list[Kernel]:
    return [*forward.instances(dtype), *backward.instances(dtype), *v3.instances(dtype)]


def _in_torch(version: str) -> Callable[[Tensor, Sequence[Tensor], Epilogue], Tensor]:
    def forward(x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue) -> Tensor:
        return with_epilogue(PRODUCTS[version](x, factors), epilogue)

    return forward


# v1 and v2 are torch, and torch differentiates them.
VERSIONS = {
    "v1": Version("x @ w and movedim, in torch", _in_torch("v1")),
    "v2": Version("w^T @ x^T and reshape, in torch", _in_torch("v2")),
    "v3": Version("one GEMM a factor, read and written in place", v3.forward, v3.backward, v3.instances),
    "v4": Version(
        "a group of factors a launch, in shared memory, compiled for their sizes",
        forward.forward,
        backward.backward,
        _v4_instances,
        requires=80,
    ),
}
