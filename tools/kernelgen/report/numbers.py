"""The numbers of a report as plain values: the source of the page, the JSON and the CSV."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import kernelgen
from kernelgen.bundle.reader import StoredBundle
from kernelgen.dispatch.chips import Chip
from kernelgen.forecast import printing
from kernelgen.forecast.call import CallForecast
from kernelgen.forecast.kernels import Kernels
from kernelgen.forecast.time import of_work
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.hlo.flops import flops
from kernelgen.report import titles
from kernelgen.report.titles import ModelTitles
from kernelgen.spec.kernel import GraphSpec, SourceSpec, Spec
from kernelgen.targets import PARTITIONS

FORMAT = 1
"""Version of the JSON; a reader refuses any other."""

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""Names of products' dtypes in the table of the chips."""

PARTS = {**printing.PARTS, "host": "host transfers"}
"""The parts of a call's time, in the order of the bar."""


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """The inputs of a report.

    Attributes:
        names: names of the manifests and bundles.
        chip: figures of the target.
        model: properties of the model's file; empty without one.
        settings: how the model is run, by option.
        calls: forecasts of one token and of a prompt, in this order; empty without a model.
        by_cache: forecasts of one token, by ascending cells of the cache.
        by_cores: forecasts of one token, by ascending number of cores.
        titles: titles of the kernels that these calls launch.
        coverage: the coverage of nodes, in the form of `kernelgen coverage --format json`; None without a model.
        stored: bundles for the target.
        measured: measured microseconds of a launch, by kernel.
        compile_s: seconds of each kernel's compile, if this machine's cache of NEFFs has them.
    """

    names: Sequence[str]
    chip: Chip
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    calls: Sequence[CallForecast]
    by_cache: Sequence[CallForecast]
    by_cores: Sequence[CallForecast]
    titles: ModelTitles
    coverage: Any
    stored: Sequence[StoredBundle]
    measured: Mapping[str, float]
    compile_s: Mapping[str, int]


def peak(chip: Chip, dtype: str) -> float:
    """Returns the FLOPs per microsecond of a logical core's tensor engines, for a dtype under its HLO name."""
    name = "float8" if dtype.startswith("f8") else DTYPES.get(dtype, "float32")
    return 2 * PARTITIONS * PARTITIONS / chip.by("tensor_ns_per_column", name) * 1e3 * chip.lnc


def collect(inputs: ReportInputs, kernels: Kernels) -> dict[str, Any]:
    """Returns the numbers of a report. Every kernel is emitted.

    Args:
        inputs: the inputs of the report.
        kernels: the kernels of the manifests and bundles.
    """
    counts: list[Mapping[Spec, int]] = [{one.spec: one.count for one in call.launches} for call in inputs.calls]
    neffs = {kernel.id: kernel.neff_size for stored in inputs.stored for kernel in stored.kernels}
    rows = [
        row
        for spec, named in kernels.by_graph.items()
        if (row := _kernel(spec, named, kernels, inputs, counts)) is not None
    ]
    same = {row["hlo_sha256"]: row["measured_us"] for row in rows if row["measured_us"] is not None}
    for row in rows:
        row["neff_bytes"] = neffs.get(row["id"])
        row["compile_s"] = inputs.compile_s.get(row["id"])
        # Kernels with the same HLO are one program, which the backend names after one of them.
        row["measured_us"] = row["measured_us"] or same.get(row["hlo_sha256"])
    token = inputs.calls[0].ms * 1e3 if inputs.calls else sum(row["us"] for row in rows)
    for row in rows:
        launches = row["per_token"] if inputs.calls else 1
        row["share"] = launches * row["us"] / token if token else 0.0
    rows.sort(key=lambda row: (-row["share"], -row["us"], row["id"]))
    return {
        "format": FORMAT,
        "kernelgen": kernelgen.__version__,
        "modelled": True,
        "names": list(inputs.names),
        "target": inputs.chip.target,
        "lnc": inputs.chip.lnc,
        "model": dict(inputs.model),
        "settings": dict(inputs.settings),
        "weights": _layouts(named for spec, named in kernels.by_graph.items() if not counts or spec in counts[0]),
        "bundles": [_bundle(stored) for stored in inputs.stored],
        "kernels_sha256": _digest(row["id"] + row["hlo_sha256"] for row in rows),
        "roofline": {
            "gb_per_s": inputs.chip.number("gb_per_s"),
            "tflops": {dtype: peak(inputs.chip, dtype) / 1e6 for dtype in ("bf16", "f16", "f32")},
        },
        "calls": [_call(call) for call in inputs.calls],
        "by_cache": [_call(call) for call in inputs.by_cache],
        "by_cores": [_call(call) for call in inputs.by_cores],
        "published": published(inputs.chip.target),
        "coverage": inputs.coverage,
        "kernels": rows,
        "without_hlo": sorted(kernels.by_graph[spec].id for spec in kernels.refusals),
    }


