"""The names in messages exist: options of the command line, keys of a manifest, environment variables.

A message is a string in a source that contains a space and is not a docstring. Names in it are in quotes or backquotes,
or have a known form (`--option`, `a_key`, `compiler.optlevel`, `NEURON_SDK`).
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

import kernelgen
from kernelgen.cli import frame
from kernelgen.compilers.settings import CompileConfig
from kernelgen.dispatch.costs import Costs
from kernelgen.ggml import ops as ggml_ops
from kernelgen.manifest import schema
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.targets import TARGETS

PACKAGE = Path(kernelgen.__file__).parent
INTERPRETER = PACKAGE.parent / "nki_interpreter"
ROOT = Path(__file__).resolve().parents[2]

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
KEY = re.compile(r"(?<=[`'])[A-Za-z_][\w.]*(?=[`'])|\b[a-z]+(?:_[a-z]+)+\b|\b[a-z]+\.[a-z_]+\b")
VARIABLE = re.compile(r"\b(?:GGML_)?NEURON_(?!KERNELS_)[A-Z_]+\b")

TABLES = tuple(
    f"kernelgen/{file}.py"
    for file in ("device/manifest", "ggml/ops", "hlo/linted", "hlo/proto", "bundle/embed", "simulator/writing")
)
"""Modules whose strings are data or C."""

OF_OTHERS = {
    "--build": "of cmake",
    "--install": "of cmake",
    "--prefix": "of cmake",
    "--name": "of a build step, of any name",
    "--version": "of neuronx-cc",
    "--native-int64": "likewise",
    "--rerank": "of llama.cpp",
    "--output-format": "of neuron-profile",
    "--lora-scaled": "of llama.cpp and export-graphs",
}
NO_KEYS = {
    "attn_q attn_k attn_v": "tensors of llama.cpp's models",
    "cpu jax.devices jax.random device_kind lax.fori_loop": "Python",
    "general.alignment general.architecture kernelgen.kernel kernelgen.key kernelgen.neff n_kernels n_neffs": "in a pack",
    "neff_memory neff_sha256": "in the index of a tree",
    "neuron.kernels neuron_hlo neuron_manifest data neuron_kernelgen": "Bazel",
    "add_neuron_kernels neuron_simulator": "CMake",
    "total_time": "in a summary of neuron-profile",
    "op_name op_params time_us test_backend_ops": "in what test-backend-ops prints",
    "nrt_execute nrt_load nrt_load_collectives nrt_simulator_clock neuron_kernels_table": "C",
    "op_params": "ggml",
    "f4e2m1fn f8e4m3fn sort power base_dilation window_dilation backend_config": "HLO",
    "QuantizeMX block_size scale_method lhs_scale rhs_scale": "of HLO's calls of MX",
    "ggml_op_add ggml_unary_op_relu input_tensors kernel_name": "of ggml-hsa-gen-kernels",
    "model_type weight_map": "of Hugging Face models",
    "types": "of an emitter's decorator",
    "layouts": "likewise",
    "off": "no folder",
    "language": "of an emitter's decorator",
    "knob.fuse kernelgen.languages numpy fori_loop replica_groups": "kernelgen.languages.numpy",
    "mem_space partition_dim reduction_tile tile_op tile_size": "of knobs",
    "mutable_tensor shared_hbm err_lowering": "NKI",
    "skip_middle_end_transformations enable_stack_allocator force_auto_alloc": "decorators of NKI's first generation",
    "multi_buffer psum_stack_allocator sbuf_stack_allocator": "likewise",
    "x.astype": "NumPy",
    "pack_path nki_interpreter": "Python",
}


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of a Python source's strings with a space; `{}` replaces the fields of an f-string."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docs:
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text


def messages() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(PACKAGE.parent)}:{line}", text)
        for path in sorted([*PACKAGE.rglob("*.py"), *INTERPRETER.rglob("*.py")])
        if str(path.relative_to(PACKAGE.parent)) not in TABLES
        for line, text in prose(path.read_text())
    ]


def options(command: click.Command) -> set[str]:
    """Returns the options of a command and of its subcommands."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union({"--help"}, *map(options, below))


def keys(node: object) -> Iterator[str]:
    """Yields the names in a part of the manifest's schema: keys and literal values."""
    if isinstance(node, dict):
        yield from node.get("properties", {})
        yield from (value for value in [*node.get("enum", []), node.get("const")] if isinstance(value, str))
        for value in node.values():
            yield from keys(value)
    elif isinstance(node, list):
        for value in node:
            yield from keys(value)


