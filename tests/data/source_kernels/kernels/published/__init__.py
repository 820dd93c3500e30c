"""A package like those that others publish: its modules import each other by relative names, and by the package's own name."""
