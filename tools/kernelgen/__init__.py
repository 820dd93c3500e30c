"""kernelgen: builds NEFF bundles for AWS Neuron from manifests of GGML kernels.

The package has layers: `manifest` and `plan` describe kernels and never import JAX; `render` turns a plan into build files; `hlo`,
`compilers` and `bundle` are the three build steps; only `cli` reads arguments and prints. docs/reference/architecture.md has the
levels, which define the allowed imports.
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
"""Modules that users' files may still import by their former names."""


class _Former:
    """Imports such a module under its current name, with a warning at the importing line.

    It is a finder and a loader without their base classes: importing `importlib.abc` takes as long as Python's start.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # The class has a loader's methods, but not its base class, which ModuleSpec's type requires.
        return importlib.machinery.ModuleSpec(name, self) if name in _FORMER else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        present = _FORMER[module.__name__]
        warnings.warn(f"{module.__name__} is {present} now: import that", FutureWarning, stacklevel=2)
        contents = vars(importlib.import_module(present))
        vars(module).update((name, value) for name, value in contents.items() if not name.startswith("__"))


sys.meta_path.append(_Former())
