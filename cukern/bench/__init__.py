"""Checking and measuring the cases of the registry; the command line prints what these modules return."""

from cukern import ops as ops  # fills the registry
