"""Expands an entry of `kernels:` that names a function in a file to kernel specs: multiplies out batches and checks everything."""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import UNSET

from kernelgen.emitters.library import Library, dependencies
from kernelgen.emitters.registration import Registration
from kernelgen.emitters.scan import of_function
from kernelgen.errors import KernelgenError
from kernelgen.manifest.document import YamlNode, short
from kernelgen.manifest.kernels import Context, Expansion
from kernelgen.manifest.reading import read
from kernelgen.manifest.template import Value
from kernelgen.manifest.types import SourceKernel
from kernelgen.plan import Kernel
from kernelgen.spec.arrays import ArrayDesc
from kernelgen.spec.kernel import SourceSpec, static

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class ReferenceCheck:
    """The reference for a kernel's results.

    Attributes:
        kernel: the kernel's id.
        file: the reference's file.
        function: the reference: a function of NumPy arrays.
        rtol, atol: the tolerance, relative and absolute.
        seed: seed of the random inputs.
        forward: for a backward kernel, which has no file and function: the kernel that it is the derivative of.
    """

    kernel: str
    file: Path | None
    function: str
    rtol: float = 1e-5
    atol: float = 1e-5
    seed: int = 0
    forward: str = ""


def _plain(path: str) -> PurePosixPath:
    """Returns a path without `.`, and with `..` only at its start."""
    return PurePosixPath(posixpath.normpath(path))


def expand(node: YamlNode, context: Context, label: str) -> tuple[list[Kernel], list[ReferenceCheck]]:
    """Returns the kernels of one entry and their references; adds mistakes to the report, and a mistake gives no kernel.

    Args:
        node: an item of `kernels:` with the key `source`.
        context: what else its kernels depend on.
        label: the item's name in messages.
    """
    entry = read(node, SourceKernel, label, context.report)
    return ([], []) if entry is None else _SourceExpansion(entry, node, context).expand()


