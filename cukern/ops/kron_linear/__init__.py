"""A linear layer whose weight is a Kronecker product of small matrices."""

from cukern.ops.kron_linear import cases as cases
from cukern.ops.kron_linear.op import KronLinear as KronLinear
from cukern.ops.kron_linear.op import kron_linear as kron_linear
from cukern.ops.kron_linear.op import lokr_linear as lokr_linear
