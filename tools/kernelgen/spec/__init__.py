"""What a kernel is: ops, groups of nodes and functions of files, on exact tensors, and the ids that follow from these."""
