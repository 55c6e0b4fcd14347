"""The package for the Hugging Face Hub: built from this tree, loaded by `kernels`, with nothing but torch."""

import json
import runpy

import pytest
from helpers import TREE, run_python

build = runpy.run_path(str(TREE / "hub" / "build.py"))["build"]

LOAD = """
import sys
from pathlib import Path
hidden = "cukern", "cupy", "cupy_backends", "rich", "typer", "matplotlib", "triton"
sys.modules.update(dict.fromkeys(hidden))
import torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_mapping
folder = Path(sys.argv[1])
package = get_local_kernel(folder)
name = package.__name__
assert name.startswith("_cukern_cpu_") and package.softmax and hasattr(getattr(torch.ops, name), "_softmax")
assert not hasattr(torch.ops.cukern, "_softmax")
"""
KERNELIZE = """
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from kernels import replace_kernel_forward_from_hub  # transformers does so for versions that it knows
replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
sizes = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=64)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2))
tokens = torch.randint(64, (2, 9))
expected = model(tokens, labels=tokens)
expected.loss.backward()
gradients = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
layers = {n: {"cpu": LocalLayerRepository(folder, layer_name=n)} for n in ("RMSNorm", "SwiGLUMLP")}
with use_kernel_mapping(layers, inherit_mapping=False):
    model = kernelize(model, mode=Mode.TRAINING, device="cpu")
found = {type(m).__name__ for m in model.modules() if name in m.forward.__module__}
assert found == {"LlamaRMSNorm", "LlamaMLP"}, found
with package.backend("sim"):
    result = model(tokens, labels=tokens)
    result.loss.backward()
torch.testing.assert_close(result.logits, expected.logits, rtol=1e-4, atol=1e-5)
for p, g in zip(model.parameters(), gradients):
    torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-5)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A build for CPUs, which differs from that for CUDA in its name only."""
    made = tmp_path_factory.mktemp("hub")
    build(made, "torch-cpu")
    return made


def test_kernels_loads_it_and_kernelize_uses_it(folder, tmp_path):
    for package in ("kernels", "transformers"):
        pytest.importorskip(package)
    run_python(LOAD + KERNELIZE, str(folder), CUKERN_CACHE_DIR=str(tmp_path), HF_HUB_OFFLINE="1")


def test_what_is_written(tmp_path):
    out = build(tmp_path)
    assert out == tmp_path / "build" / "torch-cuda"
    data = json.loads((out / "metadata.json").read_text())
    assert data["backend"] == {"type": "cuda"} and data["python-depends"] == []
    texts = [path.read_text() for path in out.rglob("*.py")]
    assert len(texts) > 100 and not any(
        "\nfrom cukern" in text or "\nimport cukern" in text for text in texts
    )
    with pytest.raises(FileExistsError):
        build(tmp_path)
