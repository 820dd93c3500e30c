"""Damages the headers of models and requests their graphs: the outcome must be graphs, or one line of error and exit status 2.

Each round takes the header of a small model (from headers.py, or from an architecture whose model test-llama-archs
writes), damages it as the seed determines (damage.py), and runs export-graphs on it twice: once unchanged, in limited
time and memory, and once compiled with AddressSanitizer and UndefinedBehaviorSanitizer. A run fails if it ends in
another way, takes too long or too much memory, or if a sanitizer reports code of this project. The child process
contains crashes of llama.cpp and reports about its code.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import headers
from damage import FLOATS, NUMBERS, damage, parts, put_together

from kernelgen import cli

ROOT = Path(__file__).absolute().parents[2]

GRAPHS = ("--ctx-size", "512", "--ubatch-size", "64", "--flash-attn", "on,off")
GRAPHS += ("--graph", "n_tokens=1,n_kv=256", "--graph", "n_tokens=64,n_outputs=1,n_kv=512")
N_GRAPHS = 4

SECONDS = 20
"""The limit of a run's CPU time; the undamaged small models take 0.02 s."""

MEMORY = 1 << 30
"""The limit of a run's memory, in bytes."""

OURS = re.compile(r"(backend/exporter/|/)(exporter|options|sparse_file)\.(cpp|h)\b|/(json|graph_writer)\.h\b")
REPORT = re.compile(r"(?:ERROR: AddressSanitizer: |runtime error: )(.*)")
REFUSED = re.compile(
    r"allocation-size-too-big|out-of-memory|out of memory|requested allocation size|rss limit|calloc-overflow"
)
"""AddressSanitizer's messages about allocations that also fail without it."""


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run.

    Attributes:
        status: the exit status; negative for a signal.
        out, err: its output.
        seconds: CPU time.
        memory: the peak memory in bytes.
    """

    status: int
    out: bytes
    err: str
    seconds: float
    memory: int


def run(command: Sequence[str | Path], environment: Mapping[str, str]) -> RunOutcome:
    """Runs a program, and kills it after a long time."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        timer = threading.Timer(SECONDS * 6, process.kill)
        timer.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return RunOutcome(
            process.returncode,
            out.read(),
            err.read().decode(errors="replace"),
            used.ru_utime + used.ru_stime,
            used.ru_maxrss * 1024,
        )


def environment(libraries: Path | None) -> dict[str, str]:
    """Returns the environment for a program: the path of llama.cpp's libraries, and the sanitizers' options."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("GGML_", "LLAMA_"))}
    # The child ends without freeing its memory, so leaks are not reported.
    found["ASAN_OPTIONS"] = (
        "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=16384:hard_rss_limit_mb=4096"
    )
    found["UBSAN_OPTIONS"] = "print_stacktrace=1"
    if libraries is not None:
        found["LD_LIBRARY_PATH"] = str(libraries)
    return found


def wrong(outcome: RunOutcome, file: Path, n_graphs: int = N_GRAPHS) -> str | None:
    """Returns the error in the outcome of a run without sanitizers, or None."""
    if outcome.seconds > SECONDS:
        return f"{outcome.seconds:.0f} s of CPU time"
    if outcome.memory > MEMORY:
        return f"{outcome.memory >> 20} MiB of memory"
    if outcome.status == 0:
        lines = [json.loads(line) for line in outcome.out.splitlines()]
        if len(lines) != 1 + n_graphs or outcome.err:
            return f"{len(lines)} lines, and {outcome.err!r}"
        return None
    return wrong_message(outcome.status, outcome.err, file)


def wrong_message(status: int, said: str, file: Path) -> str | None:
    """Returns the error in the end of a program that refuses a file, or None."""
    if status != 2:
        return f"exit status {status}: {said}"
    if not said.startswith(f"error: {file}") or said.count("\n") != 1 or not said.endswith("\n"):
        return f"not one line of error: {said!r}"
    if any(ord(c) < 32 or ord(c) == 127 for c in said[:-1]):
        return f"control characters: {said!r}"
    return None


@dataclass(frozen=True)
class Reported:
    """A sanitizer's report: whether the code belongs to this project, and the place and message."""

    ours: bool
    what: str


