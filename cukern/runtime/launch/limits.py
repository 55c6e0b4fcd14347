"""Launch limits, for both the GPU and the simulator."""

import math

Dim = tuple[int, int, int]

MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # along each axis of the grid
MOST_THREADS = (1024, 1024, 64)  # along each axis of a block
MOST_BLOCKS_A_CLUSTER = 16  # with CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


class LaunchError(RuntimeError):
    """The driver refused a launch or the kernel failed. The message names the kernel, the launch
    configuration and the exceeded limit."""


def exceeded(
    grid: Dim, block: Dim, shared: int, most_threads: int, most_shared: int, cluster: Dim,
    static_shared: int = 0,
) -> list[str]:  # fmt: skip
    """The limits that a launch exceeds. `shared`, `static_shared`: bytes of dynamic and of static shared
    memory per thread block. `most_threads`: the kernel's limit of threads per block. `most_shared`: the GPU's
    limit of bytes per block. `cluster`: its shape in thread blocks."""
    axes = [f"{what} {axis}" for what in ("grid", "block") for axis in "xyz"]
    sizes = zip(axes, (*grid, *block), (*MOST_BLOCKS, *MOST_THREADS), strict=True)
    found = [f"{axis} = {n} is not in 1..{limit}" for axis, n, limit in sizes if not 1 <= n <= limit]
    for axis, n, k in zip("xyz", grid, cluster, strict=True):
        if n % k:
            found.append(f"grid {axis} = {n} is not a multiple of the cluster size along {axis}, {k}")
    if math.prod(cluster) > MOST_BLOCKS_A_CLUSTER:
        found.append(f"{math.prod(cluster)} blocks per cluster exceed the limit of {MOST_BLOCKS_A_CLUSTER}")
    if math.prod(block) > most_threads:
        found.append(f"{math.prod(block)} threads per block exceed this kernel's limit of {most_threads}")
    if static_shared + shared > most_shared:
        found.append(
            f"{static_shared + shared} bytes of shared memory per block, {shared} of them dynamic, exceed "
            f"the limit of {most_shared}"
        )
    return found


def launch_error(name: str, grid: Dim, block: Dim, shared: int, reasons: list[str]) -> LaunchError:
    return LaunchError(
        f"{name} <<<grid {grid}, block {block}, {shared} bytes shared>>> failed: {'; '.join(reasons)}"
    )
