"""The plan: every distinct kernel, how it is compiled for which target, and which bundle holds it.

A plan is a value. It is made from manifests (`kernelgen.manifest`), read by the renderers and by `kernelgen build`, and written
as JSON whose bytes depend on the manifests' meaning alone. Nothing here imports JAX or reads files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.types import TYPES, TYPES_BY_NUMBER
from kernelgen.targets import TARGETS

FORMAT = 1
"""Version of the plan's JSON."""

MAX_ID = 63
"""Longest kernel id in bytes: it must fit a file name with a suffix, a GGUF tensor name and a C symbol."""

_TENSOR = re.compile(
    r"\s*\(\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*\)\s*/\s*(\w+)"
    r"\s*(?:/\s*\(\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*\)\s*)?"
)

Dims = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """A GGML tensor: `(ne0,ne1,ne2,ne3)/dtype[/(nb0,nb1,nb2,nb3)]`, dimension 0 fastest.

    Attributes:
        ne: elements per dimension.
        dtype: ggml's type name.
        nb: strides in bytes, always filled in and canonical: where ne is 1 the stride that density would give. nb[0] is the
            distance between elements, or between blocks of a quantized type.
    """

    ne: Dims
    dtype: str
    nb: Dims

    @staticmethod
    def make(ne: Sequence[int], dtype: str, nb: Sequence[int] | None = None) -> TensorDesc:
        """Returns the canonical description.

        Raises:
            ValueError: not four dimensions, one is not positive, the type is unknown, or a row does not hold whole blocks.
        """
        if len(ne) != 4 or (nb is not None and len(nb) != 4):
            raise ValueError(f"a tensor has four dimensions, not {len(ne if nb is None or len(ne) != 4 else nb)}")
        return _desc(tuple(ne), dtype, None if nb is None else tuple(nb))

    @staticmethod
    def parse(text: str) -> TensorDesc:
        """Returns the tensor that `text` describes.

        Raises:
            ValueError: `text` is not of the form, or describes no tensor.
        """
        match = _TENSOR.fullmatch(text)
        if not match:
            raise ValueError("expected (ne0,ne1,ne2,ne3)/dtype or (ne0,ne1,ne2,ne3)/dtype/(nb0,nb1,nb2,nb3)")
        groups = match.groups()
        ne = tuple(map(int, groups[:4]))
        return TensorDesc.make(ne, groups[4], None if groups[5] is None else tuple(map(int, groups[5:])))

    @property
    def contiguous(self) -> bool:
        """Whether elements follow each other without gaps, in order."""
        return self.nb == dense_strides(self.ne, self.dtype)

    @property
    def elements(self) -> int:
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def storage_bytes(self) -> int:
        """Bytes from the first element to the end of the last one (`ggml_nbytes`)."""
        t = TYPES[self.dtype]
        rest = sum((self.ne[i] - 1) * self.nb[i] for i in (1, 2, 3))
        if t.quantized:
            return self.ne[0] // t.block * self.nb[0] + rest
        return t.size + (self.ne[0] - 1) * self.nb[0] + rest

    @property
    def shape(self) -> Dims:
        """The shape as JAX and NumPy see it: reversed."""
        return self.ne[::-1]

    def __str__(self) -> str:
        text = f"({self.ne[0]},{self.ne[1]},{self.ne[2]},{self.ne[3]})/{self.dtype}"
        return text if self.contiguous else f"{text}/({self.nb[0]},{self.nb[1]},{self.nb[2]},{self.nb[3]})"


def dense_strides(ne: Dims, dtype: str) -> Dims:
    """Returns the strides in bytes of a contiguous tensor."""
    t = TYPES[dtype]
    nb1 = t.size * (ne[0] // t.block)
    return (t.size, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2])


