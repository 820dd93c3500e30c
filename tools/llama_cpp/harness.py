"""Runs llama.cpp's programs on a simulated NeuronCore: builds the kernels that they need, and reads what the backend prints.

The suites of this folder and tests use it. It finds programs beside this file, where Bazel puts them, or where
LLAMA_CPP_PROGRAMS, GGML_NEURON_PLUGIN, GGML_NEURON_LIBNRT and the other variables name them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import recordings

import kernelgen
from kernelgen import cli, manifest
from kernelgen.bundle import build as bundles
from kernelgen.bundle.contents import pack_name
from kernelgen.compilers.base import refuse_unsupported
from kernelgen.compilers.choice import Simulator
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.errors import KernelgenError
from kernelgen.lowering import emission
from kernelgen.neff import container
from kernelgen.plan import Entry, Kernel, Plan, Request
from kernelgen.targets import INSTANCES

ROOT = Path(__file__).parents[2]
DOCS = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ROOT)) / "docs"
DEVICE = "NEURON0"
WAIT = "1800"
"""Seconds that a simulated core waits for the others (NEURON_RT_EXEC_TIMEOUT); on a busy machine, they may only be late."""

ON_THE_CPU = {"GET_ROWS"}
"""llama.cpp keeps the embedding of the input tokens on the CPU."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def target() -> str:
    """Returns the target of the kernels and of the simulated machine: KERNELGEN_TEST_TARGET, or trn1."""
    return os.environ.get("KERNELGEN_TEST_TARGET") or "trn1"


# --- programs --------------------------------------------------------------------------------------------------------------


def built(variable: str, place: str) -> Path:
    """Returns the path in a variable of the environment, or the place below this folder where Bazel puts a program."""
    return Path(os.environ.get(variable, Path(__file__).parent / place)).absolute()


def exporter() -> Path:
    return built("NEURON_KERNELGEN_EXPORTER", "../../backend/exporter/exporter/export-graphs")


