"""Specs of kernels: ops, groups of nodes, and functions in files, on exact tensors; and the ids derived from them."""
