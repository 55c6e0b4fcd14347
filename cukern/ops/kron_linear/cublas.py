"""One factor of kron_linear, the gradient of one, and layers of one or two, by torch's matmul (cuBLAS): for
large factors, and for sizes that v4's kernels have no good tiles for. Autocast does not change a product with
an `out` tensor or with an `out_dtype`.

And v3, whose kernel multiplies by one factor: a GEMM whose rows are fibers, read from and written to their
places. For it an array is (S, A, p, C), contiguous, and a factor (S, p, q) of any strides; see
kernels_cu/kron_linear/kron_linear.cu.
"""

from collections.abc import Iterator, Sequence
from math import ceil

import torch
from torch import Tensor

from cukern.ops.kron_linear.plan import Launch, Problem, Step, steps_of, up
from cukern.ops.kron_linear.reference import PLAIN, Epilogue, Factors, Found, Wanted, seen, width
from cukern.runtime.device import allowed, fmas_cycle
from cukern.runtime.dispatch.autocast import off
from cukern.runtime.launch.kernel import Kernel, Template, planning
from cukern.runtime.tensors import pointers

# Measured on one H200 with 2048 rows, us by cuBLAS and by v4's kernel. bfloat16: right factor (168, 176) 94
# and 114, left factor 87 and 183; left factor (128, 86), whose rows are not aligned, 66 and 217, right factor
# 61 and 50. TF32: (160, 160) 130 and 202, 219 and 238. All tables here are by the size of an element in
# bytes. With 3.0 for 16 bits, 4096 x (8, 128, 128, 8) took 11.8 us; v4's kernels take 8.6.
START_US = {2: 4.0, 4: 3.3, 8: 3.0}
GRADIENT_START_US = 3.0
# the time to transpose a factor for TF32; z has at least K_MAJOR_FROM elements
K_MAJOR_US = 8.0
K_MAJOR_FROM = 1 << 22
BANDWIDTH = {2: 24 / 31, 4: 24 / 31, 8: 8 / 31}  # of a copy's
# FLOP per us of an SM in TF32, by whether the factor is the rightmost
TF32_WORK_US = {True: 1_050_000.0, False: 1_250_000.0}
UNALIGNED = {2: 0.48, 4: 0.6, 8: 1.0}  # bandwidth / usual bandwidth if rows are not aligned to 16 bytes
# multiply-adds per SM in a gradient: 16 bits, TF32, float
GRADIENT_US = {2: 1_000_000.0, 4: 600_000.0, 8: 170_000.0}
# Strict float by blocks of 64 x 64: part of the FMA units' rate. Within 15 % of the time of most of 19 layers
# on an H200
SGEMM = 0.65
SIDE = 64
OWN_MARGIN = 1.1  # in strict float, a kernel must be this much faster than cuBLAS for factors above LARGE
MARGIN = 1.05  # cuBLAS must be this much faster than a kernel
PARTS = 4  # z and h are transposed in this many parts for a gradient


def us(step: Step, rows: int, target: Problem) -> float:
    """The predicted time of one factor."""
    last = step.right == 1
    size = target.itemsize
    if target.strict:
        return _us_of_sgemm(step, rows, target)
    moved: float = rows * step.left * step.right * (step.p + step.q) * size
    aligned = all(n * size % 16 == 0 for n in (step.p, step.q, *(() if last else (step.right,))))
    if size == 4:
        tiles = _tiled(step.q) if last else up(step.q, 128) * (up(step.right, 128) if step.right > 64 else 64)
        multiplied = 2 * rows * step.left * max(32 if last else 128, step.p) * tiles / TF32_WORK_US[last]
    elif last:
        moved *= max(128, up(step.q, 32)) / step.q
    elif aligned:
        moved *= up(step.q, 64) / step.q * (up(step.right, 64) / step.right)
    slower = 1 if aligned else UNALIGNED[size]
    longest = max(moved / (BANDWIDTH[size] * target.device.sm_bytes_us), multiplied if size == 4 else 0.0)
    transpose = K_MAJOR_US if size == 4 and last and rows * step.left * step.p >= K_MAJOR_FROM else 0.0
    return START_US[size] + transpose + longest / (target.device.sms * slower)


def _us_of_sgemm(step: Step, rows: int, target: Problem) -> float:
    fibers = rows * step.left
    blocks = ceil(fibers / SIDE) if step.right == 1 else fibers * ceil(step.right / 32) / 2
    rate = SGEMM * fmas_cycle(target.device.capability, torch.float32) * target.device.cycles_us
    return START_US[8] + ceil(blocks * ceil(step.q / SIDE) / target.device.sms) * SIDE**2 * step.p / rate


def _tiled(columns: int) -> int:
    """The columns of a product's tiles."""
    return max(128, up(columns, 64))


