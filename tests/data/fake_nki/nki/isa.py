"""Names of instructions, which kernels use when they are compiled."""
