"""Tiny Llama and Gemma 2 of Hugging Face's transformers with cukern in one line: the same losses and
gradients."""

import torch

import cukern


def main() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    for config, make in ((LlamaConfig, LlamaForCausalLM), (Gemma2Config, Gemma2ForCausalLM)):
        torch.manual_seed(0)
        model = make(
            config(**sizes, num_key_value_heads=2, head_dim=16, bos_token_id=None, eos_token_id=None)
        ).to(device)
        tokens = torch.randint(500, (2, 40), device=device)
        before = model(tokens, labels=tokens).loss
        expected = torch.autograd.grad(before, list(model.parameters()))
        print(cukern.patch(model))
        loss = model(tokens, labels=tokens).loss
        print(f"loss {before.item():.6f}, with cukern {loss.item():.6f}\n")
        torch.testing.assert_close(loss, before, rtol=1e-5, atol=0)
        for a, b in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    main()
