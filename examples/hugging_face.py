"""Llama and Qwen2 of Hugging Face's transformers with cukern.rope in place of apply_rotary_pos_emb: the same losses and gradients."""

import contextlib
import importlib
from collections.abc import Iterator

import torch

import cukern


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """transformers' function: q and k are (batch, heads, sequence, head_dim), cos and sin (batch, sequence, head_dim)."""
    return cukern.rope(q, cos, sin, k=k, layout="bhsd" if unsqueeze_dim == 1 else "bshd")


@contextlib.contextmanager
def patched(name: str) -> Iterator[None]:
    """Inside the block, the models of transformers.models.NAME use cukern."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    before, module.apply_rotary_pos_emb = module.apply_rotary_pos_emb, apply_rotary_pos_emb
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = before


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, config, make in (("llama", LlamaConfig, LlamaForCausalLM), ("qwen2", Qwen2Config, Qwen2ForCausalLM)):
        torch.manual_seed(0)
        model = make(config(**sizes, num_key_value_heads=2)).to(device)
        tokens = torch.randint(500, (2, 40), device=device)
        losses, gradients = [], []
        for context in (contextlib.nullcontext(), patched(name)):
            with context:
                loss = model(tokens, labels=tokens).loss
                gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            losses.append(loss.item())
        print(f"{name}: loss {losses[0]:.6f}, with cukern.rope {losses[1]:.6f}")
        assert abs(losses[0] - losses[1]) < 1e-5 * losses[0]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    main()
