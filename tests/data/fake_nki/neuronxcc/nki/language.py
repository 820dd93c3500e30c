"""Names of the language, which kernels use when they are compiled."""