@dataclass(frozen=True)
class Programs:
    """The binaries built from C and C++.

    Attributes:
        llama_cpp: the folder with llama.cpp's programs and libraries.
        plugin: the dynamically loaded backend.
        libnrt: the simulator.
        load_backends: a library to preload into a program that does not load backends itself.
        compiled: a cache folder for what XLA compiles, shared by all programs; None for none.
    """

    llama_cpp: Path
    plugin: Path
    libnrt: Path
    load_backends: Path
    compiled: Path | None = None

    @staticmethod
    def find(there: Callable[[Path, str], Path] | None = None) -> Programs:
        """Returns the programs that Bazel built or that the environment names.

        Args:
            there: returns the path of a program, given its default path and its variable; it handles a missing program.

        Raises:
            FileNotFoundError: a program is missing.
        """
        there = there or (lambda place, variable: built(variable, str(place)))
        here = Path(__file__).parent
        programs = Programs(
            llama_cpp=there(here / "llama_cpp", "LLAMA_CPP_PROGRAMS"),
            plugin=there(ROOT / "backend/ggml-neuron/test_programs/libggml-neuron.so", "GGML_NEURON_PLUGIN"),
            libnrt=there(ROOT / "backend/simulator/libnrt.so.1", "GGML_NEURON_LIBNRT"),
            load_backends=there(here / "libload_backends.so", "LLAMA_LOAD_BACKENDS"),
        )
        for path in (programs.llama_cpp / "test-backend-ops", programs.plugin, programs.libnrt, programs.load_backends):
            if not path.exists():
                raise FileNotFoundError(f"{path} is not there; run this through Bazel")
        return programs

    def environment(
        self,
        *,
        kernels: Path | Iterable[Path] = (),
        record: Path | None = None,
        buffers: str | None = None,
        log: int = 0,
        cores: int = 1,
    ) -> dict[str, str]:
        """Returns the environment in which a program has the device.

        Args:
            kernels: folders with packs; none by default.
            record: the file in which the backend records graphs.
            buffers: `device` or `host`: the memory of tensors; the backend chooses by default.
            log: the level of the backend's log on stderr.
            cores: the number of NeuronCores.
        """
        folders = [kernels] if isinstance(kernels, Path) else list(kernels)
        variables = {
            "GGML_BACKEND_PATH": self.plugin,
            "GGML_NEURON_LIBNRT": self.libnrt,
            "GGML_NEURON_KERNEL_DIR": ":".join(map(str, folders)),
            "GGML_NEURON_RECORD": record,
            "GGML_NEURON_BUFFERS": buffers,
            "GGML_NEURON_LOG": int(log),
            "NEURON_SIMULATOR_PYTHON": sys.executable,
            "NEURON_SIMULATOR_PATH": Path(kernelgen.__file__).parents[1],
            "NEURON_SIMULATOR_INSTANCE": {instance.target: instance.name for instance in INSTANCES}[target()],
            "NEURON_SIMULATOR_CACHE": self.compiled,
            "NEURON_RT_NUM_CORES": cores,
        }
        return without_device(os.environ) | {name: str(value) for name, value in variables.items() if value}

    def run(
        self,
        program: str,
        *arguments: object,
        environment: dict[str, str],
        preload: bool = False,
        timeout: float = 3600,
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of llama.cpp's programs and returns the completed process, with stdout and stderr apart.

        Args:
            program: its name.
            *arguments: its arguments.
            environment: see `environment`.
            preload: whether to preload the loader of backends; test-llama-archs loads none itself.
            timeout: seconds.
        """
        if preload:
            environment = {**environment, "LD_PRELOAD": str(self.load_backends)}
        return run([self.llama_cpp / program, *arguments], environment, timeout=timeout)


def without_device(environment: Iterable[str] | dict[str, str]) -> dict[str, str]:
    """Returns an environment without the variables of the backend and of the Neuron runtime: programs run on the CPU."""
    return {name: value for name, value in dict(environment).items() if not name.startswith(("GGML_", "NEURON_"))}


def run(command: Sequence[object], environment: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program without input and returns the completed process, with stdout and stderr apart."""
    options = {"capture_output": True, "text": True, "errors": "replace", "stdin": subprocess.DEVNULL} | options
    return subprocess.run(list(map(str, command)), env=environment, check=False, **options)


# --- kernels ---------------------------------------------------------------------------------------------------------------


@dataclass
class BuiltPack:
    """The outcome of building a pack.

    Attributes:
        languages: the number of kernels in each language.
        refused: why a kernel is not in the pack: its emitter, or the lint, does not support it.
        failed: the error of each kernel that should have been built and was not.
    """

    languages: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def kernels(self) -> int:
        return self.languages.total()


class Builder:
    """Builds packs of kernels in this process, in the form of `kernelgen build`, and keeps the HLO that it emitted.

    It does not compile: a program that loads a kernel compiles the same HLO. A kernel that does not load fails there.
    """

    def __init__(self) -> None:
        self.catalog = Catalog([builtin_library()])
        self.identity = Simulator().identity
        self.lock = threading.RLock()
        self._hlos: dict[str, bytes] = {}

    def load(self, *files: Path) -> Request:
        """Returns the kernels of manifests in one request for this target."""
        requests = [manifest.load([file], self.catalog)[0] for file in files]
        return replace(
            requests[0],
            kernels=tuple(kernel for request in requests for kernel in request.kernels),
            configs=tuple(config for config in requests[0].configs if config.target == target()),
            special=tuple(special for request in requests for special in request.special),
        )

    def read(
        self, entries: Sequence[str], languages: Sequence[str] = ()
    ) -> tuple[dict[str, Kernel], Request | None, dict[str, str]]:
        """Returns the kernel of each manifest entry, all of them as a request, and why other entries have no kernel."""
        refused: dict[str, str] = {}
        head = ["format: 1", "name: group", f"targets: [{target()}]"]
        head += [f"languages: [{', '.join(languages)}]"] if languages else []
        head.append("kernels:")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "group.yaml")
            while rest := [entry for entry in entries if entry not in refused]:
                file.write_text("\n".join([*head, *(f"  - {entry}" for entry in rest), ""]))
                try:
                    request = self.load(file)
                except KernelgenError as error:
                    for diagnostic in error.diagnostics:
                        if diagnostic.location is None or diagnostic.location.line <= len(head):
                            raise
                        refused.setdefault(rest[diagnostic.location.line - len(head) - 1], diagnostic.message)
                else:
                    return dict(zip(rest, request.kernels, strict=True)), request, refused
        return {}, None, refused

    def emit(self, kernel: Kernel) -> bytes:
        """Returns a kernel's HLO.

        Raises:
            KernelgenError: its emitter does not support it.
        """
        if kernel.id not in self._hlos:
            emitters = self.catalog.emitters(kernel)
            self._hlos[kernel.id] = emission.emit(emitters, kernel.spec, targets=kernel.targets).hlo
        return self._hlos[kernel.id]

    def pack(self, request: Request, folder: Path) -> BuiltPack:
        """Writes a pack of a request's kernels into a folder; none if no kernel is supported."""
        folder.mkdir(parents=True, exist_ok=True)
        plan = Plan.merge([request])
        planned = plan.entries(plan.bundles[0])
        kernels = {kernel.id: kernel for kernel in plan.kernels}
        result = BuiltPack()
        entries: list[Entry] = []
        hlos: dict[str, Path] = {}
        neffs: dict[str, Path] = {}
        with tempfile.TemporaryDirectory(dir=folder) as scratch, self.lock:
            for entry in planned.entries:
                try:
                    hlo = self.emit(kernels[entry.kernel])
                    refuse_unsupported(hlo, entry.config, entry.kernel)
                except KernelgenError as error:
                    result.refused[entry.spec.id] = str(error)
                    continue
                except Exception:
                    result.failed[entry.spec.id] = traceback.format_exc()
                    continue
                result.languages[kernels[entry.kernel].language] += 1
                entries.append(replace(entry, noted=False))
                hlos[entry.kernel] = Path(scratch, f"{entry.kernel}.hlo.pb")
                hlos[entry.kernel].write_bytes(hlo)
                neffs[entry.kernel] = Path(scratch, f"{entry.kernel}.neff")
                neffs[entry.kernel].write_bytes(container.write_simulated(hlo, entry.config.flags(), self.identity))
            if entries:
                bundles.build(
                    replace(planned, entries=tuple(entries)),
                    hlos,
                    neffs,
                    jax_version=importlib.metadata.version("jax"),
                    pack_path=folder / pack_name(planned.id),
                )
        return result


