"""Checking and measuring the ops of the registry; the command line prints what these modules return."""
