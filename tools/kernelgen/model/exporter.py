"""Finds and runs export-graphs (backend/exporter), which exports a model's graphs with llama.cpp."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import kernelgen
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.model.graphs import Graph, GraphReader, ModelHeader
from kernelgen.model.projector import Projector
from kernelgen.model.sizes import DecodeCall, Settings, shifted

PROGRAM = "export-graphs"

VARIABLE = "NEURON_KERNELGEN_EXPORTER"
"""The environment variable with the program's path; an option overrides it."""

TIMEOUT = 600
"""The time limit in seconds; a model takes less than one."""

WHEEL = "neuron_kernelgen"
"""The package with the program for llama-cpp-python's llama.cpp."""

_HOW_TO_GET_IT = (
    "install neuron-kernelgen-llama-cpp beside llama-cpp-python, or build it once, for the llama.cpp that will run the model:\n"
    "      cmake -S backend/exporter -B build/exporter -DGGML_NEURON_LLAMA_DIR=<llama.cpp's source tree>\n"
    "      cmake --build build/exporter\n"
    f"    and name it with --exporter build/exporter/{PROGRAM} or {VARIABLE}"
)


@dataclass(frozen=True, slots=True)
class Exporter:
    """The program and its llama.cpp.

    Attributes:
        program: its path.
        libraries: a folder with llama.cpp's shared libraries; None if the program needs none or finds them itself.
    """

    program: Path
    libraries: Path | None = None

    def run(
        self, source: Path, settings: Settings, n_ctx: int, calls: Sequence[DecodeCall], devices: int = 1
    ) -> ExporterOutput:
        """Returns the program's output for calls with the same samplers, in a context of `n_ctx`, split over `devices`.

        Without calls, the output has the graphs of a context shift.

        Raises:
            KernelgenError: the program can't be run, or refuses the model.
        """
        command = [str(source), *_options(settings, n_ctx)]
        if devices > 1:
            command += ["--split-mode", "tensor", "--devices", str(devices)]
        if calls and calls[0].samplers:
            command += ["--samplers", calls[0].samplers]
        for call in calls:
            command += ["--graph", str(call)]
        if not calls:
            command.append("--shift")
        return self._run(source, command)

    def projector(self, projector: Projector, flash_attn: Sequence[bool]) -> ExporterOutput:
        """Returns the program's output for a projector.

        Raises:
            KernelgenError: see `run`.
        """
        command = ["--mmproj", str(projector.file), "--flash-attn", _on_off(flash_attn), *projector.limits]
        for width, height in projector.images:
            command += ["--image-size", f"{width}x{height}"]
        for seconds in projector.seconds:
            command += ["--audio-seconds", str(seconds)]
        return self._run(projector.file, command)

    def _run(self, source: Path, arguments: Sequence[str]) -> ExporterOutput:
        output = tempfile.TemporaryFile()  # noqa: SIM115 - the export is read from it, and it closes with that
        command = [str(self.program), *arguments]
        environment = {**os.environ, "LC_ALL": "C"}
        if self.libraries is not None:
            known = environment.get("LD_LIBRARY_PATH")
            environment["LD_LIBRARY_PATH"] = f"{self.libraries}:{known}" if known else str(self.libraries)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
                check=False,
                env=environment,
            )
        except OSError as error:
            raise KernelgenError(f"can't run {self.program}: {error.strerror or error}") from None
        except subprocess.TimeoutExpired:
            raise KernelgenError(f"{self.program} takes more than {TIMEOUT} s for {source}") from None
        if done.returncode:
            said = done.stderr.partition("\nusage: ")[0].strip().removeprefix("error: ")
            if done.returncode == 127 or "shared libraries" in said:
                hint = "name the build of llama.cpp that it was made for: --llama-cpp <folder>"
                raise KernelgenError(Diagnostic(f"{self.program}: {said}", hint=hint))
            raise KernelgenError(said or f"{self.program} ends with {done.returncode}, and prints nothing")
        output.seek(0)
        return ExporterOutput(GraphReader(output, f"the output of {self.program.name}"))

    def graphs(
        self, source: Path, settings: Settings, calls: Sequence[DecodeCall]
    ) -> Iterator[tuple[ModelHeader, DecodeCall, Graph]]:
        """Yields the graph of each call with each setting of flash attention, in the order of contexts.

        If tensors are split, a call has a graph for each device that differs from the devices before it.

        Raises:
            KernelgenError: see `run`.
        """
        for devices, n_ctx, samplers in itertools.product(settings.devices, settings.n_ctx, settings.samplers):
            own = [call for call in calls if (call.n_ctx, call.samplers) == (n_ctx, samplers)]
            if own:
                exported = self.run(source, settings, n_ctx, own, devices)
                graphs = (graph for graph in exported.graphs() if not graph.is_probe)
                for call, graph in _with_calls(own * len(settings.flash_attn), graphs):
                    yield exported.model, call, graph

    def probes(self, source: Path, settings: Settings) -> Iterator[Graph]:
        """Yields the ops with which llama.cpp calls supports_op before it samples on a device, for each chain.

        Raises:
            KernelgenError: see `run`.
        """
        for samplers in filter(None, settings.samplers):
            call = DecodeCall(settings.n_ctx[0], 1, 1, 1, 0, samplers)
            exported = self.run(source, settings, call.n_ctx, [call])
            yield from (graph for graph in exported.graphs() if graph.is_probe)

    def shifts(self, source: Path, settings: Settings) -> Iterator[Graph]:
        """Yields the graphs that shift the positions of the keys in caches of a few lengths.

        Raises:
            KernelgenError: see `run`.
        """
        one = replace(settings, n_seq_max=1)
        for devices, cells in itertools.product(settings.devices, shifted(settings)):
            yield from self.run(source, one, cells, (), devices).graphs()