def nki_names() -> set[str]:
    """Returns the names that kernels in NKI may use: the interpreter's functions and classes, and their parameters and
    fields.
    """
    found = {"nki", "nl", "nisa", "typing", "language", "isa"}
    for path in INTERPRETER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def known_options() -> set[str]:
    commands = [importlib.import_module(frame.module_of(name)).command for name in frame.COMMANDS]
    neuronx_cc = {word for word in CompileConfig.make("trn1").flags() if word.startswith("--")}
    return neuronx_cc.union(OF_OTHERS, *map(options, commands))


def known_keys() -> set[str]:
    ops = {*ggml_ops.OPS, *ggml_ops.ALIASES}
    arguments = {name for op in ggml_ops.OPS.values() for name in (*op.inputs, *(p.name for p in op.params))}
    no_keys = {word for words in NO_KEYS for word in words.split()}
    sizes = {*DecodeCall.__dataclass_fields__, *Settings.__dataclass_fields__, *Costs.__dataclass_fields__}
    numpy = {f"np.{name}" for name in dir(np)}
    return {*numpy, *keys(json.loads(schema.PATH.read_text())), *ops, *arguments, *sizes, *TARGETS, *no_keys}


def unknown(pattern: re.Pattern[str], known: set[str], said: list[tuple[str, str]]) -> list[str]:
    """Returns the places where texts contain unknown names; each part of a dotted key must be known."""
    return [
        f"{where}: {name}"
        for where, text in said
        for name in pattern.findall(text)
        if name not in known and not set(name.split(".")) <= known
    ]


def test_options_that_messages_name_exist() -> None:
    assert unknown(OPTION, known_options(), messages()) == []


def test_keys_that_messages_name_exist() -> None:
    said = [
        (where, re.sub(r"\S+\.(?:md|py|txt|pb|json|cpp|gguf|so|yaml|kernelgen)\b", "", text))
        for where, text in messages()
    ]
    interpreter = [(where, text) for where, text in said if where.startswith(INTERPRETER.name)]
    assert unknown(KEY, known_keys(), [one for one in said if one not in interpreter]) == []
    assert unknown(KEY, known_keys() | nki_names(), interpreter) == []


def test_variables_that_messages_name_are_read_and_documented() -> None:
    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    sources = [p for p in (ROOT / "backend").rglob("*") if p.suffix in (".cpp", ".h", ".c") and "tests" not in p.parts]
    texts = [
        (str(p.relative_to(ROOT)), text)
        for p in sources
        for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', p.read_text())
    ]
    alone = {text for _, text in texts} | {
        node.value
        for path in [*PACKAGE.rglob("*.py"), *INTERPRETER.rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    rules = "\n".join(p.read_text() for p in (ROOT / "rules").rglob("*") if p.suffix in (".cmake", ".bzl", ".py"))
    read = {name for name in alone if VARIABLE.fullmatch(name)} | set(VARIABLE.findall(rules))
    said = [(where, text) for where, text in [*texts, *messages()] if " " in text]
    assert unknown(VARIABLE, read, said) == []
    named = {name for _, text in said for name in VARIABLE.findall(text)}
    assert len(named) >= 10 and "GGML_NEURON_KERNEL_DIR" in named
    assert [name for name in sorted(named) if name not in pages] == []


@pytest.mark.parametrize(
    ("pattern", "message", "name"),
    [
        (KEY, "raise memory_mb in the manifest", "memory_mb"),
        (KEY, "set `compiler.memory_mb` higher", "compiler.memory_mb"),
        (KEY, "the key 'kernal' has no value", "kernal"),
        (OPTION, "give --memory-mb another value", "--memory-mb"),
        (VARIABLE, "set NEURON_KERNELGEN_CASH", "NEURON_KERNELGEN_CASH"),
    ],
)
def test_what_does_not_exist_is_found(pattern: re.Pattern[str], message: str, name: str) -> None:
    ((where, text),) = prose(f"raise ValueError({message!r})")
    assert unknown(pattern, known_keys() | known_options() | {"NEURON_KERNELGEN_CACHE"}, [(f"x:{where}", text)]) == [
        f"x:1: {name}"
    ]
    good = "give --memory, `compiler.memory_per_compile`, 'kernels' and NEURON_KERNELGEN_CACHE"
    assert unknown(pattern, known_keys() | known_options() | {"NEURON_KERNELGEN_CACHE"}, [("x", good)]) == []
