"""From each PTX instruction to a step: a function that executes it for a group of lanes."""
