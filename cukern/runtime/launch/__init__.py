"""From machine code to a launch on torch's memory and stream, on a GPU or in the simulator."""