def reports(said: str) -> list[Reported]:
    """Returns the sanitizers' reports, without allocations that also fail without them."""
    found = []
    lines = said.splitlines()
    for number, line in enumerate(lines):
        match = REPORT.search(line)
        if match is None or REFUSED.search(line):
            continue
        frames = [text for text in lines[number : number + 30] if re.match(r"\s+#\d+ ", text)]
        places = [
            f.split(" in ", 1)[-1]
            for f in frames
            if ":" in f and "libsanitizer" not in f and "sanitizer_common" not in f
        ]
        place = line.partition(": runtime error")[0] if "runtime error" in line else (places[0] if places else "?")
        what = re.sub(r"0x[0-9a-f]+|\b\d{3,}\b|==\d+==", "N", match[1])
        found.append(Reported(bool(OURS.search(place)), f"{_short(place)}: {what}"))
    return found


def _short(place: str) -> str:
    return re.sub(r"\S*/(?=(src|ggml/src|exporter)/)", "", place)[:160]


def bases(folder: Path) -> dict[str, bytes]:
    """Returns the headers of the models of headers.py, and of the models in a folder."""
    small = {"qwen3": headers.qwen3(), "gemma2": headers.gemma2(), "mixtral": headers.mixtral()}
    found = {}
    with tempfile.TemporaryDirectory() as made:
        for name, header in small.items():
            found[name] = headers.write(header, Path(made) / name).read_bytes()
    for path in sorted(folder.glob("*.gguf")):
        found[path.stem] = put_together(parts(path.read_bytes()))
    return found


def absurd(rng: random.Random) -> headers.GgufHeader:
    """Returns a header whose parts agree with each other, with sizes that no model has."""

    def size(usual: int) -> int:
        return usual if rng.random() < 0.6 else rng.choice((0, 1, 2, 3, 31, 33, 48, 1000, 2**16, 2**20, 2**24))

    fields: dict[str, headers.Value] = {}
    for key in ("rope.freq_scale", "attention.max_alibi_bias", "attention.clamp_kqv", "final_logit_softcapping"):
        if rng.random() < 0.2:
            fields[key] = rng.choice(FLOATS)
    for key in ("attention.sliding_window", "rope.dimension_count", "expert_used_count", "leading_dense_block_count"):
        if rng.random() < 0.2:
            fields[key] = rng.choice(NUMBERS) % 2**32
    return headers.decoder(
        rng.choice(("llama", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "stablelm")),
        n_embd=size(256),
        n_head=size(4),
        n_head_kv=size(2),
        n_ff=size(512),
        n_vocab=size(128),
        n_layer=rng.choice((0, 1, 2, 2, 2, 40)),
        head=max(1, size(64)),
        qk_norm=rng.random() < 0.3,
        qkv_bias=rng.random() < 0.3,
        fused=rng.random() < 0.1,
        post_norms=rng.random() < 0.3,
        n_expert=size(0) % 2048,
        tied=rng.random() < 0.5,
        eps=rng.choice((1e-6, 1e-6, *FLOATS)),
        freq_base=rng.choice((1e6, 1e6, *FLOATS)),
        context_length=size(8192),
        fields=fields,
    )


def save_models(programs: Path, load_backends: Path, pattern: str, folder: Path) -> None:
    """Writes small models of the architectures that match, with test-llama-archs."""
    subprocess.run(
        [programs / "test-llama-archs", "-a", pattern, "-s", "1", "-o", folder],
        env=environment(programs) | {"LD_PRELOAD": str(load_backends)},
        check=False,
        capture_output=True,
    )


