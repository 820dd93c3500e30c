"""Groups of nodes that one kernel computes: which groups the backend finds in a graph, and that results equal the
nodes' own.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from programs import GROUPS, RANDOM, ROOT, Programs, build, built_tree, damage_pack, groups_manifest

from kernelgen import cli
from kernelgen.dispatch.grouping import Groups, UngroupedReason
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.manifest import load
from kernelgen.model.graph_ops import read_graphs
from kernelgen.spec.kernel import GraphSpec, TensorPlace

SHORTER = tuple(
    f"shorter-{name}"
    for name in (
        *("twice", "twice-1", "several-results", "cache", "unmasked", "reading"),
        *("attention-1x32", "attention-1x64", "attention-2x32", "tied"),
        *("softmax-1x32", "softmax-1x64", "softmax-2x32", "softmax-unmasked"),
    )
)
REFUSED = tuple(
    f"refused-{name}"
    for name in (
        "in-place",
        "scores",
        "columns",
        "unmasked-cells",
        "unmasked-scores",
        "cache-of-its-own",
        "end-of-cache",
    )
)
PIECES = tuple(
    f"pieces-{name}"
    for name in (
        *("mixed-plain", "heads-3", "twice", "twice-8", "several-results", "reading"),
        *("attention-5x32", "attention-5x64", "softmax-6x32", "softmax-6x64"),
    )
)
WHOLE_ONLY = tuple(
    f"pieces-{name}"
    for name in (
        *("mixed-rows", "mixed-row", "mixed-sum", "mixed-state"),
        *("unmasked", "softmax-unmasked", "cache", "in-place", "columns"),
    )
)
IN_ORDER = tuple(
    f"pieces-{name}"
    for name in (
        *("open-attention-5x32", "open-attention-5x64", "open-softmax-6x32", "open-softmax-6x64"),
        "computed-mask",
    )
)
CACHES = tuple(f"cells-{n_cell}{lengths}" for n_cell in (40, 64, 80, 256) for lengths in ("", "-1x32", "-5x32"))
TIED = ("tied-wiring", "tied-roots")
MUTATED = (
    *(
        f"mutated-{what}"
        for what in ("shape", "type", "parameters", "strides", "order", "op", "wiring", "memory", "roots", "written")
    ),
    *("escapes", "part-escapes", "middle-is-output", "ends-early"),
)
SCHEDULED = tuple(
    f"scheduled:{name}" for name in ("twice", "cache", "attention", "in-place", "several-results", "kept")
)

Compute = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def manifest(group_kernels: Path) -> Path:
    """Returns a manifest of the scenarios' groups and of each of their nodes."""
    return group_kernels.parent / "groups.yaml"


@pytest.fixture
def kernels(group_kernels: Path) -> Path:
    return group_kernels


