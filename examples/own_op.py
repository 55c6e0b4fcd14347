"""A differentiable op of your own: squared ReLU. Then `cukern check examples/own_op.py` and `cukern bench
examples/own_op.py`."""

from pathlib import Path

import torch

import cukern


def forward(kernels, x):
    """one thread per element"""
    out = torch.empty_like(x)
    kernels("relu2", x.dtype)(out, x, x.numel(), grid=-(-x.numel() // 256), block=256)
    return out


def backward(kernels, x, _out, dout):
    dx = torch.empty_like(x)
    kernels("relu2_bwd", x.dtype)(dx, x, dout, x.numel(), grid=-(-x.numel() // 256), block=256)
    return dx


relu2 = cukern.op(
    "relu2", Path(__file__).with_name("own_op.cu"), lambda x: x.relu().square(), {"v1": (forward, backward)}
)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(1000, device=device, requires_grad=True)
    with cukern.backend("sim"):  # for CPU tensors; tensors on a GPU use the GPU
        out = relu2(x)
        (dx,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, x.relu().square())
    torch.testing.assert_close(dx, 2 * x.relu())
    print("relu2 and its gradient agree with torch")


if __name__ == "__main__":
    main()
