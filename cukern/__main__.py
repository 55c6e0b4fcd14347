"""`python -m cukern`: the same as the command `cukern`."""

from cukern.cli import main

main()
