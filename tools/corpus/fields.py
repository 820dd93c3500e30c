"""The known fields of a NEFF: every field in the public NEFFs of docs/results/real-artifacts.md, with its meaning.

`survey.py` reports a field that is not listed here as a field without a name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kernelgen.neff import container, description

INFO = {
    "tool_version": "the compiler's version",
    "kelp_version": "Dynamic in all",
    "name": "the path of the output in the compiler's command",
    "num_tpb": "1 in all",
    "num_tpb_requested": "1 in all",
    "num_tpb_per_node": "64 counts: 1, then 0",
}
KELF = {
    "graphs": "a name and a definition for each physical core",
    "version": "0.5 in all",
    "target": "the device",
    "revision": "empty; from 2.24 on",
}
GRAPH = {
    "nodes": "a node for each input, and one that calls the device",
    "arg_nodes": "numbers of the inputs' nodes",
    "heads": "the results",
    "attrs": "shape, storage_id and dltype of what the nodes give",
    "node_row_ptr": "where each node's results begin among these",
    "metadata": "signatures: the inputs by name; the outputs are left out",
}
DEFINITION = {
    "name": "definition in all",
    "version": "0.6 in all",
    "neff_features": "names of the header's feature bits",
    "var": "what is read and written, by name",
    "debug_info": "empty in all",
    "dma_dbg": "files of debug information",
    "dma_queue": "queues of copies, their owners and semaphores",
    "cc_streams": "streams of collective communication",
    "fp8_conversion_config": "how 8-bit floats are converted",
    "runtime_event_count": "events that the runtime keeps",
    "runtime_semaphore_count": "semaphores that the runtime keeps",
    "runtime_statebuffer_reservation": "state buffer that the runtime keeps",
    "ucode_lib": "code of custom ops",
    "#rank_world_size": "0 in all",
    **dict.fromkeys(("act", "dve", "pe", "pool", "sp"), "the engine's file"),
    **{f"{engine}_instr": "the engine's instructions" for engine in ("act", "dve", "pe", "pool", "sp")},
    **{f"{engine}_dbg": "files of debug information" for engine in ("act", "dve", "pe", "pool", "sp")},
    **{f"{engine}_asm_dbg": "files of debug information" for engine in ("act", "dve", "pe", "pool", "sp")},
}
VARIABLES = {
    "input": {"ops", "size", "type", "var_id"},
    "output": {"ops", "size", "type", "var_id"},
    "virtual": {"backing_variable_off", "fabric_path", "ops", "size", "type", "var_id"},
    "file": {"alignment", "fabric_path", "file_name", "ops", "size", "type", "var_id"},
    "pointer": {"ops", "referenced_var_id", "size", "type", "var_id"},
    "state-buffer": {"type", "var_id"},
    "remote": {"type", "var_id"},
    "dge-table": {"list", "type", "var_id"},
}
TENSOR = {
    "dtype": "the element type, as NumPy names it",
    "is_const": "whether it is a constant of the NEFF",
    "kind": "input or output",
    "layer_name": "its name",
    "tf_shape": "its shape",
    "tf_format": "a letter for each dimension",
    "tf_file": "the file of its value",
    "sim_shape": "its shape for AWS's own simulator",
    "sim_format": "a letter for each of these",
    "split_axis": "how a constant is cut into files",
    "split_indices_or_sections": "the same",
    "split_npys": "the same",
}

MEMBERS = {
    r"info\.json": INFO,
    r"kelf-0\.json": KELF,
    r"neff\.json": GRAPH,
    r"sg\d\d/def\.json": DEFINITION,
    r"sg\d\d/tensor_map\.json": "types and shapes",
    r"hlo_stats\.json": "sizes and counts of the HLO",
    r"metrics\.json": "estimates; up to 2.18",
    r"(.*/)?(kernel_)?debug_info.*|.*\.klir\.debuginfo\.json": "debug information",
    r"sg\d\d/(PE|Pool|Activation|DVE|SP)0?\.(bin|json)": "an engine's instructions and copies; with a 0 from 2.24 on for trn3",
    r"sg\d\d/act_info\.json|sg\d\d/\w+_and_\w+(\.json|_bkt\.bin|_ctrl\.bin)": "tables of the activation functions",
    r"sg\d\d/default_(control|control_fast|control_slow|datapath|opcode)_table\.bin": "tables of the vector engine",
    r"sg\d\d/value_.*\.npy": "a constant",
    r"sg\d\d/ucode_lib\.json|sg\d\d/libbuiltincustomop_cpu\d\.stripped\.so": "code of custom ops",
    r"hlo_module\.pb|simulated\.json": "of a simulated NEFF",
}


def unnamed(data: bytes) -> Iterator[str]:
    """Yields the fields of a NEFF that are not listed above: of its header, its members, and the contents of known members.

    Raises:
        KernelgenError: it can't be read.
    """
    header = container.read_header(data)
    if any(data[556 : container.HEADER_SIZE]):
        yield "bytes after the header's lnc_size"
    if not header.simulated and any(header.hash[16:]):
        yield "the second half of the header's hash"
    if header.build_version and not header.simulated:
        yield "the header's build_version is not empty"
    for name, content in container.unpack(data, only=lambda name: name.endswith(".json") or not _named(name)).items():
        known = _named(name)
        if known is None:
            yield f"member {name}"
        elif isinstance(known, Mapping):
            value = json.loads(content)
            yield from (f"{_short(name)}: {field}" for field in value.keys() - known.keys())
            yield from _inside(name, value)
        elif name.endswith(f"/{container.TENSOR_MAP}"):
            for tensor in json.loads(content).values():
                yield from (f"{container.TENSOR_MAP}: {field}" for field in tensor.keys() - TENSOR.keys())


def _named(name: str) -> Mapping[str, str] | str | None:
    return next((known for pattern, known in MEMBERS.items() if re.fullmatch(pattern, name)), None)


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _inside(name: str, value: dict[str, Any]) -> Iterator[str]:
    if name == container.KELF_MEMBER:
        for graph in value["graphs"]:
            yield from (f"{name}: graphs: {field}" for field in graph.keys() - {"name", "definition"})
    elif name.endswith(f"/{container.DEFINITION}"):
        for variable in value["var"].values():
            kind = variable["type"]
            extra = variable.keys() - VARIABLES.get(kind, set())
            yield from (f"{container.DEFINITION}: var of type {kind}: {field}" for field in extra)


def unnamed_bits(said: description.NeffDescription) -> tuple[str, ...]:
    """Returns the feature bits without a name, as numbers."""
    return tuple(text for text in said.features if text.startswith("0x"))
