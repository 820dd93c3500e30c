"""Expands an entry of `kernels:` that names a function in a file to kernel specs: multiplies out batches and checks everything."""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from kernelgen.emitters.library import Library, dependencies
from kernelgen.emitters.registration import Registration
from kernelgen.emitters.scan import of_function
from kernelgen.errors import KernelgenError
from kernelgen.manifest.document import YamlNode, short
from kernelgen.manifest.kernels import KernelEntry
from kernelgen.manifest.template import Value
from kernelgen.plan import Kernel
from kernelgen.spec.arrays import ArrayDesc
from kernelgen.spec.kernel import SourceSpec, static

ONLY_OF_OPS = ("output", "languages")

_SOURCE = re.compile(r"(?P<file>[^:]+\.py):(?P<function>[A-Za-z_][A-Za-z0-9_]*)")
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


class SourceEntry(KernelEntry):
    """An entry with the key `source` during its expansion."""

    def expand_source(self) -> tuple[list[Kernel], list[ReferenceCheck]]:
        """Returns the entry's kernels and their references; empty if it has a mistake."""
        self._read_variables()
        self._only_own_keys()
        registration = self._registration()
        checks: list[ReferenceCheck] = []
        kernels: list[Kernel] = []
        for values in self._combinations():
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

    def _only_own_keys(self) -> None:
        if "op" in self.entry.value:
            self.fail(self.entry.value["op"].key, "'op' and 'source' are two names of a kernel", "remove one of them")
        for key in ONLY_OF_OPS:
            if key in self.entry.value:
                hint = "a kernel that is named by its source has outputs, a list" if key == "output" else None
                self.fail(self.entry.value[key].key, f"'{key}' is a key of kernels that an op names", hint)
        if self.entry.get("outputs") is None:
            self.fail(self.entry, "key 'outputs' is missing", "outputs: the results, a list of arrays")

    def _for_targets(self, spec: SourceSpec, registration: Registration) -> list[Kernel]:
        """Returns the kernel: one for all targets, or one per target if NKI's compiler makes it, which compiles for one target."""
        made = Kernel(spec, registration.module, self._library(spec), language=registration.language)
        if spec.lowering == "interpreted":
            if "prebuilt" in self.entry.value:
                self.fail(self.entry.value["prebuilt"].key, "'prebuilt' is a key of kernels with the lowering 'native'")
            return [made]
        if made.language != "nki":
            self.fail(self._need("lowering"), f"only a kernel in NKI has the lowering 'native', and {spec.file} is not")
        prebuilt = self._prebuilt(spec)
        return [replace(made, targets=(target,), prebuilt=prebuilt) for target in self.choice.targets]

    def _prebuilt(self, spec: SourceSpec) -> str:
        """Returns the plan's name for the folder with the output of NKI's compiler, and registers the folder in the catalog."""
        node = self.entry.get("prebuilt")
        if node is not None and not self.usable(node):
            return ""
        folder = None if node is None else self._folder / node.text
        other = self.catalog.prebuilt.setdefault(spec.id, folder)
        if (other and other.resolve()) != (folder and folder.resolve()):
            shown = [f"in {path}" if path else "now" for path in (other, folder)]
            self.fail(
                node or self._need("source"),
                f"kernel {spec.id} is to be made by NKI's own compiler in two ways: {shown[0]}, and {shown[1]}",
                "give both entries the same `prebuilt`",
            )
        return "" if node is None else self._named_folder(PurePosixPath(node.text).as_posix())

    def _backward(self, spec: SourceSpec, values: Mapping[str, Value]) -> list[Kernel] | None:
        """Returns the kernel that computes the inputs' gradients from the inputs and the results' gradients."""
        node = self.entry.get("vjp")
        found = self._registration("vjp")
        if node is None or found is None:
            return None
        gradients = tuple(a for a in spec.inputs if a.is_float)
        if not gradients or not all(a.is_float for a in spec.outputs):
            self.fail_with(values, node, "only a kernel of floats has a backward kernel")
            return None
        source = PurePosixPath(node.text).as_posix()
        inputs = (*spec.inputs, *spec.outputs)
        made = replace(
            spec, name=f"{spec.name}.vjp", source=source, inputs=inputs, outputs=gradients, alias=(), arguments=()
        )
        return self._for_targets(made, found)

    def _registration(self, key: str = "source") -> Registration | None:
        node = self.entry.get(key)
        if node is None or not self.usable(node):
            return None
        match = _SOURCE.fullmatch(node.text)
        if match is None:
            self.fail(node, f"'{short(node.text)}' is not a function of a file", "write FILE.py:FUNCTION")
            return None
        if PurePosixPath(match["file"]).is_absolute():
            self.fail(node, f"'{short(node.text)}' is not relative to the manifest's folder")
            return None
        try:
            found = of_function(self._folder / match["file"], match["function"])
        except KernelgenError as error:
            (mistake, *_) = error.diagnostics
            place = f" ({mistake.location})" if mistake.location else ""
            self.fail(node, f"{mistake.message}{place}", mistake.hint)
            return None
        package = self._package
        return found if package is None else self._in_package(package, node, match["file"], found)

    @property
    def _package(self) -> YamlNode | None:
        node = self.entry.get("package")
        return node if node is not None and self.usable(node) else None

    def _in_package(self, package: YamlNode, node: YamlNode, source: str, found: Registration) -> Registration | None:
        """Returns the registration of a function under its module's name in the package, if all its files are in the package."""
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
        return Path(self.entry.file).parent

    def _library(self, spec: SourceSpec) -> str:
        """Returns the plan's name for the folder of a kernel's file, or for its package, and registers it in the catalog."""
        package = self._package
        folder = PurePosixPath(spec.file).parent if package is None else _plain(package.text)
        name = self._named_folder(folder.as_posix(), package is not None)
        root = None if package is None else self._folder / folder
        former = self.catalog.packages.setdefault(spec.id, root)
        if (former and former.resolve()) != (root and root.resolve()):
            self.fail(
                package or self._need("source"),
                f"kernel {spec.id} has two packages: {former or 'none'}, and {root or 'none'}",
                "give both entries the same `package`",
            )
        file = self._folder / spec.file
        other = self.catalog.files.setdefault(spec.id, file)
        if other.resolve() != file.resolve():
            self.fail(
                self._need("source"),
                f"kernel {spec.id} is named by two files: {other} and {file}",
                "give one of the kernels another name",
            )
        return name

    def _named_folder(self, folder: str, package: bool = False) -> str:
        """Returns the plan's name for a folder, given relative to the manifest's, and registers the folder in the catalog."""
        plain = re.fullmatch("[A-Za-z0-9_]+", folder) and not package
        part = folder if plain else hashlib.sha256(f"{folder}{'/*' if package else ''}".encode()).hexdigest()[:8]
        name = f"{self.choice.manifest}.{part}"
        self.catalog.sources.setdefault(name, Library(name, self._folder / folder, package))
        return name

    # --- values ----------------------------------------------------------------------------------------------------------

    def _texts(self) -> Iterator[YamlNode]:
        yield from super()._texts()
        for key in ("outputs", "grid"):
            node = self.entry.get(key)
            if node is not None and node.kind == "seq":
                yield from node.value
        env = self.entry.get("env")
        if env is not None and env.kind == "map":
            yield from (item.node for item in env.value.values())
        params = self.entry.get("params")
        if params is not None and params.kind == "map":
            for item in params.value.values():
                if item.node.kind == "seq":
                    yield from item.node.value

    def _source_spec(self, values: Mapping[str, Value]) -> SourceSpec | None:
        inputs, outputs = self._arrays("inputs", values), self._arrays("outputs", values)
        params = {name: self._argument(node, values) for name, node in self._items("params")}
        env = {name: self._text(node, values) for name, node in self._items("env")}
        grid = self._grid(values)
        name = self._name(values)
        alias = self._aliases(inputs, outputs)
        arguments = self._names(inputs, params)
        lowering = self.entry.get("lowering")
        if not self.good or name is None or not outputs:
            return None
        return SourceSpec(
            name,
            PurePosixPath(self._need("source").text).as_posix(),
            tuple(inputs),
            tuple(outputs),
            tuple(sorted(params.items())),
            grid,
            tuple(sorted(env.items())),
            alias,
            "interpreted" if lowering is None else lowering.text,
            arguments,
        )

    def _items(self, key: str) -> Iterator[tuple[str, YamlNode]]:
        node = self.entry.get(key)
        if node is not None and node.kind == "map":
            for name, item in node.value.items():
                if self.usable(item.node) and self.usable(item.key):
                    yield name, item.node
                else:
                    self.good = False

    def _arrays(self, key: str, values: Mapping[str, Value]) -> list[ArrayDesc]:
        node = self.entry.get(key)
        found: list[ArrayDesc] = []
        for item in node.value if node is not None and node.kind == "seq" else ():
            if item.kind == "scalar" and item.value is None:
                self.fail(item, "an array can't be absent: leave it out, or make it a parameter")
                continue
            text = self._fill(item, values) if self.usable(item) else None
            if text is None:
                self.good = False
                continue
            try:
                found.append(ArrayDesc.parse(str(text)))
            except ValueError as error:
                message = f"{error}, not '{short(str(text))}'" if "expected" in str(error) else str(error)
                if id(item) in self.templates:
                    self.fail_with(values, item, message)
                else:
                    self.fail(item, message)
        return found

    def _argument(self, node: YamlNode, values: Mapping[str, Value]) -> Any:
        if node.kind == "seq":
            return tuple(self._argument(item, values) for item in node.value)
        value = self._fill(node, values)
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(node, f"a static argument is a finite number, not {short(node.text)}")
        return static(value)

    def _text(self, node: YamlNode, values: Mapping[str, Value]) -> str:
        # Keep the text as written: an environment variable is a text.
        return str(self._fill(node, values)) if id(node) in self.templates else node.text

    def _grid(self, values: Mapping[str, Value]) -> tuple[int, ...]:
        node = self.entry.get("grid")
        found = []
        for item in node.value if node is not None and node.kind == "seq" else ():
            value = self._fill(item, values) if self.usable(item) else None
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**16:
                self.fail_with(values, item, f"grid: expected a number of programs, not '{short(str(value))}'")
                continue
            found.append(value)
        return tuple(found)

    def _names(self, inputs: list[ArrayDesc], params: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the names of the arguments that receive the inputs; empty if their order determines that."""
        node = self.entry.get("arguments")
        if node is None or not self.usable(node):
            return ()
        found = tuple(item.text for item in node.value)
        lowering = self.entry.get("lowering")
        if self.good and len(found) != len(inputs):
            self.fail(node, f"arguments: {len(found)} names, and there are {len(inputs)} inputs: each has one")
        for item in node.value:
            if item.text in params:
                self.fail(item, f"'{item.text}' is an input and one of the params")
        if lowering is not None and lowering.text == "native":
            self.fail(
                self.entry.value["arguments"].key,
                "a kernel with the lowering 'native' receives its inputs by position",
                "remove 'arguments', and have the inputs be the function's first arguments",
            )
        return found

    def _name(self, values: Mapping[str, Value]) -> str | None:
        node = self.entry.get("name")
        if node is None:
            return self._need("source").text.rpartition(":")[2]
        value = self._fill(node, values) if self.usable(node) else None
        if value is None:
            self.good = False
            return None
        if not _NAME.fullmatch(str(value)):
            self.fail_with(
                values,
                node,
                f"'{short(str(value))}' is not a name that a program can ask for: letters, digits, underscores, hyphens and "
                "dots, beginning with a letter or an underscore, at most 100",
            )
        return str(value)

    def _aliases(self, inputs: list[ArrayDesc], outputs: list[ArrayDesc]) -> tuple[tuple[int, int], ...]:
        node = self.entry.get("alias")
        if node is None or not self.usable(node):
            return ()
        pairs = [("0", node)] if node.kind != "map" else [(k, item.node) for k, item in node.value.items()]
        found: dict[int, int] = {}
        for text, item in pairs if self.good else ():
            output, index = int(text), int(item.value)
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
        node = self.entry.get("check")
        if node is None or not self.usable(node):
            return None
        reference = node.get("reference")
        match = None if reference is None else _SOURCE.fullmatch(reference.text)
        if reference is None or match is None:
            self.fail(reference or node, "reference: expected a function of NumPy arrays", "write FILE.py:FUNCTION")
            return None
        file = self._folder / match["file"]
        try:
            of_function(file, match["function"])
        except KernelgenError as error:
            self.fail(reference, error.diagnostics[0].message, error.diagnostics[0].hint)
            return None
        given = {key: node.get(key) for key in ("rtol", "atol", "seed")}
        return ReferenceCheck(
            spec.id, file, match["function"], **{k: n.value for k, n in given.items() if n is not None}
        )
