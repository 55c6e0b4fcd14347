"""Write cukern as a package of the Hugging Face Hub, for its library `kernels`:

    python hub/build.py FOLDER

FOLDER/build/torch-cuda holds the ops, the kernels and the layers, with relative imports and no dependency but
torch. CuPy is not needed (cukern/runtime/compile/bindings.py). The name of the module and of the namespace in
torch.ops contain a hash of the files, so that several builds can be loaded in one process. `--variant` names
another variant, such as torch-cpu for a test without a GPU. To publish: `hf upload NAME FOLDER`.
"""

import argparse
import ast
import hashlib
import json
import shutil
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
LEFT_OUT = "cli", "gpt2", "__main__.py"
# Benchmarks of cukern.tune stay; those that import the package by its name go.
LEFT_OUT_OF_BENCH = (
    "attention_shapes.py",
    "fused_loss.py",
    "judge.py",
    "judge_worker.py",
    "llama_block.py",
    "lokr.py",
    "models.py",
    "optimizers.py",
    "own_kernel.py",
    "startup.py",
    "triton_square.py",
)
LAYERS = '''"""The layers for kernelize: classes without state."""

from .modules import FORWARDS, stateless

globals().update({name: stateless(name, forward) for name, forward in FORWARDS.items()})
'''
BENCHMARK = '''"""Times a layer of the package: kernels benchmark REPOSITORY."""

import torch

from kernels.benchmark import Benchmark


class RMSNorm(Benchmark):
    def setup(self):
        self.x = torch.randn(16384, 4096, device=self.device, dtype=torch.bfloat16)
        self.weight = torch.ones(4096, device=self.device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.x)

    def benchmark_base(self):
        self.out = self.kernel.rmsnorm(self.x, self.weight)

    def verify_base(self):
        return torch.nn.functional.rms_norm(self.x, (4096,), self.weight, 1e-6)
'''


def relative(text: str, depth: int) -> str:
    """The text of a module with its imports from cukern made relative. depth: folders between it and the
    package."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cukern":
            line, rest = lines[node.lineno - 1], (node.module or "").removeprefix("cukern").removeprefix(".")
            dots = "." * (depth + 1)
            lines[node.lineno - 1] = line.replace(f"from {node.module} ", f"from {dots}{rest} ", 1)
        elif isinstance(node, ast.Import) and any(a.name.partition(".")[0] == "cukern" for a in node.names):
            raise ValueError(f"line {node.lineno} imports the package by its name: {lines[node.lineno - 1]}")
    return "\n".join(lines)


def build(folder: Path, variant: str = "torch-cuda") -> Path:
    """Write the package, and return the folder of the variant. Raises FileExistsError if that is there."""
    out = folder / "build" / variant
    out.mkdir(parents=True)
    digest = hashlib.sha256()
    for path in sorted((TREE / "cukern").rglob("*.py")):
        name = path.relative_to(TREE / "cukern")
        if name.parts[0] in LEFT_OUT or (name.parts[0] == "bench" and name.name in LEFT_OUT_OF_BENCH):
            continue
        text = relative(path.read_text(), len(name.parts) - 1)
        target = out / (Path("modules.py") if name == Path("layers.py") else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        digest.update(text.encode())
    (out / "layers.py").write_text(LAYERS)
    shutil.copytree(
        TREE / "kernels_cu", out / "kernels_cu", ignore=shutil.ignore_patterns("__pycache__", ".*")
    )
    for path in sorted((out / "kernels_cu").rglob("*.*")):
        digest.update(path.read_bytes())
    identifier = f"_cukern_{variant.removeprefix('torch-')}_{digest.hexdigest()[:12]}"
    metadata = {
        "name": "cukern",
        "id": identifier,
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": variant.removeprefix("torch-")},
    }
    (out / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "benchmarks").mkdir(exist_ok=True)
    (folder / "benchmarks" / "benchmark_rmsnorm.py").write_text(BENCHMARK)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", default="torch-cuda")
    options = parser.parse_args()
    print(build(options.folder, options.variant))