def published(target: str) -> list[dict[str, Any]]:
    """Returns others' measurements of other software on a target, each with its source."""
    text = resources.files("kernelgen.report").joinpath("published.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)
    return [one for one in found if target in one["targets"]]


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()


def _bundle(stored: StoredBundle) -> dict[str, Any]:
    origin = stored.origin
    return {
        "name": origin.id,
        "compiler": origin.compiler,
        "flags": list(origin.flags),
        "simulated": origin.simulated,
        "kernelgen": origin.version,
        "jax": origin.jax_version,
        "kernels": len(stored.kernels),
        "neffs_sha256": _digest(kernel.neff_sha256 for kernel in stored.kernels),
    }


def _call(call: CallForecast) -> dict[str, Any]:
    return {
        "n_tokens": call.n_tokens,
        "n_kv": call.n_kv,
        "cores": call.cores,
        "ms": call.ms,
        "tokens_per_s": call.n_tokens / call.ms * 1e3,
        "launches": call.count,
        "nodes_without_kernel": call.missing,
        "fits": call.memory.fits,
        "memory": asdict(call.memory),
        "parts_ms": {**call.parts_ms, "host": call.transfers_us / 1e3},
    }


def _layouts(specs: Iterable[Spec]) -> dict[str, list[str]]:
    """Returns the types of the weights of products, by their layout on the device; "" is the file's own."""
    dtypes: dict[str, set[str]] = {}
    for spec in specs:
        for node in spec.nodes:
            number = WEIGHTS.get(node.op)
            if number is not None:
                operand = node.inputs[number]
                weight = None if operand is None else operand.tensor
                if weight is not None and (node.op != "mul_mat" or weight.ne[2:] == (1, 1)):  # not keys or values
                    dtypes.setdefault(weight.layout, set()).add(weight.dtype)
    return {layout: sorted(names) for layout, names in sorted(dtypes.items())}


def _kernel(
    spec: Spec,
    named: Spec,
    kernels: Kernels,
    inputs: ReportInputs,
    counts: Sequence[Mapping[Spec, int]],
) -> dict[str, Any] | None:
    """Returns the row of a kernel; None if its HLO can't be emitted."""
    chip = inputs.chip
    work = kernels.work(spec, chip)
    hlo = kernels.hlo(spec)
    if work is None or hlo is None:
        return None
    time = of_work(work, chip)
    found = flops(hlo)
    products = {name: n for name, n in found.items() if name not in ("elementwise", "transcendental")}
    moved = work.read + work.written
    columns = sum(work.columns.values())
    needed = sum(products.values()) / (2 * PARTITIONS * PARTITIONS)
    streamed = moved / (chip.number("gb_per_s") * 1e3)
    bound = max(streamed, sum(n / peak(chip, dtype) for dtype, n in products.items()))
    return {
        "id": named.id,
        "title": inputs.titles.title(spec) or titles.title(named),
        "kind": "group" if isinstance(named, GraphSpec) else named.op,
        "nodes": max(1, len(named.nodes)),
        "computes": _described(named),
        "tensors": titles.tensors(named),
        "per_token": counts[0].get(spec, 0) if counts else None,
        "per_prompt": counts[-1].get(spec, 0) if counts else None,
        "flops": products,
        "elementwise": found["elementwise"] + found["transcendental"],
        "bytes": moved,
        "intensity": sum(products.values()) / moved if moved else 0.0,
        "bound": time.bound,
        "us": time.total,
        "lower_bound_us": bound,
        "padding": 1 - min(needed / columns, 1.0) if needed and columns else 0.0,
        "parts_us": {part: us for part, us in time.parts.items() if us},
        "measured_us": inputs.measured.get(named.id),
        "hlo_sha256": hashlib.sha256(hlo).hexdigest(),
    }


def _described(named: Spec) -> list[str]:
    """Returns the tensors of an op's kernel, or for a group the count of each op and the bytes of the bound tensors."""
    if isinstance(named, GraphSpec):
        counts = Counter(node.op for node in named.nodes)
        return [f"{count} {op}" for op, count in sorted(counts.items())] + [f"{sum(named.slots):,} bytes bound"]
    source = f"{named.source}: " if isinstance(named, SourceSpec) else ""
    return [f"{source}{named.description}"]