@pytest.fixture(scope="module")
def first_cells(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with kernels for attention that reads all cells of its cache."""
    folder = tmp_path_factory.mktemp("cells")
    (folder / "cells.yaml").write_text(groups_manifest(programs, "cells-64"))
    build(folder / "cells.yaml", folder / "kernels")
    return folder / "kernels"


@pytest.fixture(scope="module")
def causal_kernels(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with kernels for groups of attention of 160 tokens that skip hidden cells of 320."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "hidden.yaml").write_text(groups_manifest(programs, "hidden"))
    build(folder / "hidden.yaml", folder / "kernels")
    return folder / "kernels"


@pytest.fixture(scope="module")
def compute(programs: Programs) -> Compute:
    """Returns a function that computes scenarios with the kernels of a folder."""

    def compute(folder: Path, *scenarios: str, **variables: str) -> subprocess.CompletedProcess[str]:
        chosen = {
            "GGML_NEURON_BUFFERS": "device",
            "GGML_NEURON_LOG": "1",
            "GGML_NEURON_KERNEL_DIR": folder,
            **variables,
        }
        command = [programs.find("groups"), "run", programs.find("libggml-neuron.so"), programs.llama_cpp, *scenarios]
        return subprocess.run(
            command, env=programs.environment(**chosen), capture_output=True, text=True, check=False, timeout=300
        )

    return compute


def expect_ok(result: subprocess.CompletedProcess[str], *scenarios: str) -> None:
    assert result.stdout.splitlines() == [f"{name}: ok" for name in scenarios], result.stderr


def groups_of(path: Path) -> set[GraphSpec]:
    (request,) = load([path], Catalog([builtin_library()]))
    return {kernel.spec for kernel in request.kernels if isinstance(kernel.spec, GraphSpec)}


# --- how a group is found ---------------------------------------------------------------------------------------------


def described(spec: GraphSpec) -> str:
    """Returns a group in the form that `groups words` reads."""

    def tensor(place: TensorPlace | None, t: TensorDesc) -> str:
        name = "own" if place is None else f"{'s' if place.slot else 'n'}{place.index}"
        return " ".join(map(str, (name, place.offset if place else 0, TYPES[t.dtype].number, *t.ne, *t.nb)))

    words = [str(len(spec.nodes))]
    for node in spec.nodes:
        inputs = ["-" if i is None else tensor(i.place, i.tensor) for i in node.inputs]
        params = " ".join(map(str, node.op_params))
        words += [node.op, str(int(node.escapes)), params, str(len(inputs)), *inputs, tensor(node.place, node.output)]
    return " ".join(words)


def test_words_are_the_golden_ones(programs: Programs) -> None:
    """The graphs lie at other addresses, and their slots begin at other offsets in their tensors."""
    vectors = json.loads((ROOT / "tests" / "data" / "bundle-graph-keys.json").read_text())
    known = [v for v in vectors if v["about"] != "custom op"]  # ggml can't have this one
    assert len(known) == len(vectors) - 1
    result = subprocess.run(
        [programs.find("groups"), "words"],
        input="".join(f"{described(GraphSpec.from_json(v['spec']))}\n" for v in known),
        env=programs.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    for vector, line in zip(known, result.stdout.splitlines(), strict=True):
        assert line.split() == vector["key"], vector["about"]


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_groups_compute_what_their_nodes_do(
    compute: Compute, manifest: Path, kernels: Path, buffers: str, tmp_path: Path
) -> None:
    graphs = tmp_path / "recorded.graphs"
    result = compute(kernels, *GROUPS, *RANDOM, GGML_NEURON_BUFFERS=buffers, GGML_NEURON_RECORD=str(graphs))
    expect_ok(result, *GROUPS, *RANDOM)
    grouped = re.search(r"(\d+) ops ran in groups, in (\d+) launches, (\d+\.\d) ops each", result.stderr)
    assert grouped and int(grouped[1]) > 2 * int(grouped[2]), result.stderr
    # `kernelgen coverage` finds the same groups; the program computed each graph several times
    found = [Groups(groups_of(manifest)).find(graph) for graph in read_graphs(graphs)]
    launches = sum(len(one.groups) for one in found)
    assert launches and int(grouped[1]) * launches == int(grouped[2]) * sum(one.nodes for one in found)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.stderr


@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_groups_of_fewer_tokens_and_cells_than_their_kernels(compute: Compute, kernels: Path, buffers: str) -> None:
    """Kernels for more tokens and cells compute them; the caches that they write have the same content."""
    names = (*SHORTER, "scheduled:shorter-twice", "scheduled:shorter-attention-1x32", "reused:shorter-attention-1x32")
    result = compute(kernels, *names, GGML_NEURON_BUFFERS=buffers)
    expect_ok(result, *names)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.stderr
    assert re.search(r"kernels for other numbers of tokens were launched \d+ times", result.stderr), result.stderr


@pytest.mark.parametrize("buffers", ["device", "host"])
def test_kernels_for_the_first_cells_serve_caches_of_any_length(
    compute: Compute, first_cells: Path, buffers: str
) -> None:
    """The caches are used in groups of their own lengths, of fewer tokens and cells, in pieces, and node by node. A
    shorter cache has memory behind it.
    """
    result = compute(first_cells, *CACHES, GGML_NEURON_BUFFERS=buffers)
    expect_ok(result, *CACHES)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.stderr


def test_a_cache_of_less_than_half_of_the_cells_of_kernels_has_no_memory_behind_it(
    compute: Compute, first_cells: Path
) -> None:
    result = compute(first_cells, "cells-31")
    expect_ok(result, "cells-31")
    assert "their group has no kernel for this many tokens and cells, nor for more" in result.stderr


def test_rows_beyond_the_first_cells_are_written_all_the_same(compute: Compute, first_cells: Path) -> None:
    """When row numbers change so that kernels lack some of the rows, the CPU writes these and no group is launched."""
    changing = [f"changing:{name}" for name in CACHES if not name.startswith(("cells-40", "cells-64"))]
    result = compute(first_cells, *changing)
    expect_ok(result, *changing)
    assert re.search(r"no kernel for|ops ran on the CPU instead of a NeuronCore", result.stderr), result.stderr


def test_a_kernel_for_all_of_a_cache_serves_longer_and_shorter_ones(compute: Compute, kernels: Path) -> None:
    """Kernels for one context length serve others: its cells are the first cells of longer caches; shorter ones have
    memory behind them.
    """
    names = [name for name in CACHES if name.startswith(("cells-64", "cells-80", "cells-256"))]
    result = compute(kernels, *names)
    expect_ok(result, *names)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.stderr


def test_groups_that_no_longer_kernel_computes(compute: Compute, kernels: Path) -> None:
    result = compute(kernels, *REFUSED)
    expect_ok(result, *REFUSED)
    reason = "their group has no kernel for this many tokens and cells, nor for more"
    assert re.search(rf"\d+ because {reason}", result.stderr), result.stderr


@pytest.mark.parametrize("buffers", ["device", "host"])
def test_groups_of_more_tokens_than_their_kernels(compute: Compute, kernels: Path, buffers: str) -> None:
    """Kernels for fewer tokens compute them in pieces; the caches that they write have the same content."""
    names = (*PIECES, "scheduled:pieces-twice", "scheduled:pieces-attention-5x32", "reused:pieces-attention-5x64")
    changing = ("changing:pieces-attention-5x32", "changing:pieces-softmax-6x64")
    result = compute(kernels, *names, *changing, GGML_NEURON_BUFFERS=buffers)
    expect_ok(result, *names, *changing)
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.stderr


def test_rows_that_pad_or_come_again_write_what_the_groups_own_rows_do(compute: Compute, kernels: Path) -> None:
    """On a device, rows that wrote different values to one place changed what others read. The fault `race` makes such
    a write lose the whole cache.
    """
    names = (*SHORTER, *PIECES, "scheduled:shorter-twice", "scheduled:pieces-twice")
    result = compute(kernels, *names, NEURON_SIMULATOR_FAULT="race")
    expect_ok(result, *names)
    assert re.search(r"kernels for other numbers of tokens were launched \d+ times", result.stderr), result.stderr


def looked_at(log: str) -> tuple[int, int]:
    """Returns how often masks and row numbers were read from the copy that the program wrote, and from the device."""
    found = re.search(r"the copy that the program wrote (\d+) times, and read from the device (\d+) times", log)
    assert found, log
    return int(found[1]), int(found[2])


def test_groups_that_are_found_before_a_graph_has_memory_are_not_looked_for_again(
    compute: Compute, kernels: Path
) -> None:
    result = compute(kernels, *SCHEDULED)
    expect_ok(result, *SCHEDULED)
    known = re.search(r"groups of (\d+) graphs were found before the graphs had memory", result.stderr)
    assert known and int(known[1]) >= len(SCHEDULED), result.stderr


def test_what_computes_an_op_is_found_once_for_all_that_ask(compute: Compute, kernels: Path) -> None:
    """The scheduler asks several times for each op of a graph, and the planner once more."""
    result = compute(kernels, *SCHEDULED)
    expect_ok(result, *SCHEDULED)
    asked = re.search(
        r"kernels of ops were searched (\d+) times, and taken from earlier searches (\d+) times", result.stderr
    )
    assert asked and 0 < 4 * int(asked[1]) < int(asked[2]), result.stderr


@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_kernels_that_leave_out_cells_are_for_masks_that_hide_them(
    compute: Compute, causal_kernels: Path, buffers: str
) -> None:
    """If a mask shows one of these cells, or the graph computes the mask, nodes are computed one by one."""
    names = ("hidden", "hidden-all", "hidden-fewer", "hidden-pieces", "hidden-seen", "hidden-computed")
    changing = ("changing:hidden", "changing:hidden-pieces", "changing:hidden-fewer")
    result = compute(causal_kernels, *names, *changing, GGML_NEURON_BUFFERS=buffers)
    expect_ok(result, *names, *changing)


def test_what_the_program_wrote_is_not_read_from_the_device(compute: Compute, kernels: Path) -> None:
    """Nothing is read back from memory that ggml's scheduler gives a graph. From other memory, only what was written
    before the first check is read.
    """
    scheduled = ("scheduled:pieces-attention-5x32", "scheduled:shorter-attention-1x32")
    result = compute(kernels, *scheduled)
    expect_ok(result, *scheduled)
    known, read = looked_at(result.stderr)
    # two computations: each checks a mask and row numbers, and a longer mask
    assert known >= 2 * 2 + 2 and read == 0

    name = "changing:pieces-attention-5x64"
    result = compute(kernels, name)
    expect_ok(result, name)
    # Seven computations write a mask and row numbers; row numbers are not checked where the mask is wrong.
    known, read = looked_at(result.stderr)
    assert read == 2 and known + read == 2 * 7


def test_masks_that_are_written_in_any_way(compute: Compute, kernels: Path) -> None:
    """The program writes them in whole or in part; copies from this core, another core and the host write them;
    launches write them.
    """
    name = "written:pieces-attention-5x32"
    result = compute(kernels, name, NEURON_RT_NUM_CORES="2")
    expect_ok(result, name)
    known, read = looked_at(result.stderr)
    assert known > 0 and read > 0  # what the program did not write


def test_groups_that_cannot_be_cut(compute: Compute, kernels: Path) -> None:
    result = compute(kernels, *WHOLE_ONLY)
    expect_ok(result, *WHOLE_ONLY)
    assert "the first see what later ones write" not in result.stderr
    for name in IN_ORDER:  # what depends on the mask is checked each time
        result = compute(kernels, name)
        expect_ok(result, name)
        reason = "their group is for fewer tokens, and earlier tokens read what later ones write"
        assert re.search(rf"\d+ because {reason}", result.stderr), result.stderr


@pytest.mark.parametrize(
    "seeds", [(0, 1), *(pytest.param(range(i, i + 5), marks=pytest.mark.long) for i in range(2, 42, 5))]
)
def test_random_graphs_of_random_lengths(
    programs: Programs, compute: Compute, tmp_path: Path, seeds: Sequence[int]
) -> None:
    """The kernels are for 6 tokens and 64 cells; groups of other lengths use these kernels or run node by node."""
    whole = [f"lengths-{seed}" for seed in seeds]
    manifest = tmp_path / "lengths.yaml"
    manifest.write_text(groups_manifest(programs, *whole))
    build(manifest, tmp_path / "kernels")
    random = Random(seeds[0])
    others = [f"{name}-{random.randint(1, 20)}x{random.choice((8, 40, 64))}" for name in whole for _ in range(3)]
    result = compute(tmp_path / "kernels", *whole, *others)
    expect_ok(result, *whole, *others)
    # Of the lengths that the kernels have, each group is one launch: three computations of two groups each.
    grouped = re.search(r"\d+ ops ran in groups, in (\d+) launches", result.stderr)
    assert grouped and int(grouped[1]) > 6 * len(whole), result.stderr


def test_threads_compute_groups_while_they_are_turned_off_and_on(compute: Compute, kernels: Path) -> None:
    names = ("threads:attention", "threads:shorter-softmax-1x32")
    expect_ok(compute(kernels, *names), *names)


def test_exact_kernels_alone(compute: Compute, kernels: Path) -> None:
    result = compute(kernels, "shorter-twice", GGML_NEURON_EXACT="1")
    assert result.stdout.splitlines() == ["shorter-twice: 0 groups were launched, not 6"]


def test_groups_in_memory_that_ggml_gives_out(compute: Compute, kernels: Path) -> None:
    """A group's inputs are kept until the group is computed; otherwise its results are stored apart from the inputs."""
    names = (*SCHEDULED, "scheduled:random-0", "scheduled:random-1", "reused:twice", "reused:kept", "reused:attention")
    expect_ok(compute(kernels, *names), *names)


def test_the_scheduler_keeps_what_a_group_reads(compute: Compute, kernels: Path) -> None:
    """The group writes its results in place. Without the scheduler they are stored apart and copied."""
    copied = "copies were added to keep results apart from inputs"
    result = compute(kernels, "scheduled:kept")
    expect_ok(result, "scheduled:kept")
    assert copied not in result.stderr
    result = compute(kernels, "reused:kept")
    expect_ok(result, "reused:kept")
    assert copied in result.stderr


def test_what_differs_in_anything_is_not_the_group(
    compute: Compute, manifest: Path, kernels: Path, tmp_path: Path
) -> None:
    graphs = tmp_path / "recorded.graphs"
    result = compute(kernels, *MUTATED, GGML_NEURON_RECORD=str(graphs))
    expect_ok(result, *MUTATED)
    # `kernelgen coverage` finds the same reasons; its numbers of nodes differ, because kernels for more tokens also
    # serve groups.
    groups = Groups(groups_of(manifest))
    counts = Counter(why for graph in read_graphs(graphs) for _, why in groups.find(graph).outside)
    said = {why: re.search(rf"(\d+) because {why.words}", result.stderr) for why in UngroupedReason}
    assert all(said.values()) and counts.keys() == said.keys(), result.stderr


def test_one_tensor_is_several_slots_of_a_kernel(
    compute: Compute, manifest: Path, kernels: Path, tmp_path: Path
) -> None:
    """A loaded model may have one tensor where another model has several, such as rope's factors of each layer."""
    graphs = tmp_path / "recorded.graphs"
    expect_ok(compute(kernels, *TIED, GGML_NEURON_RECORD=str(graphs)), *TIED)
    groups = Groups(groups_of(manifest))
    assert [groups.find(graph).outside for graph in read_graphs(graphs)] == [()] * len(TIED)


def test_a_program_that_looks_at_nodes_sees_what_they_compute(compute: Compute, kernels: Path) -> None:
    names = ("watched", "watched-products", "watched-elsewhere")
    expect_ok(compute(kernels, *names), *names)


def test_groups_can_be_turned_off(compute: Compute, kernels: Path) -> None:
    result = compute(kernels, "hit", GGML_NEURON_FUSION="0")
    expect_ok(result, "hit")  # the scenario turns groups on
    result = compute(kernels, "off:hit", GGML_NEURON_FUSION="0")
    expect_ok(result, "off:hit")


def test_a_group_whose_kernel_cannot_be_used_is_computed_node_by_node(
    compute: Compute, kernels: Path, tmp_path: Path
) -> None:
    tree = built_tree(kernels)
    index = json.loads((tree / "index.json").read_text())
    (neff,) = {
        k["neff"]
        for k in index["kernels"]
        if k["id"].startswith("graph-3-rms_norm-mul-mul_mat")
        and "4,1,1)/f32" in str(k["spec"])
        and "(64,1,1,1)" in str(k["spec"])
    }
    pack = damage_pack(kernels, tmp_path / "groups.kernels.gguf", [tree / neff])
    result = compute(pack, "apart:twice")
    expect_ok(result, "apart:twice")
    assert "its NEFF is damaged" in result.stderr
    assert re.search(r"\d+ because their group's kernel can't be used", result.stderr), result.stderr


def test_a_bundle_of_groups_alone(compute: Compute, programs: Programs, manifest: Path) -> None:
    """The device takes nodes for which only their groups have kernels."""
    text = manifest.read_text()
    groups = text[text.index("graphs:\n") :].replace("    outputs: ", "    fallback: false\n    outputs: ")
    alone = manifest.parent / "alone.yaml"
    alone.write_text(f"format: 1\nname: alone\ntargets: [{programs.target}]\n{groups.split('  - name: between')[0]}")
    build(alone, manifest.parent / "alone")
    for name in ("twice", "shorter-twice", "pieces-twice"):
        result = compute(manifest.parent / "alone", f"alone:{name}")
        expect_ok(result, f"alone:{name}")
        assert " 0 ops ran on the CPU instead of a NeuronCore" in result.stderr
    result = compute(manifest.parent / "alone", "scheduled:shorter-twice", GGML_NEURON_EXACT="1")
    assert result.stdout.splitlines() == ["scheduled:shorter-twice: 0 groups were launched, not 4"]


# --- recorded graphs ----------------------------------------------------------------------------------------------------------

# The graphs of these scenarios are one group each.
WHOLE = ("hit", "cache", "attention", "in-place", "views", "square")


def test_a_recorded_graph_is_the_group_that_the_backend_looks_for(
    compute: Compute, programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in WHOLE:
        graphs = tmp_path / f"{name}.graphs"
        for _ in range(2):  # the second process writes the same graphs again
            compute(Path(), name, GGML_NEURON_KERNEL_DIR="", GGML_NEURON_RECORD=str(graphs))
        head, *lines = graphs.read_text().splitlines()
        assert head.startswith('{"format":"neuron-kernelgen graphs"') and len(lines) == 2 * len(set(lines)), name
        written, wanted = tmp_path / f"{name}.yaml", tmp_path / f"{name}-group.yaml"
        assert cli.run(["model", str(graphs), "--fuse", "step", "-o", str(written), "--target", programs.target]) == 0
        assert "1 group of nodes as one kernel each" in capsys.readouterr().out
        wanted.write_text(groups_manifest(programs, name))
        assert groups_of(written) == groups_of(wanted), name


def test_a_file_that_is_not_a_recording_is_not_written_to(compute: Compute, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    for text, said in (
        ("[]\n", f"{path} exists and is not a recording of graphs"),
        (None, f"{tmp_path}/no/where can't"),
    ):
        if text is not None:
            path.write_text(text)
        file = path if text is not None else tmp_path / "no" / "where"
        log = compute(Path(), "hit", GGML_NEURON_KERNEL_DIR="", GGML_NEURON_RECORD=str(file)).stderr
        assert log.count(f"ggml-neuron: GGML_NEURON_RECORD: {said}") == 1, log
        assert text is None or path.read_text() == text