@functools.cache
def builder() -> Builder:
    return Builder()


def odd_kernel(folder: Path) -> Path:
    """Returns the folder with a pack of one kernel that no program requests: the backend offers no device without kernels."""
    if not folder.exists():
        _, request, _ = builder().read(['{op: "sqr", inputs: ["(1,1,1,97)/f32"], output: "(1,1,1,97)/f32"}'])
        assert request
        builder().pack(request, folder)
    return folder


def write_manifest(programs: Programs, output: Path, *arguments: object) -> str:
    """Runs `kernelgen model` for this target and returns what it printed.

    Raises:
        RuntimeError: it failed.
    """
    paths = ("--target", target(), "--exporter", exporter(), "--llama-cpp", programs.llama_cpp)
    words = ["model", *arguments, "-o", output, *paths]
    printed = io.StringIO()
    with builder().lock, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = cli.run(list(map(str, words)))
    if status:
        raise RuntimeError(printed.getvalue().strip())
    return printed.getvalue()


def build_manifest(file: Path, folder: Path) -> BuiltPack:
    """Builds all kernels of a manifest.

    Raises:
        RuntimeError: a kernel can't be built.
    """
    pack = builder().pack(builder().load(file), folder)
    if pack.failed or pack.refused:
        raise RuntimeError(f"{file}: {pack}")
    return pack


def build_recording(recording: Path, folder: Path) -> BuiltPack:
    """Builds the kernels of a recording of the backend.

    Raises:
        RuntimeError: a kernel can't be built.
    """
    with builder().lock:
        return build_manifest(recordings.manifest_of(recording, target()), folder)


def derive(
    programs: Programs,
    model: Path,
    folder: Path,
    *more: object,
    n_tokens: Sequence[int],
    n_ctx: Sequence[int] | None,
    cache: str = "f16",
    fuse: str = "none",
    weights: str = "none",
) -> BuiltPack:
    """Builds into a folder the kernels that `kernelgen model` derives.

    Args:
        programs: the programs.
        model: the model's file.
        folder: the folder for the manifest and the pack.
        *more: more arguments; they override the others.
        n_tokens: the numbers of tokens for which there are kernels.
        n_ctx: the cells of the cache; None for kernels for caches of any length.
        cache: the type of the cache.
        fuse: `--fuse`.
        weights: `--weights`.

    Raises:
        RuntimeError: a kernel can't be derived or built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words: list[object] = [model, "--n-ctx", ",".join(map(str, n_ctx)) if n_ctx else "any"]
    words += ["--n-tokens", ",".join(map(str, n_tokens)), "--n-ubatch", max(n_tokens), "--flash-attn", "on"]
    words += [word for option in ("k", "v", "k-draft", "v-draft") for word in (f"--type-{option}", cache)]
    write_manifest(programs, folder / "derived.yaml", *words, "--fuse", fuse, "--weights", weights, *more)
    return build_manifest(folder / "derived.yaml", folder)


# --- what the backend prints -----------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What the backend ran, from the end of its log (`GGML_NEURON_LOG=1`), summed over all processes of the log.

    Attributes:
        device: the nodes that ran on NeuronCores, by op.
        cpu: the nodes that ran on the CPU instead.
        grouped: the nodes that ran in groups; `launches` counts the launches of groups.
        all_launches: the launches of all kernels.
        padded: the launches of kernels for other numbers of tokens.
        reductions: the reductions over NeuronCores that went through the host's memory.
    """

    device: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)
    grouped: int = 0
    launches: int = 0
    all_launches: int = 0
    padded: int = 0
    reductions: int = 0

    @property
    def on_cpu(self) -> str:
        return counts(self.cpu) or "0"


