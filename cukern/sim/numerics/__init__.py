"""What ALU and tensor-core instructions compute: functions from the bits of their operands to the bits of
their results."""
