"""cukern's own matrix product, with a column of weights."""

import cukern


def custom_kernel(data):
    x, w = data
    return cukern.matmul(x, w[:, None]).squeeze(-1)
