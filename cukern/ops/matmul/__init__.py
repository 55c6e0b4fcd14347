"""Matrix products: matmul, and linear with a bias."""

from cukern.ops.matmul.op import linear as linear
from cukern.ops.matmul.op import matmul as matmul
