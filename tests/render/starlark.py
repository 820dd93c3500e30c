"""Bazel packages built by the rules, without Bazel: Python, which can parse Starlark, runs the real .bzl files of the
rules.

Doubles replace Bazel itself: targets are analysed in the order of their BUILD file, and an action runs when it is
registered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """A rule's `fail`."""


class File:
    """A file in the form that rules get."""

    def __init__(self, path: Path) -> None:
        self.path, self.basename, self.dirname = str(path), path.name, str(path.parent)

    def __str__(self) -> str:
        return self.path


class Args:
    """`ctx.actions.args()`: its arguments as words."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def add(self, value: object, format: str = "%s") -> None:
        self.words.append(format.replace("%s", str(value)))

    def add_all(
        self, values: Sequence[Any], map_each: Any = str, format_each: str = "%s", expand_directories: bool = True
    ) -> None:
        self.words += [format_each.replace("%s", map_each(value)) for value in values]


class Label:
    """A label of the rules' repository."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.name = text.rpartition(":")[2]

    def __str__(self) -> str:
        return self.text


class _Rule:
    def __init__(
        self, implementation: Callable[[Any], list[Any]], attrs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        self.implementation, self.attrs = implementation, attrs or {}


class _Attributes:
    """`attr`: an attribute's kind and its declaration."""

    def __getattr__(self, kind: str) -> Callable[..., SimpleNamespace]:
        empty = {"string": "", "bool": False, "int": 0, "label": None}
        return lambda **given: SimpleNamespace(
            kind=kind, default=given.get("default", empty.get(kind, {} if kind.endswith("dict") else []))
        )


def _provider(fields: object = None, doc: str = "") -> type:
    return type("Provider", (SimpleNamespace,), {})


class Packages:
    """Packages of a generated repository.

    Args:
        output: the output folder.
        folders: the folder of each package that labels name, by the label without a target.
        run: runs a step: (mnemonic, words).
    """

    def __init__(self, output: Path, folders: dict[str, Path], run: Callable[[str, list[str]], None]) -> None:
        self.output, self.folders, self.run = output, folders, run
        self.targets: dict[str, list[Any]] = {}
        self._modules: dict[str, dict[str, Any]] = {}
        self._package = ""
        self._fakes: dict[str, Any] = {
            "//tools/bazel:kernelgen_tool.bzl": {"KernelgenToolInfo": _provider(), "run_kernelgen": self._kernelgen},
            "//rules/private/rules:neuron_bundle_cc.bzl": {"neuron_bundle_cc": lambda **_: None},
            "//rules/private/rules:neuron_kernel_report.bzl": {"neuron_kernel_report": lambda **_: None},
            "//rules/private/actions:routes.bzl": {"routed_to": lambda target: {}},
        }
        self._toolchain = SimpleNamespace(
            compiler="neuronx-cc",
            disabled="",
            simulator=MagicMock(),
            identity="",
            nki=File(Path("python")),
            nki_driver="driver",
            nki_identity="nki",
        )

    def _globals(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "attr": _Attributes(),
            "config": MagicMock(),
            "json": SimpleNamespace(
                encode=lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")), decode=json.loads
            ),
            "provider": _provider,
            "struct": SimpleNamespace,
            "depset": lambda items=(), transitive=(): list(items),
            "DefaultInfo": SimpleNamespace,
            "OutputGroupInfo": lambda **_: None,
            "rule": lambda **declared: self._rule(_Rule(**declared)),
            "transition": MagicMock(),
            "native": MagicMock(),
            "platform_common": MagicMock(),
            "package": lambda **_: None,
            "fail": self._fail,
            "Label": Label,
        }
        made["load"] = lambda file, *names, **others: made.update(
            {name: self.module(file)[name] for name in names}
            | {name: self.module(file)[other] for name, other in others.items()}
        )
        return made

    def module(self, label: str) -> dict[str, Any]:
        """Returns the definitions of a .bzl file of the rules' repository."""
        label = "//" + label.partition("//")[2] if "//" in label else f"//rules/private/rules{label}"
        if label in self._fakes:
            return dict(self._fakes[label])
        if label not in self._modules:
            path = ROOT / label.removeprefix("//").replace(":", "/")
            module = self._globals()
            exec(compile(path.read_text(), str(path), "exec"), module)
            self._modules[label] = module
        return self._modules[label]

    def build(self, package: str, text: str) -> None:
        """Builds every target of a BUILD file; the files of its package are in a folder of that name in `output`."""
        self._package = package
        exec(compile(text, f"{package}/BUILD.bazel", "exec"), self._globals())

    def _fail(self, text: str) -> None:
        raise Failed(text)

    def _rule(self, rule: _Rule) -> Callable[..., None]:
        return lambda **given: self._declare(rule, given)

    def _declare(self, rule: _Rule, given: dict[str, Any]) -> None:
        name = given.pop("name")
        label = f"//{self._package}:{name}"
        attr, files, file = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
        for key in ("exec_properties", "tags", "visibility"):
            given.pop(key, None)
        unknown = set(given) - set(rule.attrs)
        assert not unknown, f"{label} has no attribute {unknown}"
        for key, declared in rule.attrs.items():
            value = given.get(key, declared.default)
            if declared.kind == "label" and key.startswith("_"):
                value, found = MagicMock(), []
                value.__getitem__.return_value = SimpleNamespace(seconds=60)
            elif declared.kind in ("label", "label_list", "label_keyed_string_dict"):
                labels = [value] if isinstance(value, str) else [*(value or ())]
                targets = [self._target(one) for one in labels]
                found = [one for target in targets for one in target.files]
                if declared.kind == "label_keyed_string_dict":
                    value = dict(zip(targets, value.values(), strict=True))
                else:
                    value = targets if declared.kind == "label_list" else next(iter(targets), None)
                setattr(file, key, found[0] if declared.kind == "label" and found else None)
                setattr(files, key, found)
            setattr(attr, key, value)
        folder = self.output / self._package
        self.targets[label] = rule.implementation(
            SimpleNamespace(
                label=SimpleNamespace(name=name, package=self._package),
                attr=attr,
                files=files,
                file=file,
                toolchains={"//rules:toolchain_type": SimpleNamespace(neuron=self._toolchain)},
                runfiles=lambda files: files,
                actions=SimpleNamespace(
                    args=Args,
                    declare_file=lambda name: File(folder / name),
                    declare_directory=lambda name: File(folder / name),
                    run=lambda arguments, mnemonic, **_: self.run(mnemonic, [w for a in arguments for w in a.words]),
                    run_shell=lambda arguments, **_: self._fail(str(arguments)),
                ),
            )
        )

    def _target(self, label: str) -> Any:
        """Returns a target in the form that its dependents get."""
        package, _, name = label.rpartition(":")
        full = f"{package or f'//{self._package}'}:{name}"
        if full not in self.targets:
            folder = self.folders[package] if package else self.output / self._package
            return _Target([File(folder / name)], [])
        providers = self.targets[full]
        return _Target(providers[0].files, providers)

    def _kernelgen(self, ctx: Any, tool: Any, arguments: Args, mnemonic: str, **_: Any) -> None:
        self.run(mnemonic, arguments.words)


class _Target:
    def __init__(self, files: list[File], providers: list[Any]) -> None:
        self.files, self.providers = files, providers

    def __getitem__(self, provider: type) -> Any:
        if provider is SimpleNamespace:
            return SimpleNamespace(files=SimpleNamespace(to_list=lambda: self.files))
        return next(found for found in self.providers if isinstance(found, provider))
