"""A package of kernels, as they are published: its modules import each other by relative names, and by the package's own."""