def launch(run: Sequence[Step], rows: int, target: Problem) -> Launch:
    handicap = 1 / OWN_MARGIN if target.strict else MARGIN
    return Launch("cublas", tuple(run), us(run[0], rows, target), products=1, handicap=handicap)


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """One factor; in strict float32, which has no tensor cores there, only a factor above LARGE."""
    if len(run) == 1 and target.itemsize < 8 and (not target.strict or max(run[0].p, run[0].q) > LARGE):
        yield launch(run, rows, target)


@torch.no_grad()
def mode_product(z: Tensor, w: Tensor, step: Step, epilogue: Epilogue, out: Tensor) -> Tensor:
    """out (rows, numbers) = scale * z (rows, numbers) times w + bias + residual; all but w are contiguous."""
    return out if planning() else _product_of(z.view(-1, step.p, step.right), w, epilogue, out)


def _product_of(z: Tensor, w: Tensor, epilogue: Epilogue, out: Tensor) -> Tensor:
    """out[a] = scale * w^T z[a] + bias + residual for z (A, p, C). A row of `out` has one or more (q, C)."""
    scale, bias, residual = epilogue
    added = [t for t in (residual, bias) if t is not None]
    (_, p, C) = z.shape
    q = w.shape[1]
    beta = int(bool(added))
    if beta:
        out.copy_(added[0]) if len(added) == 1 else torch.add(*added, out=out)
    if not (_dense(w.stride(), q) or _dense(w.stride()[::-1], p)):
        w = w.contiguous()  # one matrix; cuBLAS would have a copy made for each of a batch
    if C == 1:
        torch.addmm(out.view(-1, q), z[..., 0], _k_major(w, z), beta=beta, alpha=scale, out=out.view(-1, q))
    else:
        many = out.view(-1, q, C)
        torch.baddbmm(many, w.mT.expand(len(z), -1, -1), z, beta=beta, alpha=scale, out=many)
    return out


def us_of_gradient(A: int, p: int, q: int, right: int, target: Problem) -> float:
    """About how long the gradient of a factor takes, for z (A, p, right) and h (A, q, right)."""
    size = target.itemsize
    rate = GRADIENT_US[2 if target.itemsize == 2 else 4 if target.tensor else 8]
    aligned = p * size % 16 == q * size % 16 == 0
    moved = A * (p + q) * right * size / (BANDWIDTH[2] * target.device.sm_bytes_us)
    us = max(A * right * p * _tiled(q) / rate, moved) + (2 * moved if right > 1 else 0.0)
    launches = 2 if right == 1 else 3 * PARTS
    slower = 1 if aligned else UNALIGNED[min(size, 4)]
    return launches * GRADIENT_START_US + us / (target.device.sms * slower)


@torch.no_grad()
def contraction(z: Tensor, h: Tensor, scale: float) -> Tensor:
    """The gradient (S, p, q) of a factor, scale times the sum over a and c of z[s, a, k, c] h[s, a, j, c],
    for z (S, A, p, C) and h (S, A, q, C). Where C is not 1 they are transposed first, a part of the a's at a
    time."""
    (S, A, p, C) = z.shape
    q = h.shape[2]
    if planning() or not A * C:
        return z.new_zeros(S, p, q)
    products = _products_of_parts(z, h)
    total = next(products)
    for more in products:
        total += more
    return torch.mul(total, scale, out=z.new_empty(S, p, q))


