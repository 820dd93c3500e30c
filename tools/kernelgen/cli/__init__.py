"""The command line. One module per subcommand, each with a `command`; a module is imported only when its command is called.

So `kernelgen --help` is instant and `kernelgen plan` never imports JAX. The frame around them is in `frame`, not here: a submodule
becomes an attribute of its package, and `list` and `compile` would hide Python's own.
"""

from kernelgen.cli.frame import main, run

__all__ = ["main", "run"]
