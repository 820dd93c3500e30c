"""kernelgen: from a manifest of GGML kernels to NEFF bundles for AWS Neuron.

The package is layered one way: `manifest` and `plan` describe kernels and never import JAX; `render` turns a plan into build
files; `hlo`, `compilers` and `bundle` are the three build steps; `cli` is the only place that reads arguments and prints.
docs/reference/architecture.md has the levels, which say what imports what.
"""

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.1.0"

_FORMER = {
    "kernelgen.differentiable": "kernelgen.manifest.differentiable",
    "kernelgen.emitter": "kernelgen.emitters",
    "kernelgen.kernel": "kernelgen.spec.op_kernel",
    "kernelgen.numpy": "kernelgen.languages.numpy",
}
"""Modules that the files of users import by the names that they had."""


class _Former:
    """Finder and loader that imports such a module by its present name, with a warning at the line that imports it.

    The base classes of both are in `importlib.abc`, whose import takes as long as Python takes to start.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in _FORMER else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        present = _FORMER[module.__name__]
        warnings.warn(f"{module.__name__} is {present} now: import that", FutureWarning, stacklevel=2)
        contents = vars(importlib.import_module(present))
        vars(module).update((name, value) for name, value in contents.items() if not name.startswith("__"))


sys.meta_path.append(_Former())
