"""The batch of thread blocks that runs: its registers, its groups of lanes, its barriers, and the loop that
executes steps."""
