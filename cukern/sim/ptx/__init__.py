"""PTX text as data. Knows nothing about what an instruction does."""