@functools.lru_cache(maxsize=65536)
def _desc(ne: Dims, dtype: str, nb: Dims | None) -> TensorDesc:
    if dtype not in TYPES:
        raise ValueError(f"unknown dtype '{dtype}'")
    bad = next((n for n in ne if n <= 0), None)
    if bad is not None:
        raise ValueError(f"dimensions are positive, not {bad}")
    t = TYPES[dtype]
    if ne[0] % t.block:
        raise ValueError(f"ne0 of a {dtype} tensor is a multiple of its block size {t.block}, not {ne[0]}")
    if max(ne) >= 2**63 or ne[0] * ne[1] * ne[2] * ne[3] * t.size >= 2**63:
        raise ValueError("the tensor is larger than 2^63 bytes")
    if nb is None:
        return TensorDesc(ne, dtype, dense_strides(ne, dtype))
    # Strides that mean nothing may be anything; they are replaced below.
    used = [b for b, n, least in zip(nb, ne, (t.block, 1, 1, 1), strict=True) if n > least]
    bad = next((b for b in used if b < 0 or b >= 2**63), None)
    if bad is not None:
        raise ValueError(f"strides are not negative, not {bad}")
    unit = 2 if t.size % 2 == 0 and t.quantized else 1 if t.quantized else t.size
    bad = next((b for b in used if b % unit), None)
    if bad is not None:
        raise ValueError(f"strides of a {dtype} tensor are multiples of {unit} bytes, not {bad}")
    # A dimension of one element is never stepped over, so its stride (which in llama.cpp carries n_ctx) means nothing.
    out = [nb[0] if ne[0] > t.block else t.size]
    if t.quantized and out[0] != t.size:
        raise ValueError(f"blocks of a {dtype} row follow each other: nb0 is {t.size}, not {nb[0]}")
    for i in (1, 2, 3):
        out.append(nb[i] if ne[i] > 1 else out[i - 1] * (ne[i - 1] // (t.block if i == 1 else 1)))
    return TensorDesc(ne, dtype, (out[0], out[1], out[2], out[3]))


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What one kernel computes: the identity that manifests share, HLO is named by, and a backend looks up.

    Attributes:
        op: `ggml_op_desc` in lower case.
        inputs: ggml's `src[0…]`; None for one that is absent before one that is there.
        output: the result.
        params: (name, value) sorted by name, all of them, floats rounded to binary32.
        alias: the input whose memory the result is written to, or None.
    """

    op: str
    inputs: tuple[TensorDesc | None, ...]
    output: TensorDesc
    params: tuple[tuple[str, ParamValue], ...] = ()
    alias: int | None = None
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", _kernel_id(self))

    @staticmethod
    def make(
        op: str,
        inputs: Iterable[TensorDesc | None],
        output: TensorDesc,
        params: Mapping[str, ParamValue] | None = None,
        alias: int | None = None,
    ) -> KernelSpec:
        """Returns the canonical spec: trailing absent inputs dropped, defaults filled in, the op's own aliasing applied.

        Raises:
            KeyError: ggml has no such op and it is not a custom one (`params` of a custom op are kept as they are).
        """
        srcs = list(inputs)
        while srcs and srcs[-1] is None:
            srcs.pop()
        try:
            known = ggml_ops.op(op)
        except KeyError:
            full: Mapping[str, ParamValue] = params or {}
        else:
            full = known.with_defaults(params or {})
            alias = known.alias if alias is None else alias
        return KernelSpec(op, tuple(srcs), output, tuple(sorted(full.items())), alias)

    @property
    def updates(self) -> tuple[int, ...]:
        """The inputs that the kernel changes besides the one whose memory the result shares (an optimizer's momenta)."""
        try:
            return ggml_ops.op(self.op).updates
        except KeyError:
            return ()

    @property
    def op_params(self) -> tuple[int, ...]:
        """ggml's 16 words of `op_params`; all 0 for an op that ggml does not have."""
        try:
            known = ggml_ops.op(self.op)
        except KeyError:
            return (0,) * ggml_ops.N_WORDS
        return known.encode(dict(self.params))

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as plain values; `from_json` is its inverse."""
        return {
            "op": self.op,
            "inputs": [None if t is None else str(t) for t in self.inputs],
            "output": str(self.output),
            "params": dict(self.params),
            "alias": self.alias,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> KernelSpec:
        """Returns the spec that `to_json` wrote.

        Raises:
            ValueError, KeyError: `value` is not such a spec.
        """
        return KernelSpec.make(
            value["op"],
            [None if t is None else TensorDesc.parse(t) for t in value["inputs"]],
            TensorDesc.parse(value["output"]),
            {name: _param_from_json(v) for name, v in value["params"].items()},
            value["alias"],
        )


def _param_from_json(value: Any) -> ParamValue:
    return float(value) if isinstance(value, str) else value  # "inf", "-inf" and "nan" have no JSON number


def _param_to_json(value: ParamValue) -> ParamValue | str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def canonical_json(value: Any) -> str:
    """Returns JSON with sorted keys and no white space; the same value gives the same text everywhere."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def spec_json(spec: KernelSpec) -> str:
    """Returns the spec's canonical JSON: what its id is the digest of, and what an emit step is given."""
    value = spec.to_json()
    value["params"] = {name: _param_to_json(v) for name, v in spec.params}
    return canonical_json(value)


def _kernel_id(spec: KernelSpec) -> str:
    digest = hashlib.sha256(spec_json(spec).encode()).hexdigest()[:12]
    ne = spec.output.ne
    last = max((i for i in range(4) if ne[i] != 1), default=0)
    head = f"{spec.op}-{'x'.join(map(str, ne[: last + 1]))}-{spec.output.dtype}"
    return f"{head[: MAX_ID - 13]}-{digest}"


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """How kernels are compiled: a target and neuronx-cc's settings, by its own names.

    Only these go into a NEFF's key (with the HLO's bytes and the compiler's identity). Defaults are neuronx-cc's own.

    Attributes:
        target: `--target`.
        optlevel: `--optlevel`, 1 to 3.
        auto_cast: `--auto-cast`: none, matmult or all.
        auto_cast_type: `--auto-cast-type`: bf16, fp16, tf32 or fp8_e4m3.
        model_type: `--model-type`: generic, transformer or unet-inference.
        lnc: `--lnc`; the target's default when None was given to `make`.
        extra_flags: further flags, in the order given.
    """

    target: str
    optlevel: int = 2
    auto_cast: str = "none"
    auto_cast_type: str = "bf16"
    model_type: str = "generic"
    lnc: int = 1
    extra_flags: tuple[str, ...] = ()

    @staticmethod
    def make(target: str, *, lnc: int | None = None, **settings: Any) -> CompileConfig:
        """Returns the settings for `target`, with the target's own `--lnc` unless one is given."""
        return CompileConfig(target, lnc=TARGETS[target].lnc if lnc is None else lnc, **settings)

    def flags(self) -> list[str]:
        """Returns neuronx-cc's arguments for these settings, in a fixed order, every one explicit."""
        return [
            "--framework",
            "XLA",
            "--target",
            self.target,
            "--optlevel",
            str(self.optlevel),
            "--model-type",
            self.model_type,
            "--auto-cast",
            self.auto_cast,
            "--auto-cast-type",
            self.auto_cast_type,
            "--lnc",
            str(self.lnc),
            *self.extra_flags,
        ]

    @property
    def key(self) -> str:
        """A short name for files and targets: `trn1`, or `trn1-3f9a2c` when settings differ from the defaults."""
        if self == CompileConfig.make(self.target):
            return self.target
        return f"{self.target}-{hashlib.sha256(canonical_json(self.flags()).encode()).hexdigest()[:6]}"

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "optlevel": self.optlevel,
            "auto_cast": self.auto_cast,
            "auto_cast_type": self.auto_cast_type,
            "model_type": self.model_type,
            "lnc": self.lnc,
            "extra_flags": list(self.extra_flags),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CompileConfig:
        return CompileConfig(**{**value, "extra_flags": tuple(value["extra_flags"])})


@dataclass(frozen=True, slots=True)
class Kernel:
    """A spec and the emitter that computes it.

    Attributes:
        spec: what is computed.
        emitter: the emitter's module inside its library (`rope` for rope.py).
        library: the kernel library's name; `kernels` is this project's own.
    """

    spec: KernelSpec
    emitter: str
    library: str = "kernels"


@dataclass(frozen=True, slots=True)
class Neff:
    """One compile: a kernel, its settings, and what the build machine must have free for it.

    Attributes:
        kernel: the kernel's id.
        config: the settings' key.
        memory_mb: memory in MiB; the largest that any manifest asks for.
        cpus: CPUs.
    """

    kernel: str
    config: str
    memory_mb: int
    cpus: int

    @property
    def id(self) -> str:
        return f"{self.kernel}.{self.config}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """The kernels of one manifest for one target.

    Attributes:
        name: the manifest's name.
        target: the target.
        config: key of the compile settings.
        kernels: ids, sorted.
    """

    name: str
    target: str
    config: str
    kernels: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.name}_{self.target}"


@dataclass(frozen=True, slots=True)
class Request:
    """What one manifest asks for, before manifests are merged.

    Attributes:
        name: the manifest's name.
        kernels: its kernels, duplicates allowed.
        configs: one per target.
        memory_mb, cpus: what one compile needs; None for the target's own figure.
    """

    name: str
    kernels: tuple[Kernel, ...]
    configs: tuple[CompileConfig, ...]
    memory_mb: int | None = None
    cpus: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Every distinct kernel, compile and bundle of some manifests; each tuple sorted by id."""

    kernels: tuple[Kernel, ...]
    configs: tuple[CompileConfig, ...]
    neffs: tuple[Neff, ...]
    bundles: tuple[Bundle, ...]

    @staticmethod
    def merge(requests: Iterable[Request]) -> Plan:
        """Returns the union of what manifests ask for; equal kernels and equal compiles appear once."""
        kernels: dict[str, Kernel] = {}
        configs: dict[str, CompileConfig] = {}
        neffs: dict[str, Neff] = {}
        bundles: dict[str, Bundle] = {}
        for request in requests:
            ids = {k.spec.id: k for k in request.kernels}
            kernels.update(ids)
            order = tuple(sorted(ids))
            for config in request.configs:
                target = TARGETS[config.target]
                memory = request.memory_mb or target.memory_per_compile_mb
                cpus = request.cpus or target.cpus_per_compile
                key = config.key
                configs[key] = config
                bundle = Bundle(request.name, config.target, key, order)
                bundles[bundle.id] = bundle
                for kernel in order:
                    neff = Neff(kernel, key, memory, cpus)
                    known = neffs.get(neff.id)
                    if known:
                        neff = replace(neff, memory_mb=max(memory, known.memory_mb), cpus=max(cpus, known.cpus))
                    neffs[neff.id] = neff
        return Plan(
            tuple(kernels[k] for k in sorted(kernels)),
            tuple(configs[k] for k in sorted(configs)),
            tuple(neffs[k] for k in sorted(neffs)),
            tuple(bundles[k] for k in sorted(bundles)),
        )

    def to_json(self) -> str:
        """Returns the plan as JSON, one kernel a line, ending in a newline."""
        kernels = [
            f'{{"emitter":"{k.emitter}","id":"{k.spec.id}","library":"{k.library}","spec":{spec_json(k.spec)}}}'
            for k in self.kernels
        ]
        configs = {c.key: c.to_json() for c in self.configs}
        neffs = [
            canonical_json({"kernel": n.kernel, "config": n.config, "memory_mb": n.memory_mb, "cpus": n.cpus})
            for n in self.neffs
        ]
        bundles = [
            canonical_json({"name": b.name, "target": b.target, "config": b.config, "kernels": b.kernels})
            for b in self.bundles
        ]
        return (
            f'{{"format":{FORMAT},\n"kernels":[\n'
            + ",\n".join(kernels)
            + '\n],\n"configs":'
            + canonical_json(configs)
            + ',\n"neffs":[\n'
            + ",\n".join(neffs)
            + '\n],\n"bundles":[\n'
            + ",\n".join(bundles)
            + "\n]}\n"
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError: `text` is not a plan of this format.
        """
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ValueError(f"not a plan of format {FORMAT}")
        return Plan(
            tuple(Kernel(KernelSpec.from_json(k["spec"]), k["emitter"], k["library"]) for k in value["kernels"]),
            tuple(CompileConfig.from_json(value["configs"][key]) for key in sorted(value["configs"])),
            tuple(Neff(**n) for n in value["neffs"]),
            tuple(Bundle(b["name"], b["target"], b["config"], tuple(b["kernels"])) for b in value["bundles"]),
        )


def spec_from_ggml(
    number: int,
    words: Sequence[int],
    inputs: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    output: tuple[int, Sequence[int]],
) -> KernelSpec:
    """Returns the spec of a graph node given by ggml's own numbers.

    Args:
        number: `enum ggml_op`.
        words: `op_params`, 16 words.
        inputs: (type number, ne, nb) of each source.
        output: (type number, ne) of the result, which is dense.

    Raises:
        ValueError: an op or type number is unknown, or a tensor is not one.
    """
    name = ggml_ops.op_name(number, words)
    op = ggml_ops.op(name)
    return KernelSpec.make(
        name,
        [TensorDesc.make(ne, _type_name(t), nb) for t, ne, nb in inputs],
        TensorDesc.make(output[1], _type_name(output[0])),
        op.decode(words),
    )


def _type_name(number: int) -> str:
    if number not in TYPES_BY_NUMBER:
        raise ValueError(f"unknown ggml type number {number}")
    return TYPES_BY_NUMBER[number].name
