"""What the backend records: the graphs of GGML_NEURON_RECORD, and the nodes that GGML_NEURON_LOG=2 names."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from kernelgen import cli
from kernelgen.emitters.catalog import Catalog
from kernelgen.model import graph_ops
from kernelgen.model.graphs import GraphReader
from kernelgen.model.reasons import Reasons
from kernelgen.model.writing import param_text
from kernelgen.spec.kernel import KernelSpec

_MISSING = re.compile(r"ggml-neuron: no kernel for (\{.*\})$")


def manifest_of(recording: Path, target: str) -> Path:
    """Writes the manifest of a recording beside it; returns its path.

    Raises:
        RuntimeError: there is no kernel to build.
    """
    path = recording.with_suffix(".yaml")
    with contextlib.redirect_stdout(io.StringIO()):
        status = cli.run(["model", str(recording), "-o", str(path), "--target", target])
    if status:
        raise RuntimeError(f"kernelgen model {recording}: exit status {status}")
    return path


def requested(recording: Path) -> set[KernelSpec]:
    """Returns the kernels of the ops of a recording."""
    return {spec for spec, _, _ in graph_ops.read(recording)}


def missing_of(line: str, catalog: Catalog) -> tuple[str, str | None] | None:
    """Returns the node without a kernel that a line of the log names, as an entry of a manifest, and why no kernel can be built;
    None for another line.
    """
    match = _MISSING.search(line)
    if match is None:
        return None
    (graph,) = GraphReader([match[1].encode()], "log").graphs()
    (node,) = graph.nodes
    try:
        spec = node.spec()
    except ValueError as error:
        return f"{node.op}: {[t and t.ne for t in (*node.inputs, node.output)]}", str(error)
    inputs = ["null" if t is None else f'"{t}"' for t in spec.inputs]
    fields = [f'op: "{spec.op}"', f"inputs: [{', '.join(inputs)}]", f'output: "{spec.output}"']
    if spec.params:
        fields.append(f"params: {{{', '.join(f'{name}: {param_text(value)}' for name, value in spec.params)}}}")
    if spec.alias is not None:
        fields.append(f"alias: {spec.alias}")
    return f"{{{', '.join(fields)}}}", Reasons(catalog).of_spec(spec)
