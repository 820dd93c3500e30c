"""The form of a manifest.

`kernelgen.manifest.reading` reads values of these types. `./bazelw run //tools:regenerate` writes them as a JSON Schema for
editors. What a type can't express, such as a shape that does not fit an op, is checked when an entry is expanded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from kernelgen.ggml.weight_layouts import LAYOUTS
from kernelgen.languages import LANGUAGES
from kernelgen.targets import TARGETS


def _text(pattern: str, expected: str, *examples: str) -> Meta:
    """A text; `expected` describes it in messages, of editors too."""
    return Meta(pattern=pattern, examples=list(examples) or None, extra_json_schema={"patternErrorMessage": expected})


def _enum(names: Iterable[str], title: str = "value") -> Meta:
    return Meta(title=title, extra_json_schema={"enum": list(names)})


_SOME = Meta(min_length=1)
_UNIQUE = Meta(extra_json_schema={"uniqueItems": True})
_INDEX = Meta(ge=0, le=63)
_OPERANDS = Meta(max_length=64)
_VIEW = r"[A-Za-z_][A-Za-z0-9_.-]*\s*(\+.*)?(\(.*)?"
_COMPARISON = "^[^<>=!]+(<=|>=|==|!=|<|>)[^<>=!]+$"
_PARAM = "a number, true, false or an expression '${…}'"
_TENSOR = "a tensor '(ne0,ne1,ne2,ne3)/dtype' or '(ne0,ne1,ne2,ne3)/dtype/(nb0,nb1,nb2,nb3)'"
_REFERENCE = "a reference NAME, 'NAME (ne0,ne1,ne2,ne3)/dtype[/(nb0,nb1,nb2,nb3)]' or 'NAME+OFFSET (…)/dtype[/(…)]'"

Target = Annotated[str, _enum(TARGETS, "target")]
Languages = Annotated[list[Annotated[str, _enum(LANGUAGES, "language")]], _SOME, _UNIQUE]
Tensor = Annotated[
    str,
    _text(r"^\s*\(.*\)\s*/.*$", _TENSOR, "(4096,512,1,1)/f32", "(128,${n},32,1)/f32/(4,16384,512,${n * 16384})"),
]
Array = Annotated[
    str,
    _text(
        r"^\s*(\(.*\)\s*/.*|[A-Za-z0-9_]+\s*\[.*\]\s*)$",
        "an array 'dtype[shape]', or a tensor '(ne0,ne1,ne2,ne3)/dtype'",
        "f32[150,2,2500]",
    ),
]
Reference = Annotated[str, _text(rf"^\s*{_VIEW}$", _REFERENCE, "norm", "qkv+4096 (128,32,${n},1)/f32")]
Output = Annotated[
    str,
    _text(
        rf"^\s*(\(.*\)\s*/.*|{_VIEW})$",
        "a tensor '(ne0,ne1,ne2,ne3)/dtype', or a reference to the memory that it is written to",
        "(4096,${n_tokens},1,1)/f32",
        "k_cache",
    ),
]
Layout = Annotated[str, _enum(LAYOUTS, "layout")]
LayoutOfSome = Annotated[dict[Layout, Annotated[list[Tensor], _SOME, _UNIQUE]], _SOME]
Layouts = Annotated[list[Layout | LayoutOfSome], _UNIQUE]
Weights = Layouts | Annotated[dict[Target, Layouts], _SOME]
Variable = Annotated[str, _text("^[A-Za-z_][A-Za-z0-9_]*$", "a variable's name: letters, digits and '_'")]
Variables = Annotated[dict[Variable, Annotated[list[float | str], _SOME, _UNIQUE]], _SOME]
Comparison = Annotated[str, _text(_COMPARISON, "a comparison of two expressions, such as 'n_outputs <= n_tokens'")]
When = Annotated[str, _text(_COMPARISON, "a comparison of two expressions, such as 'n_tokens > 1'")]
Function = Annotated[
    str, _text(r"^[^:]+\.py:[A-Za-z_][A-Za-z0-9_]*$", "a function of a file, 'FILE.py:FUNCTION'", "cumsum.py:cumsum")
]
OpName = Annotated[str, _text(r"^[A-Za-z0-9_.\- ]{1,64}$", "an op's name")]
Title = Annotated[str, _text(r"^\S.*$", "a name")]
Identifier = Annotated[str, _text("^[A-Za-z_][A-Za-z0-9_.-]*$", "a name of letters, digits, '_', '.' and '-'")]
ManifestName = Annotated[
    str,
    _text(
        "^[a-z][a-z0-9_]{0,99}$",
        "a name of lower-case letters, digits and '_', beginning with a letter, at most 100 long",
        "llama3",
    ),
]
Folder = Annotated[str, _text("^[^/$][^$]*$", "a folder, from the manifest's")]
Flag = Annotated[str, _text(r"^\S.*$", "a flag")]
Memory = Annotated[str, _text("^[1-9][0-9]{0,5}[MG]$", "memory such as '512M' or '8G'", "8G")]
Argument = Annotated[str, _text("^[A-Za-z_][A-Za-z0-9_]*$", "an argument's name: letters, digits and '_'")]
Result = Annotated[str, _text("^(0|[1-9][0-9]?)$", "the number of a result")]
Param = Annotated[
    float | bool | Annotated[str, _text(r"^(any|\$\{.*\})$", _PARAM)],
    Meta(extra_json_schema={"patternErrorMessage": _PARAM}),
]


class EntrySettings(Struct, forbid_unknown_fields=True):
    """Settings of neuronx-cc for some kernels. They override the manifest's; absent keys have the manifest's values.

    Attributes:
        optlevel: --optlevel, by default 2. 3 may take more memory and time.
        auto_cast: --auto-cast: which operations may be computed in auto_cast_type; by default none.
        auto_cast_type: --auto-cast-type, by default bf16; only with auto_cast matmult or all.
        model_type: --model-type, by default generic.
        extra_flags: Further flags of neuronx-cc, in this order. kernelgen refuses flags that have a key here, or that the build
            sets itself.
    """

    optlevel: Literal[1, 2, 3] | UnsetType = UNSET
    auto_cast: Annotated[str, _enum(("none", "matmult", "all"))] | UnsetType = UNSET
    auto_cast_type: Annotated[str, _enum(("bf16", "fp16", "tf32", "fp8_e4m3"))] | UnsetType = UNSET
    model_type: Annotated[str, _enum(("generic", "transformer", "unet-inference"))] | UnsetType = UNSET
    extra_flags: list[Flag] | UnsetType = UNSET


class Case(EntrySettings, forbid_unknown_fields=True, kw_only=True):
    """Settings of kernels of some sizes.

    Attributes:
        when: A comparison of the variables of an entry. It does not apply to an entry that does not use all of its variables.
    """

    when: When


class Compiler(EntrySettings, forbid_unknown_fields=True):
    """neuronx-cc's settings, by its own names. An absent key has neuronx-cc's default.

    Attributes:
        lnc: --lnc, physical NeuronCores per logical one; the target's default when absent. Must equal the runtime's
            NEURON_LOGICAL_NC_CONFIG.
        memory_per_compile: Memory that the build reserves for one compile; the target's figure by default.
        cpus_per_compile: CPUs that the build reserves for one compile; the target's figure by default.
        cases: Settings of kernels of some sizes. They override the settings beside `cases`. The first case whose `when` holds
            applies.
    """

    lnc: Literal[1, 2] | UnsetType = UNSET
    memory_per_compile: Memory = ""
    cpus_per_compile: Annotated[int, Meta(ge=1, le=1024)] | UnsetType = UNSET
    cases: Annotated[list[Case], _SOME] = field(default_factory=list)


class Entry(Struct, forbid_unknown_fields=True, kw_only=True):
    """The keys that every entry may have.

    Attributes:
        name: A name for readers and messages.
        compiler: Settings of neuronx-cc for the entry's kernels. They override the manifest's.
        weights: Overrides `weights` of the manifest for this entry.
        batch: Variables and their values. They add to those of `sizes`, and override them. The entry represents every combination.
        where: Overrides `where` of the manifest for this entry.
    """

    name: Title = ""
    compiler: Annotated[EntrySettings, Meta(extra_json_schema={"minProperties": 1})] | UnsetType = UNSET
    weights: Weights | UnsetType = UNSET
    batch: Variables = field(default_factory=dict)
    where: list[Comparison] | UnsetType = UNSET


class OpKernel(Entry, forbid_unknown_fields=True, kw_only=True):
    """One kernel of an op; with `batch`, one kernel per combination of its values. Two entries of one name are the same kernel.

    Attributes:
        op: The op's name from ggml_op_desc in lower case, or a custom op of a kernel library.
        inputs: ggml's src[0], src[1], …; null for an absent one. Empty for an op without inputs.
        output: The result, a tensor. Strides in bytes are needed only if it is not contiguous.
        params: Op parameters by ggml's names. An absent one has the op's default. `any`, for numbers of scale: the kernel takes any
            numbers.
        alias: The index of the input in whose memory the result is, from 0. Ops that ggml defines in place (set_rows, cpy) have a
            default.
        languages: Overrides `languages` of the manifest for this entry.
    """

    op: OpName
    inputs: Annotated[list[Tensor | None], _OPERANDS]
    output: Tensor
    params: dict[str, Param] = field(default_factory=dict)
    alias: Annotated[int, _INDEX] | UnsetType = UNSET
    languages: Languages = field(default_factory=list)


class Check(Struct, forbid_unknown_fields=True):
    """The reference with which `kernelgen check` compares a kernel's results.

    Attributes:
        reference: A function of NumPy arrays with the kernel's inputs and params.
        rtol: The relative tolerance.
        atol: The absolute tolerance.
        seed: The seed of the random inputs.
    """

    reference: Function
    rtol: Annotated[float, Meta(ge=0)] = 1e-5
    atol: Annotated[float, Meta(ge=0)] = 1e-5
    seed: Annotated[int, Meta(ge=0)] = 0


class SourceKernel(Entry, forbid_unknown_fields=True, kw_only=True):
    """One kernel that is a function of a file; with `batch`, one kernel per combination of its values.

    Attributes:
        source: Instead of `op`: the function that computes the kernel, in JAX, NumPy or NKI; the file is relative to the manifest's
            folder. kernelgen detects the language from the file. Programs find the kernel by its `name`, by default the function's.
        inputs: The array arguments: tensors, or row-major arrays 'dtype[shape]'.
        outputs: The results, a list of arrays.
        params: The function's static arguments.
        alias: The index of the input in whose memory the first result is, from 0, or a mapping of results to inputs.
        grid: The number of programs of a kernel in NKI, in each dimension.
        arguments: The names of the function's array arguments, in the inputs' order; by default the first arguments.
        env: The environment variables that the kernel's file can read: only these.
        lowering: `interpreted`: kernelgen lowers the function to HLO. `native`: NKI's own compiler makes an artifact of it, which
            the HLO calls.
        package: The folder of the Python package that contains the file, relative to the manifest's folder. The file can import
            from the package by relative names or by the package's name.
        prebuilt: For the lowering `native`: the folder with the results of `kernelgen prebuild`, relative to the manifest's folder.
            Builds then do not need NKI's compiler.
        vjp: The function that computes the gradients of the inputs from the inputs and the gradients of the results. It becomes a
            separate kernel, `<name>.vjp`.
        check: The reference with which `kernelgen check` compares the kernel's results.
    """

    source: Function
    inputs: Annotated[list[Array], _OPERANDS]
    outputs: Annotated[list[Array], _SOME, _OPERANDS]
    params: dict[str, float | bool | str | list[float | bool | str] | None] = field(default_factory=dict)
    alias: Annotated[int, _INDEX] | Annotated[dict[Result, Annotated[int, _INDEX]], _SOME] | UnsetType = UNSET
    grid: Annotated[list[int | str], Meta(min_length=1, max_length=3)] = field(default_factory=list)
    arguments: Annotated[list[Argument], _SOME, _UNIQUE] = field(default_factory=list)
    env: dict[Variable, float | bool | str] = field(default_factory=dict)
    lowering: Annotated[str, _enum(("interpreted", "native"))] = "interpreted"
    package: Folder = ""
    prebuilt: Folder = ""
    vjp: Function = ""
    check: Check | UnsetType = UNSET


class Node(Struct, forbid_unknown_fields=True, kw_only=True):
    """One node of a group.

    Attributes:
        name: The name by which other nodes refer to its result.
        op: The op's name from ggml_op_desc in lower case, or a custom op of a kernel library.
        inputs: ggml's src[0], src[1], …: an input or an earlier node by its name, or a view of it, with the view's tensor and its
            offset in bytes; null for an absent one. Empty for an op without inputs.
        output: The result as a tensor. If it is written in place: a reference to the input that it is written to.
        params: Op parameters by ggml's names. An absent one has the op's default. `any`, for numbers of scale: the kernel takes any
            numbers.
    """

    name: Identifier
    op: OpName
    inputs: Annotated[list[Reference | None], Meta(max_length=10)]
    output: Output
    params: dict[str, Param] = field(default_factory=dict)


class Graph(Entry, forbid_unknown_fields=True, kw_only=True):
    """One graph kernel, or one for each combination of its variables' values. `compiler` does not apply to its nodes' kernels.

    Attributes:
        inputs: The inputs of the group, with names of your choice: weights, caches, results of earlier nodes.
        nodes: The nodes that compute something, in the order of the graph.
        outputs: The nodes whose results are read outside of the group. A result that is written in place needs no entry here.
        targets: The targets that have the group's kernel; by default all targets of the manifest.
        fallback: Whether the bundle also has the kernels of the nodes, for graphs in which the backend does not find the whole
            group.
    """

    inputs: dict[Identifier, Tensor]
    nodes: Annotated[list[Node], _SOME]
    outputs: Annotated[list[Identifier], _UNIQUE]
    targets: Annotated[list[Target], _SOME, _UNIQUE] = field(default_factory=list)
    fallback: bool = True


class Manifest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The kernels that a model needs, their Neuron targets, and how to compile them. Reference: docs/reference/manifest.md.

    Attributes:
        format: Version of the manifest's format.
        name: Name of the manifest: `//manifests:<name>_<target>` in Bazel, `<name>_<target>.kernels.gguf` as a file.
        description: The purpose of the manifest; only for readers.
        targets: The devices to build for, one bundle each: values of neuronx-cc's --target.
        compiler: neuronx-cc's settings, by its own names. An absent key has neuronx-cc's default.
        languages: The languages of the kernels, the first choice first. By default kernelgen uses JAX if it can.
        weights: The layouts of weights, the first operands of mul_mat and mul_mat_id; a weight gets the first that its type
            supports. `planes`, for quantized types: the same field of all blocks of a row side by side. `transposed`, for f32,
            f16 and bf16: each matrix by its columns. `bf16`, for quantized types: dequantized.
            `{bf16: ["(4096,1024,1,1)/q6_K"]}` is for only some weights. The default, [], is ggml's layout. A mapping has layouts
            by target.
        sizes: Variables that all entries of `kernels` and `graphs` share, and their values. An entry represents every combination
            of the variables that it uses.
        where: Comparisons that must all hold; other combinations of values are left out. A comparison does not apply to an entry
            that does not use all of its variables.
        kernels: Kernels, one by one or in batches. A manifest has `kernels` or `graphs`, or both.
        graphs: Groups of nodes of a graph, each computed by one kernel.
    """

    one_of: ClassVar[tuple[str, ...]] = ("kernels", "graphs")
    """Keys of which at least one is needed."""

    format: Literal[1]
    name: ManifestName
    description: str = ""
    targets: Annotated[list[Target], _SOME, _UNIQUE]
    compiler: Compiler = field(default_factory=Compiler)
    languages: Languages = field(default_factory=list)
    weights: Weights = field(default_factory=list)
    sizes: Variables = field(default_factory=dict)
    where: list[Comparison] = field(default_factory=list)
    # The loader reads the entries one by one: a mistake in one does not hide what is wrong in the others.
    kernels: Annotated[list[Any], _SOME] = field(default_factory=list)
    graphs: Annotated[list[Any], _SOME] = field(default_factory=list)


def descriptions(type: type[Struct]) -> dict[str, str]:
    """Returns the descriptions of a struct's keys, from its docstring and those of the structs that it extends."""
    found = {} if type.__base__ in (Struct, None) else descriptions(type.__base__)
    _, _, listed = inspect.cleandoc(type.__doc__ or "").partition("\n\nAttributes:\n")
    for item in re.split(r"\n(?=    \w)", listed):
        name, _, text = item.strip().partition(": ")
        found[name] = " ".join(text.split())
    return found
