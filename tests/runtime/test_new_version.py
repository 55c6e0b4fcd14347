"""CONTRIBUTING.md's promise: a new version of a kernel is the kernel and one row of the op's table of versions."""

import shutil
import sys

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
ROW = """    "v3": Version("coalesced", _vectors(_V3), _vectors(_V2_BWD), lambda dtype: [_V3[dtype, n] for n in (1, 2, 4, 8)]),
}

# ---- for the tools"""


def test_a_new_version_is_a_kernel_and_one_row(tmp_path):
    """square_v3, with the backward of v2. The tests of square and of the table of ops pass, and `cukern check` finds the version."""
    tree = tmp_path / "tree"
    for folder in ("cukern", "kernels_cu", "tests"):
        shutil.copytree(TREE / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TREE / "pyproject.toml", tree)
    cuda, python = tree / "kernels_cu/square.cu", tree / "cukern/ops/square.py"
    cuda.write_text(cuda.read_text() + KERNEL)
    text = python.read_text().replace("}\n\n# ---- for the tools", ROW, 1)
    python.write_text(text.replace("_BLOCK =", '_V3 = Template("square.cu", "square_v3")\n_BLOCK =', 1))
    env = {"PYTHONPATH": str(tree)}
    tests = [str(tree / "tests" / name) for name in ("ops/square", "runtime/test_registry.py")]
    passed = run([sys.executable, "-m", "pytest", "-q", "-n", "0", *tests], cwd=tree, env=env, timeout=600).stdout
    assert " passed" in passed
    checked = run([sys.executable, "-m", "cukern", "check", "square", "1023", "--sim"], cwd=tree, env=env).stdout
    assert "v3" in checked, checked
    python.write_text(python.read_text().replace("_vectors(_V3), _vectors(_V2_BWD)", "_vectors(_V2_BWD), _vectors(_V2_BWD)"))
    assert run([sys.executable, "-m", "cukern", "check", "square", "1023", "--sim"], cwd=tree, env=env, ok=False).returncode
