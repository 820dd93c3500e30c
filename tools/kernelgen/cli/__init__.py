"""The command line. Each subcommand has a module with a `command`, which is imported only when the command is called.

So `kernelgen --help` is fast and `kernelgen plan` never imports JAX. The code around them is in `frame`, not here: a submodule
becomes an attribute of its package, and `list` and `compile` would hide Python's own.
"""

from kernelgen.cli.frame import main, run

__all__ = ["main", "run"]