def _products_of_parts(z: Tensor, h: Tensor) -> Iterator[Tensor]:
    for pair in zip(*(t.chunk(1 if t.shape[3] == 1 else PARTS, 1) for t in (z, h)), strict=True):
        a, b = (t.transpose(2, 3).flatten(1, 2) for t in pair)
        yield _product(a.mT, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b. For 16-bit types the result is float32, because cuBLAS may add partial sums in the type of the
    result. Where plans exclude cuBLAS, the product is float32 too: compute-sanitizer's racecheck stops some
    of cuBLAS's 16-bit kernels."""
    if a.itemsize > 2 or not a.is_cuda or not allowed("cublas"):
        a, b = (t.float() if t.itemsize == 2 else t for t in (a, b))
        return torch.bmm(a, b, out=a.new_empty(*a.shape[:2], b.shape[2]))
    with off(a):
        return torch.bmm(a, b, out_dtype=torch.float32)


def _dense(strides: Sequence[int], columns: int) -> bool:
    """True if rows are contiguous and do not overlap."""
    return strides[1] == 1 and strides[0] >= columns


def _k_major(w: Tensor, z: Tensor) -> Tensor:
    """w, K-major where that pays: Hopper's TF32 GEMM then takes 130 us instead of 176."""
    return w.mT.contiguous().mT if z.dtype == torch.float32 and z.numel() >= K_MAJOR_FROM else w


# ---- a layer of one or two factors by products of one matrix and all rows, as in v2

TRANSPOSE_READS = 7.5  # a transpose of g takes as long as reading it 7.5 times
LARGE = 128  # rows and columns of a factor, at most, for which v4 has kernels of its own in every dtype


def takes_layer(steps: Sequence[Step], target: Problem) -> bool:
    """True if these functions take all steps of a layer: in float32, from the last factor to the first. Next
    to a small factor, kernels of our own are faster: forward and backward of 2048 x (16, 160) in TF32 132 us
    instead of 238, of 2048 x (64, 200) 505 instead of 694."""
    sizes = [n for s in steps for n in (s.p, s.q)]
    large = min(sizes) > LARGE // 2 and max(sizes) > LARGE
    return target.itemsize == 4 and len(steps) <= 2 and large and steps[-1].factor == 0


def takes_forward(steps: Sequence[Step], target: Problem) -> bool:
    """True if layer_forward is faster than two launches of cuBLAS: in TF32, and in 16 bits if the columns of
    the right factor are no multiple of 64. cuBLAS then wastes less with all rows of x as columns: 64 x (136,
    384) takes 16.7 us instead of 17.8."""
    wasteful = target.itemsize == 4 or steps[0].q % 64 > 0
    return target.tensor and wasteful and takes_layer(steps, target._replace(itemsize=4))


def us_of_layer(steps: Sequence[Step], rows: int, target: Problem) -> float:
    """The predicted time of layer_forward and layer_backward."""
    numbers = rows * steps[-1].left * steps[-1].q * steps[-1].right
    total = sum(us(s, rows, target) for s in steps)
    for s in steps:
        fibers = rows * s.left * s.right
        total += us(Step(0, 1, s.q, s.p, 1), fibers, target) + us_of_gradient(fibers, s.p, s.q, 1, target)
    transposed = TRANSPOSE_READS * numbers * target.itemsize / (target.device.sms * target.device.sm_bytes_us)
    # One launch makes the gradient of one factor alone.
    return total + (transposed if len(steps) > 1 else -GRADIENT_START_US)


_TRANSPOSED = Template("kron_linear/kron_linear.cu", "kron_linear_v4_transposed")
SMALL = 16  # rows and columns of a right factor, at most, for which there is a kernel that also transposes


def small_right(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """layer_forward of a small right factor and a large left one, if it has kernels for them."""
    if len(run) != 2 or run[0].factor != 1 or target.itemsize > 4 or target.aligned < 16:
        return
    right, left = run
    if not right.right == left.left == 1:
        return
    if max(right.p, right.q) <= SMALL and right.p % 8 == right.q % 8 == 0 and min(left.p, left.q) > LARGE:
        # 0.75 and 0.85: the kernels' parts of a copy's bandwidth
        moved = rows * target.itemsize * (left.p * (right.p + right.q) / 0.75 + left.q * 2 * right.q / 0.85)
        total = 2 * START_US[2] + moved / (target.device.sms * target.device.sm_bytes_us)
        total += us(Step(0, 1, left.p, left.q, 1), rows * right.q, target)
        total = total / OWN_MARGIN if target.strict else total
        yield Launch("cublas", tuple(run), total, products=1, handicap=MARGIN)


def _transposed(out: Tensor, x: Tensor, p: int, q: int, w: Tensor | None = None) -> Tensor:
    """out (q, fibers) = (x @ w).T for x (fibers, p). Without w: out (fibers, q) = x.T for x (q, fibers)."""
    fibers = x.numel() // p
    launch = _TRANSPOSED[x.dtype, p, q, w is None].on(x.get_device())
    launch((ceil(fibers / 256), 1, 1), (64, 1, 1), 0, *pointers(out, x, w), fibers)
    return out


def _small_right(x: Tensor, left: Tensor, right: Tensor, epilogue: Epilogue, out: Tensor) -> Tensor:
    """layer_forward for a small right factor: transpose and multiply, one product of all rows, transpose."""
    (scale, *added) = epilogue
    (p, q) = right.shape
    rows = x.shape[0]
    if not right.is_contiguous() or right.data_ptr() % 16:
        right = right.clone(memory_format=torch.contiguous_format)
    z = _transposed(x.new_empty(q, rows * left.shape[0]), x, p, q, right)
    y = _scaled_mm(z.view(-1, left.shape[0]), _k_major(left, z), scale)
    _transposed(out, y.view(q, -1), q, q)
    for more in added:
        if more is not None and not planning():
            out += more
    return out


@torch.no_grad()
def layer_forward(
    x: Tensor, factors: Factors, epilogue: Epilogue, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y, and the intermediate x @ W2, stored as (q2, rows, p1) and returned as one row for each row of x. So
    the second product is K-major: in TF32, (256, 320, 160) takes 99 us instead of 111, (64, 320, 512) 91
    instead of 106."""
    left, right = factors[:2]
    out = x.new_empty(x.shape[0], left.shape[1] * right.shape[1]) if out is None else out
    if max(right.shape) <= SMALL:
        return _small_right(x, left, right, epilogue, out), out
    z = _scaled_mm(_k_major(right, x).mT, x.view(-1, right.shape[0]).mT, 1.0)
    if not planning():
        _product_of(z.view(len(z), x.shape[0], -1).permute(1, 2, 0), left, epilogue, out)
    return out, z.view(x.shape[0], -1)


@torch.no_grad()
def layer_backward(
    x: Tensor, g: Tensor, factors: Factors, wanted: Wanted, scale: float, kept: Tensor | None
) -> Found:
    """The gradients of x and of one or two factors, None where not wanted. `kept`: from layer_forward."""
    found: Found = [None] * len(wanted)
    zs = [x]
    h = g.mT
    if len(factors) == 2:
        zs = [layer_forward(x, factors, PLAIN)[1] if kept is None else kept, x]
        h = h.contiguous()
    for n, (z, w) in enumerate(zip(zs, factors, strict=True)):
        z = z.view(-1, w.shape[0])
        h = h.view(w.shape[1], -1)
        if wanted[n + 1]:
            found[n + 1] = _scaled_mm(z.mT, h.mT, scale)
        if not any((wanted[0], *wanted[n + 2 :])):
            return found
        h = _scaled_mm(h.mT, w.mT, scale if n + 1 == len(zs) else 1.0)
    found[0] = h.view(x.shape)
    return found


def _scaled_mm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    return out if planning() else torch.addmm(out, a, b, beta=0, alpha=scale, out=out)


# ---- v3

_V3 = Template("kron_linear/kron_linear.cu", "kron_linear_v3")
_WIDTHS = 8, 64  # columns of a block's tile


def v3_product(z: Tensor, w: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """out[s, a, j, c] = scale * sum over k of z[s, a, k, c] w[s, k, j] + bias + residual: one launch."""
    samples, A, p, C = z.shape
    q = w.shape[2]
    (scale, bias, residual) = epilogue
    out = torch.empty((samples, A, q, C), dtype=z.dtype, device=z.device)
    if out.numel():
        columns = _WIDTHS[q > _WIDTHS[0]]
        grid = samples * -(-A * C // (4096 // columns)) * -(-q // columns)
        launch = _V3[z.dtype, columns].on(z.get_device())
        tensors = pointers(out, z, w, bias, residual)
        features = 1 if bias is None else bias.numel()
        launch((grid, 1, 1), (256, 1, 1), 0, *tensors, A, p, q, C, *w.stride(), scale, features)
    return out


def v3_forward(x: Tensor, factors: Factors, epilogue: Epilogue) -> Tensor:
    """x (rows, prod p) times the factors, one launch each."""
    z = x
    order = steps_of(factors)
    for step in order:
        w = factors[step.factor]
        w = w if w.ndim == 3 else w[None]
        z = v3_product(seen(z, w, step.p, step.right), w, epilogue if step is order[-1] else PLAIN)
    return z.view(x.shape[0], width(factors, -1))


def v3_backward(x: Tensor, g: Tensor, factors: Factors, wanted: Wanted, scale: float) -> Found:
    """With Z_0 = x and Z_i = Z_(i-1) x_i W_i the layer is Z_n. With H_n = g and H_(i-1) = H_i x_i W_i^T, dx
    is H_0, and dW_i is the sum of Z_(i-1) H_i over every index but i. The Z are computed again."""
    order = steps_of(factors)
    ws = [w if w.ndim == 3 else w[None] for w in factors]
    last = max((n for n, s in enumerate(order) if wanted[s.factor + 1]), default=0)  # no Z after it is of use
    zs = [x]
    h = g
    for s in order[:last]:
        zs.append(v3_product(seen(zs[-1], ws[s.factor], s.p, s.right), ws[s.factor]))
    found: Found = [None] * len(wanted)
    for n, s in reversed(list(enumerate(order))):
        w = ws[s.factor]
        h = seen(h, w, s.q, s.right)
        if wanted[s.factor + 1]:
            dw = contraction(seen(zs[n], w, s.p, s.right), h, scale)
            found[s.factor + 1] = dw.reshape(factors[s.factor].shape)
        if not wanted[0] and not any(wanted[earlier.factor + 1] for earlier in order[:n]):
            return found
        h = v3_product(h, w.mT, (1.0 if n else scale, None, None))
    found[0] = h.reshape(x.shape)
    return found


def v3_instances(dtype: torch.dtype) -> list[Kernel]:
    return [_V3[dtype, width] for width in _WIDTHS]
