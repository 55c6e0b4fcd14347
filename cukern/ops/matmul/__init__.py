"""Matrix products: matmul, and linear with a bias. kron_linear uses `torch_matmul`."""

from cukern.ops.matmul.op import linear as linear
from cukern.ops.matmul.op import matmul as matmul
from cukern.runtime.products import tf32_allowed as tf32_allowed
from cukern.runtime.products import torch_matmul as torch_matmul
