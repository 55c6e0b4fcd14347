"""linear_logprobs: log-probabilities and entropies of targets, the public function."""

from typing import Any

from cukern.ops.cross_entropy.linear import checked_inputs, rows_of_chunk
from cukern.ops.cross_entropy.op import checked_targets, options_of
from cukern.ops.cross_entropy.per_token import checked_bias, losses_of
from cukern.runtime import checks
from cukern.runtime.dispatch.versions import in_force
from cukern.runtime.launch import backend
from cukern.runtime.planning import planned
from cukern.runtime.tensors import as_matrix


@planned("x", "weight", "targets", "bias")
def linear_logprobs(
    x: Any, weight: Any, targets: Any, temperature: float = 1.0, entropy: bool = False, *, bias: Any = None,
    ignore_index: int = -100, vocab_size: int | None = None, chunk_rows: int | None = None,
) -> Any:  # fmt: skip
    """log_softmax((x @ weight.T + bias) / temperature) of the targets, without all logits in memory.
    Differentiable.

        x = torch.randn(8, 1024, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        head = torch.randn(50304, 768, device="cuda", dtype=torch.bfloat16)
        tokens = torch.randint(50257, (8, 1024), device="cuda")
        logprobs, entropies = cukern.linear_logprobs(x, head, tokens, temperature=0.7, entropy=True)
        # a policy gradient
        (logprobs * torch.randn(8, 1024, device="cuda") + 0.01 * entropies).sum().backward()

    Args:
        x, weight, targets, bias, ignore_index, vocab_size, chunk_rows: as in linear_cross_entropy. With a
            target of ignore_index, the log-probability, the entropy and their gradients are 0.
        temperature: a positive number that divides the logits.
        entropy: also return the entropy of each token's distribution, in nats.

    Returns the log-probabilities, of targets' shape, in float32, or float64 for float64; with `entropy` the
    tuple (log-probabilities, entropies). The logits are rounded to x's dtype. The backward computes the
    logits again, so a call keeps only its inputs and 16 bytes per row. Autocast, higher derivatives,
    torch.func transforms and errors: as in linear_cross_entropy. Also raises ValueError for a temperature
    that is not positive.
    """
    x, weight, targets = checked_inputs("linear_logprobs", x, weight, targets, None)
    if checks.number("temperature", temperature, checks.FLOAT32_MAX) < 1e-30:
        raise ValueError(f"temperature must be positive, at least 1e-30, got {temperature!r}")
    options = options_of(weight.shape[0], ignore_index, "none", 0.0, 0.0, None, vocab_size, in_force.now)
    chunk, entropy = rows_of_chunk(targets, weight, chunk_rows), checks.flag("entropy", entropy)
    if not (x.is_cuda or backend.simulates(x)):
        checked_targets(targets, options)
    arguments = as_matrix(x), weight, checked_bias(bias, x, weight), targets.flatten()
    losses, entropies = losses_of(*arguments, chunk, float(temperature), entropy, options)
    logprobs = -losses.view(targets.shape)
    return (logprobs, entropies.view(targets.shape)) if entropy else logprobs
