"""Runs llama.cpp's programs on a simulated NeuronCore: records the ops that they request, builds kernels, and runs them again.

The tests of this folder and the programs here use it. It finds llama.cpp's programs, the plug-in and the simulator
beside this file, where Bazel puts them; LLAMA_CPP_PROGRAMS, GGML_NEURON_PLUGIN and GGML_NEURON_LIBNRT override the
places.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import kernelgen
from kernelgen import manifest
from kernelgen.build import executor
from kernelgen.build.folder import BuildSettings, locked
from kernelgen.bundle import build as bundles
from kernelgen.bundle.contents import pack_name
from kernelgen.compilers import choice
from kernelgen.compilers.neuronx_cc_driver import machine_memory_mb
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.errors import KernelgenError
from kernelgen.plan import Plan, Request
from kernelgen.targets import INSTANCES

ROOT = Path(__file__).parents[2]
DEVICE = "NEURON0"
Say = Callable[[str], None]

Progress = Callable[[str, int], None]
"""A function that receives a stage of some work, and the amount done."""


def target() -> str:
    """Returns the target of the kernels and of the simulated machine: KERNELGEN_TEST_TARGET, or trn1."""
    return os.environ.get("KERNELGEN_TEST_TARGET") or "trn1"


# --- programs --------------------------------------------------------------------------------------------------------------

WAIT = "1800"
"""Seconds that a simulated core waits for the others (NEURON_RT_EXEC_TIMEOUT); on a busy machine, they may only be late."""


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
        there = there or (lambda built, variable: Path(os.environ.get(variable, built)).absolute())
        here = Path(__file__).parent
        found = Programs(
            llama_cpp=there(here / "llama_cpp", "LLAMA_CPP_PROGRAMS"),
            plugin=there(ROOT / "backend/ggml-neuron/test_programs/libggml-neuron.so", "GGML_NEURON_PLUGIN"),
            libnrt=there(ROOT / "backend/simulator/libnrt.so.1", "GGML_NEURON_LIBNRT"),
            load_backends=there(here / "libload_backends.so", "LLAMA_LOAD_BACKENDS"),
        )
        for path in (found.llama_cpp / "test-backend-ops", found.plugin, found.libnrt, found.load_backends):
            if not path.exists():
                raise FileNotFoundError(f"{path} is not there; run this through Bazel")
        return found

    def environment(
        self, *, kernels: Path | None = None, record: Path | None = None, buffers: str | None = None, log: int = 0
    ) -> dict[str, str]:
        """Returns the environment in which a program has the device.

        Args:
            kernels: a folder with packs; none by default.
            record: the manifest to which the backend writes the ops that have no kernel.
            buffers: `device` or `host`: the memory of tensors; the backend chooses by default.
            log: the level of the backend's log on stderr.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GGML_", "NEURON_"))}
        environment |= {
            "GGML_BACKEND_PATH": str(self.plugin),
            "GGML_NEURON_LIBNRT": str(self.libnrt),
            "NEURON_SIMULATOR_PYTHON": sys.executable,
            "NEURON_SIMULATOR_PATH": str(Path(kernelgen.__file__).parents[1]),
            "NEURON_SIMULATOR_INSTANCE": {one.target: one.name for one in INSTANCES}[target()],
            "NEURON_RT_NUM_CORES": "1",
        }
        if self.compiled:
            environment["NEURON_SIMULATOR_CACHE"] = str(self.compiled)
        if kernels:
            environment["GGML_NEURON_KERNEL_DIR"] = str(kernels)
        if record:
            environment["GGML_NEURON_RECORD"] = str(record)
        if buffers:
            environment["GGML_NEURON_BUFFERS"] = buffers
        if log:
            environment["GGML_NEURON_LOG"] = str(int(log))
        return environment

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
        return subprocess.run(
            [self.llama_cpp / program, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
        )


# --- record and build ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltManifest:
    """The outcome of building a recorded manifest.

    Attributes:
        kernels: the number of kernels in the pack.
        compiled: the number of kernels compiled now.
        refused: why ops have no kernel, with the number of ops: no emitter, or the emitter does not support these types.
        failed: the error of each kernel that should have been built and was not.
        seconds: the duration.
    """

    kernels: int
    compiled: int
    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class _Reporter:
    def __init__(self, total: int, say: Say) -> None:
        self.total, self.say, self.done, self.last = total, say, 0, time.monotonic()

    def warn(self, text: str) -> None:
        self.say(text)

    def step(self, step: executor.BuildStep) -> None:
        self.done += 1
        if time.monotonic() - self.last > 15:
            self.last = time.monotonic()
            self.say(f"  {self.done} of {self.total} kernels")


def build(recorded: Path, output: Path, *, jobs: int | None = None, say: Say = print) -> BuiltManifest:
    """Builds the buildable part of a recorded manifest into a pack in `output`; keeps the files of an earlier build.

    A recorded manifest names every requested op, including ops without an emitter. This leaves out the latter.

    Args:
        recorded: the manifest.
        output: the folder for the pack and for intermediate files.
        jobs: the number of workers; one per CPU by default.
        say: called with progress messages.
    """
    output.mkdir(parents=True, exist_ok=True)
    refused: dict[str, int] = {}
    chosen = output / "chosen.yaml"
    _choose(recorded, chosen, refused)
    (request,) = manifest.load([chosen], Catalog([builtin_library()]))
    built = build_request(request, output, jobs=jobs, say=say)
    for reason, count in built.refused.items():
        refused[reason] = refused.get(reason, 0) + count
    return replace(built, refused=refused)


def build_request(request: Request, output: Path, *, jobs: int | None = None, say: Say = print) -> BuiltManifest:
    """Builds the kernels of a request that their emitters support into a pack for `target()`; the arguments are `build`'s."""
    begun = time.monotonic()
    libraries = (builtin_library(),)
    request = replace(request, configs=tuple(c for c in request.configs if c.target == target()))
    plan = Plan.merge([request])
    compiler = choice.resolve("simulator")
    settings = BuildSettings(
        output=output,
        compiler=compiler.name,
        identity=compiler.identity,
        executable=None,
        jobs=jobs or len(os.sched_getaffinity(0)),
        memory_mb=machine_memory_mb(),
    )
    refused: dict[str, int] = {}
    failed: dict[str, str] = {}
    with locked(settings):
        result = executor.run(plan, libraries, settings, _Reporter(len(plan.neffs), say))
        for step in result.steps:
            if step.failure is None:
                continue
            if step.neff.kernel in result.hlos or not _is_refusal(step.failure):
                failed[step.neff.kernel] = step.failure
            else:
                reason = generalize(step.neff.kernel.partition("-")[0] + ": " + step.failure)
                refused[reason] = refused.get(reason, 0) + 1
        (whole,) = plan.bundles
        neffs = {kernel: result.neffs.get(neff) for kernel, neff in whole.neffs().items()}
        there = {kernel: path for kernel, path in neffs.items() if path is not None}
        planned = plan.entries(whole)
        bundles.build(
            replace(planned, entries=tuple(entry for entry in planned.entries if entry.kernel in there)),
            result.hlos,
            there,
            compiler=settings.identity,
            jax_version=importlib.metadata.version("jax"),
            tree_path=None,
            pack_path=output / pack_name(whole.id),
            embed_folder=None,
        )
    compiled = sum(step.fresh for step in result.steps)
    return BuiltManifest(len(there), compiled, refused, failed, time.monotonic() - begun)


ODD_KERNEL = '{op: "sqr", inputs: ["(1,1,1,97)/f32"], output: "(1,1,1,97)/f32"}'


def odd_kernel(folder: Path, say: Say = lambda text: None) -> Path:
    """Returns the folder with a pack of one kernel that no program requests: the backend offers no device without kernels."""
    if not list(folder.glob(f"*_{target()}.kernels.gguf")):
        folder.mkdir(parents=True, exist_ok=True)
        manifest = folder / "odd.yaml"
        manifest.write_text(f"format: 1\nname: odd\ntargets: [{target()}]\nkernels:\n  - {ODD_KERNEL}\n")
        build(manifest, folder, jobs=1, say=say)
    return folder


def build_what_runs(
    programs: Programs, run: Callable[[dict[str, str]], object], folder: Path, *, say: Say = print
) -> tuple[Path, BuiltManifest]:
    """Runs something with recording, builds the kernels that it requested, and runs it again, which must request no more.

    Args:
        programs: the programs to run.
        run: runs them in the given environment.
        folder: the folder for the recording and the kernels.
        say: called with progress messages.

    Returns:
        The folder with the pack, and the outcome of the build.

    Raises:
        RuntimeError: the second run requested more kernels.
    """
    recorded, kernels = folder / "recorded.yaml", folder / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    run(programs.environment(record=recorded))
    built = build(recorded, kernels, say=say)
    before = recorded.read_bytes()
    run(programs.environment(kernels=kernels, record=recorded))
    if recorded.read_bytes() != before:
        raise RuntimeError(f"{recorded} changes when its kernels are there")
    return kernels, built


def _is_refusal(failure: str) -> bool:
    """Returns whether an emitter, or the lint after it, refused the kernel with a message; any other failure is a bug."""
    return "Traceback" not in failure and "error: " in failure


def generalize(reason: str) -> str:
    """Returns a reason without the parts that differ between kernels, so that equal reasons count as one."""
    line = next((line for line in reason.splitlines() if line.strip()), reason)
    line = re.sub(r"^(\w+: )?.*?error: ", r"\1", line)
    line = re.sub(r"kernel [a-z_0-9]+-[0-9x]+-\w+-[0-9a-f]{12}: ", "", line)
    return re.sub(r"(?<!\w)\d+(?:\.\d+)?(?!\w)", "n", line)[:160]


def _choose(recorded: Path, chosen: Path, refused: dict[str, int]) -> None:
    """Writes the manifest with its valid entries only, and counts the other entries by their errors."""
    catalog = Catalog([builtin_library()])
    text = recorded.read_text()
    for _ in range(2):
        chosen.write_text(text)
        try:
            manifest.load([chosen], catalog)
        except KernelgenError as error:
            lines = text.splitlines(keepends=True)
            starts = [number for number, line in enumerate(lines) if re.match(r"\s*- ", line)]
            dropped: set[int] = set()
            for diagnostic in error.diagnostics:
                if diagnostic.location is None or diagnostic.location.line <= (starts[0] if starts else 0):
                    raise
                entry = max(start for start in starts if start < diagnostic.location.line)
                if entry not in dropped:
                    dropped.add(entry)
                    reason = generalize(diagnostic.message)
                    refused[reason] = refused.get(reason, 0) + 1
            keep = True
            kept = []
            for number, line in enumerate(lines):
                if number in starts:
                    keep = number not in dropped
                elif not line.startswith((" ", "-")):
                    keep = True
                if keep:
                    kept.append(line)
            text = "".join(kept)
        else:
            return
    raise RuntimeError(f"{recorded}: entries could not be distinguished")


def ran(log: str) -> dict[str, Counter[str]]:
    """Returns how many nodes of each op ran on the device, and how many on the CPU instead, from the end of the backend's log."""
    found: dict[str, Counter[str]] = {"device": Counter(), "cpu": Counter()}
    for total, where, ops in re.findall(r"(\d+) ops ran on (NeuronCores|the CPU)[^:\n]*(?::([^\n]*))?", log):
        counts = Counter({op: int(count) for count, op in re.findall(r"(\d+) (\w+)", ops)})
        assert counts.total() == int(total)
        found["device" if where == "NeuronCores" else "cpu"] += counts
    return found