class _SourceExpansion(Expansion):
    templated = ("name", "inputs", "outputs", "params", "grid", "env")

    def __init__(self, entry: SourceKernel, node: YamlNode, context: Context) -> None:
        super().__init__(entry, node, context)
        self.entry = entry

    def expand(self) -> tuple[list[Kernel], list[ReferenceCheck]]:
        self.read_variables()
        registration = self._registration(self.entry.source, "source")
        checks: list[ReferenceCheck] = []
        kernels: list[Kernel] = []
        for values in self.combinations():
            spec = self._source_spec(values)
            if spec is None or registration is None:
                break
            kernels += self._for_targets(spec, registration)
            check = self._check(spec)
            if check is not None:
                checks.append(check)
            backward = self._backward(spec, values)
            if backward is not None:
                kernels += backward
                tolerance = check or ReferenceCheck("", None, "")
                checks.append(replace(tolerance, kernel=backward[0].spec.id, file=None, function="", forward=spec.id))
        return (kernels, checks) if self.good else ([], [])

    def _for_targets(self, spec: SourceSpec, registration: Registration) -> list[Kernel]:
        """Returns the kernel: one for all targets, or one per target if NKI's compiler makes it, which compiles for one target."""
        made = Kernel(spec, ((self._library(spec), registration.module),), registration.language)
        if spec.lowering == "interpreted":
            if self.entry.prebuilt:
                self.fail(self.node.keys["prebuilt"], "'prebuilt' is a key of kernels with the lowering 'native'")
            return [made]
        if made.language != "nki":
            message = f"only a kernel in NKI has the lowering 'native', and {spec.file} is not"
            self.fail(self.node.at("lowering"), message)
        prebuilt = self._prebuilt(spec)
        return [replace(made, targets=(target,), prebuilt=prebuilt) for target in self.context.targets]

    def _prebuilt(self, spec: SourceSpec) -> str:
        """Returns the plan's name for the folder with the output of NKI's compiler, and registers the folder in the catalog."""
        name = self.entry.prebuilt
        folder = self._folder / name if name else None
        other = self.catalog.prebuilt.setdefault(spec.id, folder)
        if (other and other.resolve()) != (folder and folder.resolve()):
            shown = [f"in {path}" if path else "now" for path in (other, folder)]
            self.fail(
                self.node.at("prebuilt" if name else "source"),
                f"kernel {spec.id} is to be made by NKI's own compiler in two ways: {shown[0]}, and {shown[1]}",
                "give both entries the same `prebuilt`",
            )
        return self._named_folder(PurePosixPath(name).as_posix()) if name else ""

    def _backward(self, spec: SourceSpec, values: Mapping[str, Value]) -> list[Kernel] | None:
        """Returns the kernel that computes the inputs' gradients from the inputs and the results' gradients."""
        if not self.entry.vjp:
            return None
        node, found = self.node.at("vjp"), self._registration(self.entry.vjp, "vjp")
        if found is None:
            return None
        gradients = tuple(a for a in spec.inputs if a.is_float)
        if not gradients or not all(a.is_float for a in spec.outputs):
            self.fail_with(values, node, "only a kernel of floats has a backward kernel")
            return None
        source = PurePosixPath(self.entry.vjp).as_posix()
        inputs = (*spec.inputs, *spec.outputs)
        made = replace(
            spec, name=f"{spec.name}.vjp", source=source, inputs=inputs, outputs=gradients, alias=(), arguments=()
        )
        return self._for_targets(made, found)

    def _registration(self, text: str, key: str) -> Registration | None:
        """Returns the registration of the function `FILE.py:FUNCTION` that a key names."""
        node = self.node.at(key)
        file, _, function = text.rpartition(":")
        if PurePosixPath(file).is_absolute():
            self.fail(node, f"'{short(text)}' is not relative to the manifest's folder")
            return None
        try:
            found = of_function(self._folder / file, function)
        except KernelgenError as error:
            (mistake, *_) = error.diagnostics
            place = f" ({mistake.location})" if mistake.location else ""
            self.fail(node, f"{mistake.message}{place}", mistake.hint)
            return None
        return self._in_package(node, file, found) if self.entry.package else found

    def _in_package(self, node: YamlNode, source: str, found: Registration) -> Registration | None:
        """Returns the registration of a function under its module's name in the package, if all its files are in the package."""
        package = self.node.at("package")
        root, file = _plain(package.text), _plain(source)
        if not (self._folder / root).is_dir():
            self.fail(package, f"there is no folder '{short(package.text)}'")
            return None
        if not file.is_relative_to(root):
            self.fail(node, f"'{short(source)}' is not in the package '{short(package.text)}'")
            return None
        parts = [root.name, *file.relative_to(root).with_suffix("").parts]
        wrong = next((part for part in parts if not part.isidentifier()), None)
        if wrong is not None:
            message = f"'{short(wrong or package.text)}' is not a name that Python imports"
            self.fail(
                package if wrong == root.name else node,
                message,
                "name the folder that the package is, such as src/nkilib",
            )
            return None
        library = Library("", self._folder / root, package=True)
        module = ".".join(parts[1:])
        try:
            files = dependencies(library, module)
        except KernelgenError as error:
            self.fail(node, str(error.diagnostics[0]))
            return None
        inside = library.root.resolve()
        for path in files:
            if library.place(path)[0] and not path.resolve().is_relative_to(inside):
                self.fail(
                    package, f"{path} is a link out of the package, to {path.resolve()}", "replace the link by a copy"
                )
                return None
        return replace(found, module=module)

    @property
    def _folder(self) -> Path:
        """The manifest's folder."""
        return Path(self.node.file).parent

    def _library(self, spec: SourceSpec) -> str:
        """Returns the plan's name for the folder of a kernel's file, or for its package, and registers it in the catalog."""
        package = self.entry.package
        folder = _plain(package) if package else PurePosixPath(spec.file).parent
        name = self._named_folder(folder.as_posix(), bool(package))
        root = self._folder / folder if package else None
        former = self.catalog.packages.setdefault(spec.id, root)
        if (former and former.resolve()) != (root and root.resolve()):
            self.fail(
                self.node.at("package" if package else "source"),
                f"kernel {spec.id} has two packages: {former or 'none'}, and {root or 'none'}",
                "give both entries the same `package`",
            )
        file = self._folder / spec.file
        other = self.catalog.files.setdefault(spec.id, file)
        if other.resolve() != file.resolve():
            self.fail(
                self.node.at("source"),
                f"kernel {spec.id} is named by two files: {other} and {file}",
                "give one of the kernels another name",
            )
        return name

    def _named_folder(self, folder: str, package: bool = False) -> str:
        """Returns the plan's name for a folder, given relative to the manifest's, and registers the folder in the catalog."""
        plain = re.fullmatch("[A-Za-z0-9_]+", folder) and not package
        part = folder if plain else hashlib.sha256(f"{folder}{'/*' if package else ''}".encode()).hexdigest()[:8]
        name = f"{self.context.manifest}.{part}"
        self.catalog.sources.setdefault(name, Library(name, self._folder / folder, package))
        return name

    # --- values ----------------------------------------------------------------------------------------------------------

    def _source_spec(self, values: Mapping[str, Value]) -> SourceSpec | None:
        inputs, outputs = self._arrays("inputs", values), self._arrays("outputs", values)
        params = {name: self._argument(item, values) for name, item in self._items("params")}
        # Keep the text as written: an environment variable is a text.
        env = {k: str(self.fill(item, values)) if "${" in item.text else item.text for k, item in self._items("env")}
        grid = self._grid(values)
        name = self._name(values)
        alias = self._aliases(inputs, outputs)
        self._check_arguments(inputs, params)
        if not self.good:
            return None
        return SourceSpec(
            name,
            PurePosixPath(self.entry.source).as_posix(),
            tuple(inputs),
            tuple(outputs),
            tuple(sorted(params.items())),
            grid,
            tuple(sorted(env.items())),
            alias,
            self.entry.lowering,
            tuple(self.entry.arguments),
        )

    def _items(self, key: str) -> list[tuple[str, YamlNode]]:
        node = self.node.get(key)
        return [] if node is None else list(node.value.items())

    def _arrays(self, key: str, values: Mapping[str, Value]) -> list[ArrayDesc]:
        found: list[ArrayDesc] = []
        for item in self.node.at(key).value:
            text = self.fill(item, values)
            if text is None:
                continue
            try:
                found.append(ArrayDesc.parse(str(text)))
            except ValueError as error:
                message = f"{error}, not '{short(str(text))}'" if "expected" in str(error) else str(error)
                self.fail_filled(values, item, message)
        return found

    def _argument(self, node: YamlNode, values: Mapping[str, Value]) -> Any:
        if node.kind == "seq":
            return tuple(self._argument(item, values) for item in node.value)
        value = self.fill(node, values)
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(node, f"a static argument is a finite number, not {short(node.text)}")
        return static(value)

    def _grid(self, values: Mapping[str, Value]) -> tuple[int, ...]:
        found = []
        for i in range(len(self.entry.grid)):
            item = self.node.at("grid", i)
            value = self.fill(item, values)
            if isinstance(value, int) and 0 < value < 2**16:
                found.append(value)
            else:
                self.fail_with(values, item, f"grid: expected a number of programs, not '{short(str(value))}'")
        return tuple(found)

    def _check_arguments(self, inputs: list[ArrayDesc], params: Mapping[str, Any]) -> None:
        """Checks the names of the arguments that receive the inputs."""
        names = self.entry.arguments
        if not names:
            return
        node = self.node.at("arguments")
        if self.good and len(names) != len(inputs):
            self.fail(node, f"arguments: {len(names)} names, and there are {len(inputs)} inputs: each has one")
        for i, name in enumerate(names):
            if name in params:
                self.fail(node.at(i), f"'{name}' is an input and one of the params")
        if self.entry.lowering == "native":
            self.fail(
                self.node.keys["arguments"],
                "a kernel with the lowering 'native' receives its inputs by position",
                "remove 'arguments', and have the inputs be the function's first arguments",
            )

    def _name(self, values: Mapping[str, Value]) -> str:
        if not self.entry.name:
            return self.entry.source.rpartition(":")[2]
        node = self.node.at("name")
        name = str(self.fill(node, values))
        if self.good and not _NAME.fullmatch(name):
            message = (
                f"'{short(name)}' is not a name that a program can ask for: letters, digits, underscores, hyphens and dots, "
                "beginning with a letter or an underscore, at most 100"
            )
            self.fail_with(values, node, message)
        return name

    def _aliases(self, inputs: list[ArrayDesc], outputs: list[ArrayDesc]) -> tuple[tuple[int, int], ...]:
        alias = self.entry.alias
        if alias is UNSET:
            return ()
        node = self.node.at("alias")
        pairs = {"0": alias} if isinstance(alias, int) else alias
        found: dict[int, int] = {}
        for text, index in pairs.items() if self.good else ():
            output, item = int(text), node.at(text) if isinstance(alias, dict) else node
            if output >= len(outputs):
                self.fail(item, f"there is no output {output}: they are counted from 0 to {len(outputs) - 1}")
            elif index >= len(inputs):
                self.fail(item, f"there is no input {index}: they are counted from 0 to {len(inputs) - 1}")
            elif index in found.values():
                self.fail(item, f"two results can't be written to input {index}")
            elif inputs[index] != outputs[output]:
                self.fail(item, f"output {output} is {outputs[output]} and input {index} {inputs[index]}")
            found[output] = index
        return tuple(sorted(found.items()))

    # --- check -----------------------------------------------------------------------------------------------------------

    def _check(self, spec: SourceSpec) -> ReferenceCheck | None:
        check = self.entry.check
        if check is UNSET:
            return None
        file, _, function = check.reference.rpartition(":")
        try:
            of_function(self._folder / file, function)
        except KernelgenError as error:
            self.fail(self.node.at("check", "reference"), error.diagnostics[0].message, error.diagnostics[0].hint)
            return None
        return ReferenceCheck(spec.id, self._folder / file, function, check.rtol, check.atol, check.seed)
