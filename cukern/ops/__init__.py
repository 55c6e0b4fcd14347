"""The ops, one file each. To import this package is to fill the registry."""

from cukern.ops import kron_cases as kron_cases
from cukern.ops import matmul as matmul
from cukern.ops import square as square
