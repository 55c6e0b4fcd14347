"""DLPack in: any array that speaks DLPack becomes a torch tensor of the same memory. (Out needs nothing: torch tensors speak it too.)"""

from typing import Any

import torch


def to_torch(name: str, value: Any) -> torch.Tensor:
    """`value` as a tensor, with no copy. Raises TypeError for what is neither a tensor nor an array that DLPack can carry to torch."""
    if isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"{name} must be a torch.Tensor or an array with __dlpack__, got {type(value).__name__}")
    if any(stride < 0 for stride in getattr(value, "strides", None) or ()):  # torch.from_dlpack would end the process
        raise ValueError(f"{name} has strides {value.strides}: torch tensors cannot have negative ones, pass a copy")
    try:
        return torch.from_dlpack(value)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name} ({type(value).__name__}) cannot become a tensor: {error}") from error