def derive(program: Path, libraries: Path | None, file: Path) -> str | None:
    """Runs `kernelgen model` on a file; returns the error in the outcome, or None."""
    output = file.with_suffix(".yaml")
    where = ["--exporter", program] + (["--llama-cpp", libraries] if libraries else [])
    options = ["--n-ctx", "256", "--n-tokens", "1,16", "--n-ubatch", "16"]
    out, err = io.StringIO(), io.StringIO()
    started = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(list(map(str, ("model", file, "-o", output, *where, *options))))
    taken = time.process_time() - started
    written = output.exists()
    output.unlink(missing_ok=True)
    if taken > SECONDS:
        return f"{taken:.0f} s of CPU time in kernelgen"
    if status == 0:
        return None if written else "no manifest"
    if written:
        return f"a manifest, and exit status {status}: {err.getvalue()}"
    return wrong_message(status, err.getvalue(), file)


@dataclass(frozen=True)
class ReadingPrograms:
    """The programs, and llama.cpp's libraries; a statically linked program needs none."""

    exporter: Path
    libraries: Path
    sanitized: Path
    sanitized_libraries: Path | None


class Fuzzer:
    """The rounds, and their results.

    Attributes:
        failures: the failed checks.
        contained: llama.cpp's errors, with the first round of each.
        kinds: the outcomes of the runs.
    """

    def __init__(
        self, programs: ReadingPrograms, headers: Mapping[str, bytes], folder: Path, keep: Path | None = None
    ) -> None:
        self.programs, self.headers, self.folder, self.keep = programs, headers, folder, keep
        self.failures: list[str] = []
        self.contained: dict[str, tuple[int, str]] = {}
        self.kinds: Counter[str] = Counter()

    def check(self) -> None:
        """Records a failure if a program has no graphs for an undamaged header: the rounds would then check nothing."""
        name = min(self.headers)
        file = self.folder / "model.gguf"
        file.write_bytes(self.headers[name])
        for program, libraries in (
            (self.programs.exporter, self.programs.libraries),
            (self.programs.sanitized, self.programs.sanitized_libraries),
        ):
            done = run([program, file, *GRAPHS], environment(libraries))
            if done.status:
                self._fail(f"{name}, whole", f"{program}: exit status {done.status}: {done.err}", self.headers[name])

    def round(self, seed: int, *, with_kernelgen: bool) -> None:
        """Runs one round: a damaged header from its own seed."""
        rng = random.Random(seed)
        file = self.folder / "model.gguf"
        if rng.random() < 0.2:
            name, good = "absurd sizes", headers.write(absurd(rng), file).read_bytes()
        else:
            name = rng.choice(sorted(self.headers))
            good = self.headers[name]
        data, done = damage(rng, good) if name in self.headers or rng.random() < 0.3 else (good, "nothing else")
        file.write_bytes(data)
        about = f"round {seed} ({name}: {done})"
        plain = run([self.programs.exporter, file, *GRAPHS], environment(self.programs.libraries))
        self.kinds[_kind(plain)] += 1
        self._fail(about, wrong(plain, file), data)
        if "crashes on this model" in plain.err:
            self._contain(re.sub(".*crashes", "crashes", plain.err.strip()), seed, about, data)
        checked = run([self.programs.sanitized, file, *GRAPHS], environment(self.programs.sanitized_libraries))
        for reported in reports(checked.err):
            if reported.ours:
                self._fail(about, reported.what, data)
            else:
                self._contain(reported.what, seed, about, data)
        if with_kernelgen:
            self._fail(about, derive(self.programs.exporter, self.programs.libraries, file), data)

    def _fail(self, about: str, what: str | None, data: bytes) -> None:
        if what is not None:
            self.failures.append(f"{about}: {what}")
            self._keep(about, data)

    def _contain(self, what: str, seed: int, about: str, data: bytes) -> None:
        if what not in self.contained:
            self.contained[what] = (seed, about)
            self._keep(about, data)

    def _keep(self, about: str, data: bytes) -> None:
        if self.keep is not None:
            (self.keep / f"{re.sub('[^a-z0-9]+', '-', about.lower()).strip('-')[:60]}.gguf").write_bytes(data)


def _kind(outcome: RunOutcome) -> str:
    if outcome.status == 0:
        return "graphs"
    for text in (
        "crashes on this model",
        "llama.cpp stops",
        "can't load",
        "can't make a context",
        "damaged or cut off",
    ):
        if text in outcome.err:
            return text
    return "other refusals"
