"""Measures deriving manifests from the headers of published models, in CPU s and MiB, against export-graphs alone.

    ./bazelw run //benchmarks:derive_manifests

`kernelgen model` runs for each model as for a user, on one core. The lower bound in the same run is export-graphs
alone, with the arguments that `kernelgen model` gave it. The program prints time and memory, the number of kernels in
the manifests, and what has no kernel in them: nodes of all graphs that a run can have, as `kernelgen coverage` lists
them, and ops of the exports of test-export-graph-ops in tests/data/graph-ops. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
import usage
from backend_programs import KERNELGEN, ROOT, Programs, environment

MODELS = ("Llama-3-8B", "Qwen3-8B", "Gemma-2-2B", "Mixtral-8x7B")

SECONDS = 2.0
"""The limit of CPU seconds to derive one manifest; on one core, wall time is the same except for other work on the machine."""

PEAK_MIB = 100.0
"""The limit of the largest process's peak memory."""

RUNS = 3
"""The number of runs; the quickest counts."""

# In a separate process: the measuring process must stay small (`usage.Usage.peak_mb`).
WRITE_HEADERS = """
import sys
from pathlib import Path
from published import MODELS
from published.header import write
for name in sys.argv[2:]:
    write(MODELS[name](), Path(sys.argv[1]) / f"{name}.gguf")
"""

# Runs a program, and stores its arguments for a second run.
RECORD_ARGUMENTS = """\
#!/bin/sh
for argument; do printf '%s\\0' "$argument"; done >"{log}"
exec "{program}" "$@"
"""


def model(file: Path, output: Path, programs: Programs, runs: int = RUNS) -> Iterator[figures.Figure]:
    """Yields the costs of deriving a model's manifest, and writes the manifest to `output`."""
    name = file.stem
    command = [*KERNELGEN, "model", file, "-o", output, "--ftype", "F16", f"--llama-cpp={programs.libraries}"]
    command += ["--fuse", "none"]
    log, recorder = output.with_suffix(".arguments"), output.with_suffix(".sh")
    recorder.write_text(RECORD_ARGUMENTS.format(log=log, program=programs.exporter))
    recorder.chmod(0o755)
    said = usage.run([*command, f"--exporter={recorder}"], env=environment()).output
    arguments = log.read_text().split("\0")[:-1]
    alone = ["sh", "-c", 'exec "$0" "$@" >/dev/null', programs.exporter, *arguments]
    with_libraries = environment(LD_LIBRARY_PATH=str(programs.libraries))
    least = min((usage.run(alone, env=with_libraries) for _ in range(runs)), key=lambda u: u.cpu_seconds)
    whole = [usage.run([*command, f"--exporter={programs.exporter}"], env=environment()) for _ in range(runs)]
    best = min(whole, key=lambda u: u.cpu_seconds)
    kernels, entries = map(int, re.findall(r"^(\d+) kernels? in (\d+) entr", said, re.MULTILINE)[0])
    yield figures.Figure(
        f"{name}: deriving, CPU time",
        best.cpu_seconds,
        "s",
        kernels,
        figures.Peer("export-graphs alone", least.cpu_seconds),
        limit=figures.Limit("value", at_most=SECONDS),
    )
    yield figures.Figure(
        f"{name}: deriving", best.seconds, "s", kernels, figures.Peer("export-graphs alone", least.seconds)
    )
    peak = max(u.peak_mb for u in whole) * 1e6 / 2**20
    yield figures.Figure(
        f"{name}: peak memory",
        peak,
        "MiB",
        kernels,
        figures.Peer("export-graphs alone", least.peak_mb * 1e6 / 2**20),
        limit=figures.Limit("value", at_most=PEAK_MIB),
    )
    yield figures.Figure(f"{name}: kernels", kernels, "kernels", peer=figures.Peer("entries of the manifest", entries))


def coverage(manifest: Path, *arguments: object) -> list[dict[str, Any]]:
    """Returns the report of `kernelgen coverage` for each export or model."""
    # It exits with 1 if something has no kernel, which is a figure here.
    command = [*KERNELGEN, "coverage", manifest, *arguments, "--format", "json"]
    done = usage.run(["sh", "-c", '"$0" "$@" || [ $? = 1 ]', *command], env=environment())
    found: list[dict[str, Any]] = json.loads(done.output)["graphs"]
    return found


def graphs(file: Path, manifest: Path, programs: Programs) -> figures.Figure:
    """Returns the number of nodes without a kernel in all graphs that a run of the model can have."""
    (found,) = coverage(manifest, "--model", file, "--ftype", "F16", *programs.options())
    steps = found["steps"]
    nodes = sum(step["nodes"] for step in steps)
    without = nodes - sum(step["covered"] for step in steps)
    what = f"{file.stem}: nodes without a kernel, of {len(steps)} graphs"
    return figures.Figure(
        what, without, "nodes", peer=figures.Peer("nodes", nodes), limit=figures.Limit("value", at_most=0)
    )


def exports(manifests: Mapping[str, Path], folder: Path) -> Iterator[figures.Figure]:
    """Yields the number of ops without a kernel in their model's manifest, for each export of test-export-graph-ops."""
    for name, manifest in manifests.items():
        for file in sorted(folder.glob(f"{name}.*flash-attn.txt")):
            (found,) = coverage(manifest, "--graph-ops", file)
            ops = figures.Peer("ops", len(found["covered"]) + len(found["missing"]))
            flash = "without" if file.name.endswith(".no-flash-attn.txt") else "with"
            what = f"{name}, {flash} flash attention: ops without a kernel"
            yield figures.Figure(what, len(found["missing"]), "ops", peer=ops, limit=figures.Limit("value", at_most=0))


def measure(quick: bool) -> Iterator[figures.Figure]:
    """Yields the figures of each model, and of the exports."""
    programs, models, runs = Programs.find(), MODELS[: 1 if quick else None], 1 if quick else RUNS
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        usage.run([sys.executable, "-P", "-c", WRITE_HEADERS, folder, *models], env=environment())
        for one in models:
            file, manifest = folder / f"{one}.gguf", folder / f"{one}.yaml"
            yield from model(file, manifest, programs, runs)
            yield graphs(file, manifest, programs)
        data = ROOT / "tests" / "data" / "graph-ops"
        ready = {path.stem: path for path in sorted(data.glob("*.yaml"))}
        yield from exports({"llama3-8b-f16": ROOT / "manifests" / "llama3.yaml"} | ready, data)


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