def ran(log: str) -> Ran:
    """Returns what the backend's log counts."""
    result = Ran()
    for total, where, ops in re.findall(r"(\d+) ops ran on (NeuronCores|the CPU)[^:\n]*(?::([^\n]*))?", log):
        of_ops = Counter({op: int(count) for count, op in re.findall(r"(\d+) (\w+)", ops)})
        assert of_ops.total() == int(total), log
        if where == "NeuronCores":
            result.device += of_ops
        else:
            result.cpu += of_ops
    for nodes, launches in re.findall(r"(\d+) ops ran in groups, in (\d+) launches", log):
        result.grouped += int(nodes)
        result.launches += int(launches)

    def total_of(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, log)))

    result.all_launches = total_of(r"core \d+: (\d+) launches")
    result.padded = total_of(r"other numbers of tokens were launched (\d+) times")
    result.reductions = total_of(r"(\d+) reductions over NeuronCores went through the host's memory")
    return result


def missing_node(line: str) -> tuple[str, str | None] | None:
    """Returns the manifest entry of a node without a kernel, and why none can be built, or None; from a line of the log at level 2."""
    return recordings.missing_of(line, builder().catalog)


def op_of_node(node: str) -> str:
    """Returns the op of a manifest entry, by kernelgen's name."""
    match = re.match(r'(?:\{op: ")?(\w+)', node)
    return match[1] if match else node


def generalize(reason: str) -> str:
    """Returns a reason without the parts that differ between kernels, so that equal reasons count as one."""
    line = next((line for line in reason.splitlines() if line.strip()), reason)
    line = re.sub(r"^(\w+: )?.*?error: ", r"\1", line)
    line = re.sub(r"kernel [a-z_0-9]+-[0-9x]+-\w+-[0-9a-f]{12}: ", "", line)
    return re.sub(r"(?<!\w)\d+(?:\.\d+)?(?!\w)", "n", line)[:160]


def counts(ops: dict[str, int]) -> str:
    """Returns counts by op as text, the largest first."""
    return ", ".join(f"{count} {op}" for op, count in sorted(ops.items(), key=lambda item: (-item[1], item[0])))


# --- many cases, tables and pages ------------------------------------------------------------------------------------------


def survey(
    names: Sequence[str],
    function: Callable[[str], Result],
    line: Callable[[str, Result], str],
    *,
    work: Path | None = None,
    jobs: int | None = None,
) -> dict[str, Result]:
    """Returns a function's result for each name; several run at once. Prints a line on stderr for each.

    Args:
        names: the names.
        function: returns a result, given a name.
        line: describes a result.
        work: a folder that keeps finished results: a run with the same folder takes them from there.
        jobs: how many run at once; one per CPU by default.
    """
    results: dict[str, Result] = {}
    stderr = sys.stderr  # `write_manifest` redirects it in other threads
    builder()

    def do(name: str) -> None:
        kept = work / f"{name}.result" if work else None
        begun = time.monotonic()
        if kept and kept.is_file():
            results[name] = pickle.loads(kept.read_bytes())
            how = f"from {work}"
        else:
            results[name] = function(name)
            how = f"{time.monotonic() - begun:.0f} s"
            if kept:
                kept.with_suffix(".part").write_bytes(pickle.dumps(results[name]))
                kept.with_suffix(".part").rename(kept)
        print(f"{len(results)}/{len(names)} {line(name, results[name])}, {how}", file=stderr, flush=True)

    if work:
        work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        list(pool.map(do, names))
    return {name: results[name] for name in names}


def row(*cells: object) -> str:
    """Returns a row of a table."""
    return f"| {' | '.join(str(cell).replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"


def write_page(name: str, lines: Iterable[str]) -> None:
    """Replaces the part of a page of results that a run writes: all after the line that names its command."""
    page = DOCS / "results" / name
    head, line, _ = page.read_text(encoding="utf-8").partition(GENERATED)
    page.write_text("\n".join([head + line, "", *lines, ""]), encoding="utf-8")


GENERATED = "<!-- The command writes what follows. -->"
