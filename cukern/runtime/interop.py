"""DLPack in: any array that speaks DLPack becomes a torch tensor of the same memory. (Out needs nothing: torch tensors speak it too.)"""

from typing import Any

import torch


def to_torch(name: str, value: Any) -> torch.Tensor:
    """`value` as a tensor, with no copy. Raises TypeError for what is neither a tensor nor a DLPack producer."""
    if isinstance(value, torch.Tensor):
        return value
    if hasattr(value, "__dlpack__"):
        return torch.from_dlpack(value)
    raise TypeError(f"{name} must be a torch.Tensor or an array with __dlpack__, got {type(value).__name__}")
