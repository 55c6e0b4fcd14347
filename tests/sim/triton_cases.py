"""The kernels of triton_kernels.py on small inputs: each case takes the module, and returns what it computes
and what it should."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from cukern.sim import triton_driver

MARKS = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(
        not triton_driver.tested(), reason=f"Triton {triton.__version__} is not a tested version"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Triton's cache does not distinguish equal kernels of different files, so it would name the file of an
    earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def close(got, want, tolerance):
    scale = tolerance * want.double().abs().max()
    assert (got.double() - want.double()).abs().max() <= scale


def add(k, n=3000, block=1024):
    x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
    k.add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=block)
    return out, x + y


def softmax(k):
    x, out = torch.randn(9, 300), torch.empty(9, 300)
    k.softmax[(4,)](out, x, 300, 9, 300, BLOCK=512)
    return out, x.softmax(1)


def matmul(k, dtype=torch.float16):
    a = torch.randn(70, 100).to(dtype)
    b = torch.randn(50, 100).to(dtype).T
    c = torch.empty(70, 50, dtype=dtype)

    def grid(meta):
        return (triton.cdiv(70, meta["BM"]) * triton.cdiv(50, meta["BN"]),)

    k.matmul[grid](a, b, c, 70, 50, 100, *a.stride(), *b.stride(), *c.stride())
    return c, a.double() @ b.double()


def persistent(k):
    a, b, c = torch.randn(128, 64).half(), torch.randn(64, 96).half(), torch.empty(128, 96, dtype=torch.half)
    k.persistent_matmul[(3,)](a, b, c, 128, 96, 64, BM=64, BN=32, BK=32)
    return c, a.double() @ b.double()


def grouped(k):
    sizes = [(64, 32, 32), (32, 64, 96)]
    a, b, c = ([torch.randn(s[i], s[j]).half() for s in sizes] for i, j in ((0, 2), (2, 1), (0, 1)))
    addresses = (torch.tensor([t.data_ptr() for t in some]) for some in (a, b, c))
    k.grouped_matmul[(2,)](*addresses, torch.tensor(sizes, dtype=torch.int32), 2, BM=32, BN=32, BK=32)
    return torch.cat([x.flatten() for x in c]), torch.cat(
        [(x.double() @ y.double()).flatten() for x, y in zip(a, b, strict=True)]
    )


def dropout(k):
    out = torch.empty(1000)
    k.dropout[(4,)](torch.ones(1000), out, 1000, 0.5, 123, BLOCK=256)
    kept = out != 0
    return torch.stack([out[kept].mean(), kept.float().mean().round(decimals=1)]), torch.tensor([2.0, 0.5])


def layernorm(k):
    x, w, b = torch.randn(10, 200), torch.randn(200), torch.randn(200)
    y, mean, rstd = torch.empty(10, 200), torch.empty(10), torch.empty(10)
    k.layernorm[(10,)](x, y, w, b, mean, rstd, 200, 1e-5, BLOCK=256)
    return torch.cat([y.flatten(), mean]), torch.cat(
        [F.layer_norm(x.double(), (200,), w.double(), b.double()).flatten(), x.double().mean(1)]
    )


def layernorm_bwd(k, lock=None):
    x, w, b = (
        torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((10, 200), (200,), (200,))
    )
    dy = torch.randn(10, 200)
    F.layer_norm(x, (200,), w, b).backward(dy.double())
    mean, rstd = x.detach().mean(1).float(), (x.detach().var(1, correction=0) + 1e-5).rsqrt().float()
    dx, dw, db, sums = torch.empty(10, 200), torch.empty(4, 200), torch.empty(4, 200), torch.empty(2, 200)
    lock = torch.zeros(8, dtype=torch.int32) if lock is None else lock
    k.layernorm_bwd[(10,)](
        dx, dy, dw, db, x.detach().float(), w.detach().float(), mean, rstd, lock, 200, GROUPS=4, BLOCK=256
    )
    k.sum_rows[(2,)](dw, sums[0], 4, 200, BM=4, BLOCK=128)
    k.sum_rows[(2,)](db, sums[1], 4, 200, BM=4, BLOCK=128)
    return torch.cat([dx, sums]), torch.cat([x.grad, w.grad[None], b.grad[None]])


def attention(k, causal=True, columns=32):
    q, key, v = (torch.randn(2, 100, 32).half() for _ in range(3))
    out = torch.empty_like(q)
    k.attention[(2, 2)](q, key, v, out, 32**-0.5, 100, CAUSAL=causal, D=32, BM=64, BN=columns)
    return out, F.scaled_dot_product_attention(q.double(), key.double(), v.double(), is_causal=causal)


def device_descriptor(k):
    x, out = torch.randn(60, 92), torch.empty(60, 92)
    k.descriptor_add[(2, 3)](x, out, 60, 92, BM=32, BN=32)
    return out, x + 1


def host_descriptor(k):
    a = torch.randn(128, 64).half()
    b = torch.randn(64, 128).half()
    c = torch.empty(128, 128, dtype=torch.half)
    maps = (
        TensorDescriptor.from_tensor(t, shape) for t, shape in ((a, [64, 32]), (b, [32, 64]), (c, [64, 64]))
    )
    k.host_descriptor_matmul[(2, 2)](*maps, 64, BM=64, BN=64, BK=32)
    return c, a.double() @ b.double()


def histogram(k):
    x, counts = torch.randint(0, 16, (1000,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    k.histogram[(4,)](x, counts, 1000, BINS=16, BLOCK=256)
    return counts, torch.bincount(x, minlength=16)


def total(k):
    x, out = torch.randint(0, 9, (1000,)).float(), torch.zeros(1)
    k.total[(4,)](x, out, 1000, BLOCK=256)
    return out, x.sum()[None]


def cumsum(k):
    x, out = torch.randint(0, 9, (1000,)).float(), torch.empty(1000)
    k.cumsum[(1,)](x, out, 1000, BLOCK=1024)
    return out, x.cumsum(0)


def math(k):
    x, out = torch.randn(500), torch.empty(500)
    k.math[(1,)](x, out, 500, BLOCK=512)
    v = x.double()
    plain = v.erf() + v.sin() + v.cos() + (v.abs() + 1).log() + v.exp2()
    return out, plain + (v * v + 1).rsqrt() + v.sigmoid() + v.floor()


def dot(k, dtype, result=torch.float32, precision="ieee", size=64):
    a, b = ((torch.randn(size, size) * 3).to(dtype) for _ in range(2))
    c = torch.empty(size, size, dtype=result)
    k.dot[(1,)](a, b, c, M=size, N=size, K=size, PRECISION=precision)
    return c, a.double() @ b.double()


def first_of_rows(k):
    """2.1 GB of which almost nothing is touched."""
    stride = 1 << 30
    x, out = torch.from_numpy(np.zeros(2 * stride + 64, np.int8)), torch.empty(3, 64, dtype=torch.int8)
    x[2 * stride :] = torch.arange(64)
    k.first_of_rows[(3,)](x, out, stride, BLOCK=64)
    return out, torch.stack([x[:64], x[stride : stride + 64], x[2 * stride :]])


def reverse(k):
    x, out, scratch = torch.randn(200), torch.empty(200), torch.empty(200)
    k.reverse[(1,)](x, out, scratch, 200, BLOCK=256)
    return out, x.flip(0)


def largest(k):
    x, table, out = torch.randn(32, 5), torch.randn(5), torch.empty(32)
    k.largest[(1,)](x, table, out, 32, 5, ROWS=32, COLS=32)
    return out, table[x.argmax(1)]


def prefix_sum(k):
    x, out = torch.randint(0, 9, (1000,)).float(), torch.empty(1000)
    k.prefix_sum[(4,)](x, out, torch.empty(4), torch.zeros(4, dtype=torch.int32), 1000, BLOCK=256)
    return out, x.cumsum(0)


def gluon_copy(k):
    x, out = torch.randn(1000), torch.empty(1000)
    k.gluon_copy[(4,)](x, out, 1000, BLOCK=256)
    return out, x
