"""CONTRIBUTING.md's promise: a new version of a kernel is the kernel and a row in each of the op's two tables."""

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
__global__ void softmax_v11(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    using C = compute_t<T>;
    int lane = threadIdx.x % 32;
    for (long long row = blockIdx.x * 8LL + threadIdx.x / 32; row < rows; row += gridDim.x * 8LL) {
        C largest = minus_infinity<C>(), sum = 0;
        for (long long i = lane; i < columns; i += 32) largest = fmax(largest, C(scale) * load_as(x[row * x_row + i]));
        for (int other = 16; other > 0; other /= 2) largest = fmax(largest, __shfl_xor_sync(0xffffffff, largest, other));
        for (long long i = lane; i < columns; i += 32) sum += exp(C(scale) * load_as(x[row * x_row + i]) - largest);
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


def test_softmax_gets_a_version(tree):
    """A kernel in softmax.cu and two rows in versions.py: check, compile, a choice by name and the tests of versions find it."""
    cuda, python = tree / "kernels_cu/softmax/softmax.cu", tree / "cukern/ops/softmax/versions.py"
    cuda.write_text(cuda.read_text() + SOFTMAX_KERNEL)
    text = python.read_text().replace("}\nLAUNCHES", SOFTMAX_ROW, 1).replace("}\n_FIFTH", SOFTMAX_LAUNCHES, 1)
    python.write_text(text.replace("GROUP =", '_V11 = Template("softmax/softmax.cu", "softmax_v11")\nGROUP =', 1))
    env = {"PYTHONPATH": str(tree)}

    def cukern(*args, ok=True):
        return run([sys.executable, "-m", "cukern", *args], cwd=tree, env=env, ok=ok)

    checked = cukern("check", "softmax", "5", "67", "--sim", "--dtype", "f").stdout
    assert "v11" in checked and "nothing wrong" in checked
    assert "softmax_v11<float>" in cukern("compile", "softmax", "--shape", "5,67", "--arch", "sm_80").stdout
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "v11 and not log", "tests/ops/softmax/test_softmax.py"]
    passed = run(command, cwd=tree, env=env).stdout
    assert " passed" in passed and "failed" not in passed
    cuda.write_text(cuda.read_text().replace("i < columns; i += 32) sum +=", "i < columns - 1; i += 32) sum +=", 1))
    assert run(command, cwd=tree, env=env, ok=False).returncode == 1


def test_a_new_version_is_a_kernel_and_two_rows(tree):
    """square_v3, with the backward of v2. The tests of square and of the table of ops pass, and `cukern check` finds the version."""
    cuda, python = tree / "kernels_cu/square.cu", tree / "cukern/ops/square.py"
    cuda.write_text(cuda.read_text() + KERNEL)
    text = python.read_text().replace("}\n_PLANS", ROW, 1).replace("}\n\n# ---- for the tools", PLANS, 1)
    python.write_text(text.replace("_BLOCK =", '_V3 = Template("square.cu", "square_v3")\n_BLOCK =', 1))
    env = {"PYTHONPATH": str(tree)}
    tests = [str(tree / "tests" / name) for name in ("ops/square/test_square.py", "runtime/test_registry.py")]
    passed = run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "square", *tests], cwd=tree, env=env, timeout=600).stdout
    assert " passed" in passed
    checked = run([sys.executable, "-m", "cukern", "check", "square", "1023", "--sim"], cwd=tree, env=env).stdout
    assert "v3" in checked, checked
    python.write_text(python.read_text().replace("_vectors(_V3), _vectors(_V2_BWD)", "_vectors(_V2_BWD), _vectors(_V2_BWD)"))
    assert run([sys.executable, "-m", "cukern", "check", "square", "1023", "--sim"], cwd=tree, env=env, ok=False).returncode
