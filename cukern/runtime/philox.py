"""The random numbers of kernels_cu/common/philox.cuh, in torch's operations."""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor | int, ...], seed: Tensor | int, rounds: int = 10) -> tuple[Tensor, ...]:
    """The four words, int64, of each counter: four words that broadcast. Philox4x32 (Salmon et al.,
    2011)."""
    a, b, c, d = counter  # tensors after two rounds, if one is
    for j in range(rounds):
        key0, key1 = seed + j * 0x9E3779B9 & WORD, (seed >> 32) + j * 0xBB67AE85 & WORD
        first, other = a * 0xD2511F53, c * 0xCD9E8D57  # modulo 2^64
        a, b = (other >> 32 & WORD) ^ b ^ key0, other & WORD
        c, d = (first >> 32 & WORD) ^ d ^ key1, first & WORD
    return torch.broadcast_tensors(a, b, c, d)
