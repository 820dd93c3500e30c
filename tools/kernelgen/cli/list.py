"""`kernelgen list`: the valid ops, targets and dtypes of a manifest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from kernelgen.cli import options
from kernelgen.emitters.catalog import Catalog
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.types import GROUPS, TYPES
from kernelgen.targets import TARGETS

ARCHITECTURES = Path(ggml_ops.__file__).with_name("architectures.json")


@click.command("list", short_help="Print the ops, targets and dtypes that kernelgen supports.")
@click.option(
    "--ops", is_flag=True, help="The ops: inputs, types, parameters, emitter, and the model families that need them."
)
@click.option("--targets", is_flag=True, help="The Neuron targets.")
@click.option("--dtypes", is_flag=True, help="ggml's tensor types.")
@options.kernels_option
@click.option("--json", "output_format", flag_value="json", help="The same as --format json.")
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(ops: bool, targets: bool, dtypes: bool, catalog: Catalog, output_format: str) -> None:
    """Print the ops, targets and dtypes that kernelgen supports. Without an option, print all three."""
    everything = not (ops or targets or dtypes)
    parts: dict[str, list[dict[str, Any]]] = {}
    if ops or everything:
        parts["ops"] = _ops(catalog)
    if targets or everything:
        parts["targets"] = [
            {
                "name": t.name,
                "neuron_core": t.neuron_core,
                "cores_per_chip": t.cores_per_chip,
                "lnc": t.lnc,
                "lnc_choices": list(t.lnc_choices),
                "memory_per_compile_mb": t.memory_per_compile_mb,
                "experimental": t.experimental,
            }
            for t in TARGETS.values()
        ]
    if dtypes or everything:
        parts["dtypes"] = [
            {"name": t.name, "number": t.number, "block": t.block, "bytes": t.size, "quantized": t.quantized}
            for t in TYPES.values()
        ]
    if output_format == "json":
        click.echo(json.dumps(parts, indent=1))
        return
    blocks = []
    if "ops" in parts:
        total = len({name for names in architectures().values() for name in names})
        header = "op  inputs  dtypes  emitter  families  parameters"
        blocks.append(_table(header, (_op_row(op, total) for op in parts["ops"])))
    if "targets" in parts:
        blocks.append(_table("target  NeuronCore  cores per chip  --lnc  note", map(_target_row, parts["targets"])))
    if "dtypes" in parts:
        rows = ((t["name"], t["block"], t["bytes"]) for t in parts["dtypes"])
        blocks.append(_table("dtype  elements per block  bytes per block", rows))
    click.echo("\n\n".join(blocks))


def _ops(catalog: Catalog) -> list[dict[str, Any]]:
    needed = architectures()
    found = []
    for name in sorted({*ggml_ops.OPS, *catalog.by_op}):
        library, registration = catalog.by_op.get(name, (None, None))
        op = catalog.op(name)
        assert op is not None
        params = ggml_ops.OPS[name].params if name in ggml_ops.OPS else registration.params if registration else ()
        found.append(
            {
                "name": name,
                "ggml": not op.custom,
                "inputs": [{"name": text, "optional": i >= op.required} for i, text in enumerate(op.inputs)],
                "params": [{"name": p.name, "kind": p.kind.__name__, "default": p.default} for p in params],
                "emitter": f"{library.name}/{registration.module}.py" if library and registration else None,
                "types": [[list(names) for names in row] for row in registration.types] if registration else [],
                "families": needed.get(name, []),
            }
        )
    return found


def architectures() -> dict[str, list[str]]:
    """Returns llama.cpp's model architectures that need an op, by op.

    The table is recorded by running them (`./bazelw run //tools/llama_cpp:models -- --write-page`).
    """
    found: dict[str, list[str]] = json.loads(ARCHITECTURES.read_text(encoding="utf-8"))
    return found


def _types(rows: Sequence[Sequence[Sequence[str]]]) -> str:
    """Returns the types of each input over all rows, with groups of types by name."""
    columns: list[dict[str, None]] = []
    for row in rows:
        for i, names in enumerate(row):
            if i == len(columns):
                columns.append({})
            columns[i].update(dict.fromkeys(names))
    return " ".join(_short(column) for column in columns)


def _short(names: Iterable[str]) -> str:
    left = dict.fromkeys(names)
    parts = []
    for group in ("any", "number", "float", "quantized", "quantizable"):
        if all(name in left for name in GROUPS[group]):
            parts.append(group)
            left = {name: None for name in left if name not in GROUPS[group]}
    return "|".join([*parts, *left])


def _families(names: Sequence[str], total: int) -> str:
    if len(names) <= 4:
        return " ".join(names) or "-"
    return "all" if len(names) == total else f"{' '.join(names[:3])} and {len(names) - 3} more"


def _op_row(op: dict[str, Any], total: int) -> tuple[str, ...]:
    inputs = " ".join(f"[{i['name']}]" if i["optional"] else i["name"] for i in op["inputs"])
    params = " ".join(p["name"] if p["default"] is None else f"{p['name']}={p['default']:g}" for p in op["params"])
    families = _families(op["families"], total)
    return op["name"], inputs, _types(op["types"]) or "-", op["emitter"] or "-", families, params


def _target_row(target: dict[str, Any]) -> tuple[str, ...]:
    lnc = ", ".join(f"{n} (default)" if n == target["lnc"] else str(n) for n in target["lnc_choices"])
    note = "experimental: not documented by AWS as a --target" if target["experimental"] else ""
    return target["name"], f"v{target['neuron_core']}", str(target["cores_per_chip"]), lnc, note


def _table(header: str, rows: Iterable[Sequence[object]]) -> str:
    table = [header.split("  "), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table)
