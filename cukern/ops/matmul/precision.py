"""The precision of float32 products, by torch's switches or by name, and autocast."""

from typing import Any

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.autocast import enabled

PRECISIONS = "ieee", "tf32", "3xtf32"


def checked(precision: Any) -> str:
    """The argument `precision` as a str; "" for None."""
    return "" if precision is None else checks.choice("precision", precision, PRECISIONS)


_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: None)  # of torch 2.9 or newer


def tf32_allowed() -> bool:
    """True if torch's switches allow TF32 in matrix products."""
    precision = _fp32_precision("cuda", "matmul")  # 1.5 us less than torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32" if precision else torch.backends.cuda.matmul.allow_tf32


def cast(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """The tensors as autocast wants the inputs of a product: all but float64 in its dtype."""
    first = tensors[0]
    if first is None or not enabled(first) or first.dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]