def _with_calls(calls: Sequence[DecodeCall], graphs: Iterable[Graph]) -> Iterator[tuple[DecodeCall, Graph]]:
    """Yields each graph with its call. The graph of device 0 is the first of a call's graphs.

    Raises:
        ValueError: there are graphs of fewer or more calls.
    """
    begun = 0
    for graph in graphs:
        begun += 0 in graph.of
        if not 0 < begun <= len(calls):
            raise ValueError(f"graphs of more than {len(calls)} calls")
        yield calls[begun - 1], graph
    if begun != len(calls):
        raise ValueError(f"graphs of {begun} calls, not {len(calls)}")


class ExporterOutput:
    """The program's output: the model, then its graphs."""

    def __init__(self, reader: GraphReader) -> None:
        self.model: ModelHeader = reader.model()
        self._reader = reader

    def graphs(self) -> Iterator[Graph]:
        """Yields the graphs of all calls in order, for each setting of flash attention."""
        return self._reader.graphs()


def _on_off(flash_attn: Sequence[bool]) -> str:
    return ",".join("on" if flash else "off" for flash in flash_attn)


def _options(settings: Settings, n_ctx: int) -> Iterable[str]:
    yield from ("--ctx-size", str(n_ctx), "--ubatch-size", str(settings.n_ubatch))
    yield from ("--parallel", str(settings.n_seq_max))
    yield from ("--cache-type-k", settings.type_k, "--cache-type-v", settings.type_v)
    yield from ("--flash-attn", _on_off(settings.flash_attn))
    if settings.kv_unified:
        yield "--kv-unified"
    if settings.swa_full:
        yield "--swa-full"
    if settings.ftype is not None:
        yield from ("--ftype", settings.ftype)
    if settings.control_vector:
        yield "--control-vector"
    if settings.encoder:
        yield "--encoder"
    if settings.n_encoded:
        yield from ("--n-encoded", str(settings.n_encoded[0]))
    if settings.embeddings:
        yield "--embeddings"
    if settings.pooling is not None:
        yield from ("--pooling", settings.pooling)
    if settings.speculation is not None:
        yield from ("--spec-type", settings.speculation, "--spec-draft-n-max", str(settings.draft_n_max))
    if settings.draft_file is not None:
        yield from ("--model-draft", str(settings.draft_file))
        if settings.speculation is None:
            yield from ("--spec-type", "draft-simple")
    if settings.drafting:
        yield "--draft"
        yield from ("--cache-type-k-draft", settings.type_k_draft, "--cache-type-v-draft", settings.type_v_draft)
    for option, value in settings.llama_options:
        yield from (option, value)
    for file, scale in settings.lora:
        yield from ("--lora-scaled", f"{file}:{scale!r}")


def find(named: Path | None, llama_cpp: Path | None) -> Exporter:
    """Returns the program.

    Args:
        named: the user's path of the program.
        llama_cpp: the user's folder with llama.cpp's libraries, and perhaps the program.

    Raises:
        KernelgenError: the program does not exist; the message explains how to get it.
    """
    libraries = _libraries(llama_cpp) if llama_cpp is not None else None
    variable = os.environ.get(VARIABLE)
    if named is not None or variable:
        path = named or Path(str(variable))
        if not path.is_file():
            by = "--exporter" if named is not None else VARIABLE
            raise KernelgenError(Diagnostic(f"{by}: there is no program {path}", hint=_HOW_TO_GET_IT))
        return Exporter(path.absolute(), libraries)
    for folder in _places(llama_cpp):
        if (folder / PROGRAM).is_file():
            return Exporter((folder / PROGRAM).absolute(), libraries)
    on_path = shutil.which(PROGRAM)
    if on_path:
        return Exporter(Path(on_path), libraries)
    if importlib.util.find_spec(WHEEL) is not None:
        return _of_wheel()
    looked = f"{llama_cpp} holds no {PROGRAM}, and there is none" if llama_cpp else f"there is no {PROGRAM}"
    raise KernelgenError(Diagnostic(f"{looked} beside kernelgen or on PATH", hint=_HOW_TO_GET_IT))


def _of_wheel() -> Exporter:
    """Returns the program of the package neuron-kernelgen-llama-cpp, with the libraries of llama-cpp-python."""
    files = importlib.import_module(f"{WHEEL}.files")
    try:
        return Exporter(files.EXPORTER, files.linked_libraries())
    except ImportError as error:
        raise KernelgenError(str(error)) from None


def _places(llama_cpp: Path | None) -> Iterator[Path]:
    if llama_cpp is not None:
        yield from (llama_cpp, llama_cpp / "bin", llama_cpp / "build" / "bin")
    # CMake installs <prefix>/share/neuron-kernelgen/tools/kernelgen and <prefix>/libexec/neuron-kernelgen.
    package = Path(kernelgen.__file__).absolute().parent
    for parent in package.parents:
        yield parent / "libexec" / "neuron-kernelgen"


def _libraries(folder: Path) -> Path | None:
    """Returns the folder with libllama.so in a build or an installation of llama.cpp; None if there is none.

    Raises:
        KernelgenError: the folder does not exist.
    """
    if not folder.is_dir():
        raise KernelgenError(f"--llama-cpp {folder}: the folder does not exist")
    for place in (folder, folder / "bin", folder / "build" / "bin", folder / "lib"):
        if (place / "libllama.so").is_file():
            return place.absolute()
    return None
