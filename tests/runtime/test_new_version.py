"""CONTRIBUTING.md's promise: a new version of a kernel is the kernel and a row in each of the op's two
tables."""

import shutil
import sys

import pytest
from helpers import TREE, run

KERNEL = """
template <typename T, int N>
__global__ void square_v3(T* out, const T* x, long long n) {
    long long i = blockIdx.x * (long long)(blockDim.x * N) + threadIdx.x;
    for (int j = 0; j < N; j++, i += blockDim.x) {
        if (i < n) out[i] = square(x[i]);
    }
}
"""
ROW = """    "v3": Version("coalesced", lambda dtype: [_V3[dtype, n] for n in (1, 2, 4, 8)]),
}
_PLANS"""
PLANS = """    "v3": (_vectors(_V3), _vectors(_V2_BWD)),
}

# ---- for the tools"""


SOFTMAX_KERNEL = """
// One warp per row: 8 rows per block of 256 threads.
template <typename T>
__global__ void softmax_v11(T* out, const T* x, long long rows, long long columns, long long x_row,
    double scale) {
    using C = compute_t<T>;
    int lane = threadIdx.x % 32;
    for (long long row = blockIdx.x * 8LL + threadIdx.x / 32; row < rows; row += gridDim.x * 8LL) {
        C largest = minus_infinity<C>(), sum = 0;
        for (long long i = lane; i < columns; i += 32) {
            largest = fmax(largest, C(scale) * load_as(x[row * x_row + i]));
        }
        for (int other = 16; other > 0; other /= 2) {
            largest = fmax(largest, __shfl_xor_sync(0xffffffff, largest, other));
        }
        for (long long i = lane; i < columns; i += 32) {
            sum += exp(C(scale) * load_as(x[row * x_row + i]) - largest);
        }
        for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffff, sum, other);
        for (long long i = lane; i < columns; i += 32)
            out[row * columns + i] = T(exp(C(scale) * load_as(x[row * x_row + i]) - largest) / sum);
    }
}
"""
SOFTMAX_ROW = """    "v11": Version("one warp per row", _instances([_V11, _V4[1]])),
}
LAUNCHES"""
SOFTMAX_LAUNCHES = """    "v11": (_loop(_V11, lambda rows, _: -(-rows // 8)), _blocks_per_row(_V4[1])),
}
_FIFTH"""


@pytest.fixture
def tree(tmp_path):
    """A copy of the source tree."""
    tree = tmp_path / "tree"
    for folder in ("cukern", "kernels_cu", "tests"):
        shutil.copytree(TREE / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TREE / "pyproject.toml", tree)
    return tree


def test_a_new_version_is_a_kernel_and_two_rows(tree):
    """softmax_v11 with the backward of v4, and square_v3 with that of v2: check, a choice by name and the
    tests of versions find them."""
    softmax, square = tree / "kernels_cu/softmax/softmax.cu", tree / "kernels_cu/square.cu"
    softmax.write_text(softmax.read_text() + SOFTMAX_KERNEL)
    square.write_text(square.read_text() + KERNEL)
    python = tree / "cukern/ops/softmax/versions.py"
    text = python.read_text().replace("}\nLAUNCHES", SOFTMAX_ROW, 1).replace("}\n_FIFTH", SOFTMAX_LAUNCHES, 1)
    python.write_text(
        text.replace("GROUP =", '_V11 = Template("softmax/softmax.cu", "softmax_v11")\nGROUP =', 1)
    )
    python = tree / "cukern/ops/square.py"
    text = python.read_text().replace("}\n_PLANS", ROW, 1).replace("}\n\n# ---- for the tools", PLANS, 1)
    python.write_text(text.replace("_BLOCK =", '_V3 = Template("square.cu", "square_v3")\n_BLOCK =', 1))

    def python_m(*args, ok=True):
        return run([sys.executable, "-m", *args], cwd=tree, env={"PYTHONPATH": str(tree)}, ok=ok, timeout=600)

    for op, dims, version in (("softmax", ("5", "67"), "v11"), ("square", ("1023",), "v3")):
        checked = python_m("cukern", "check", op, *dims, "--sim", "--dtype", "f").stdout
        assert version in checked and "nothing wrong" in checked
    tests = [
        f"tests/{name}"
        for name in ("ops/softmax/test_softmax.py", "ops/square/test_square.py", "runtime/test_registry.py")
    ]
    passed = python_m("pytest", "-q", "-n", "0", "-k", "(v11 and not log) or square", *tests).stdout
    assert " passed" in passed and "failed" not in passed
    softmax.write_text(
        softmax.read_text().replace(
            "i < columns; i += 32) {\n            sum +=",
            "i < columns - 1; i += 32) {\n            sum +=",
            1,
        )
    )
    python.write_text(
        python.read_text().replace("_vectors(_V3), _vectors(_V2_BWD)", "_vectors(_V2_BWD), _vectors(_V2_BWD)")
    )
    assert (
        python_m("cukern", "check", "softmax", "5", "67", "--sim", "--dtype", "f", ok=False).returncode == 1
    )
    assert python_m("cukern", "check", "square", "1023", "--sim", ok=False).returncode
