"""Each version with kernels of ours runs once under compute-sanitizer, if a CUDA toolkit is installed: no
stray access, no race."""

import shutil
import sys

import pytest
from helpers import gpu, run

from cukern.runtime.compile.sources import kernels_dir
from cukern.runtime.registry import CASES

TOOL = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
pytestmark = [
    gpu,
    pytest.mark.skipif(TOOL is None, reason="compute-sanitizer, of the CUDA toolkit, is not on the PATH"),
]

EVERY_VERSION = """
import sys, torch, cukern
from cukern.bench.calls import arguments, outputs, results
from cukern.runtime.device import restricted
from cukern.runtime.registry import CASES
case = CASES[sys.argv[1]]
# a minute or more under racecheck
SLOW = {("softmax", "v1"), ("softmax", "v2"), ("softmax", "v3"), ("softmax", "v4"), ("matmul", "v3")}
# racecheck stops some of cuBLAS's 16-bit kernels
without = [name for name in case.candidates if name == "cublas"]
major, minor = torch.cuda.get_device_capability()
for version, row in case.op.versions.items():
    slow = (case.name, version) in SLOW
    runs = row.requires <= 10 * major + minor
    for dtype in [dtype for dtype in case.op.dtypes if runs and row.instances(dtype)]:
        inputs = case.make(case.check_dims[1 if slow else -1], dtype, "cuda")
        with restricted("", without):
            call = lambda *x: case.call(*x, version=version)
            douts = tuple(torch.randn_like(y) for y in outputs(call(*arguments(case, inputs))))
            results(case, call, inputs, douts)
# autograd's thread may still hold Python functions of the last backward, and std::terminate ends a thread
# that needs the GIL at exit
last = torch.ones(1, device="cuda", requires_grad=True)
last.sum().backward()  # by the same thread, which has then released them
torch.cuda.synchronize()
print("done")
"""
STRAY = """
import sys, torch, cukern
kernel = cukern.load(sys.argv[1], "square_v1<float>")
x = torch.randn(1000, device="cuda")
kernel(torch.empty_like(x), x, 1000, grid=4, block=256)
torch.cuda.synchronize()
"""


def sanitize(tool: str, stem: str, code: str, argument: str, ok: bool = True):
    """Check the kernels whose names contain `stem`. torch's and cuBLAS's own kernels are not checked:
    racecheck reports hazards in cuBLAS. Without torch's caching allocator each tensor is one allocation, so
    that memcheck knows its end."""
    only = ["--kernel-name", f"kernel_substring={stem}_"]
    command = [
        str(TOOL),
        "--tool",
        tool,
        *only,
        "--error-exitcode",
        "9",
        sys.executable,
        "-c",
        code,
        argument,
    ]
    return run(command, timeout=500, ok=ok, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", CASES)
def test_every_version_is_clean(name, tool):
    assert "done" in sanitize(tool, CASES[name].op.stem, EVERY_VERSION, name).stdout


def test_memcheck_would_have_seen_a_stray_write(tmp_path):
    text, file = (kernels_dir() / "square.cu").read_text(), tmp_path / "square.cu"
    assert text.count("if (i < n)") == 2, "one in square_v1 and one in square_v1_bwd"
    file.write_text(text.replace("if (i < n)", "if (i <= n)"))
    result = sanitize("memcheck", "square", STRAY, str(file), ok=False)
    assert result.returncode == 9 and "square_v1" in result.stdout + result.stderr
