"""Runs a model on the simulated device and on llama.cpp's CPU backend; shared by the benchmarks of a token's time."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "tools" / "llama_cpp"))

import harness
import numpy as np
import random_llama

from backend_programs import KERNELGEN, Programs, environment


class SimulatedModel:
    """A random Llama in a folder, or a given model, with its kernels for the simulator: layers and nodes, for a cache of 256 cells.

    Attributes:
        file: the model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        size: random_llama.Size | None = None,
        weights: Any = np.float16,
        n_tokens: str = "1,2",
        target: str = "trn1",
        more: Sequence[str] = ("--fuse=layer",),
        file: Path | None = None,
    ) -> None:
        """Writes the model, derives its manifest and builds its kernels in `folder`, which it creates.

        Args:
            folder: the folder for all files.
            size: the model's sizes; None for three small layers.
            weights: the type of its matrices, as for `random_llama.write`.
            n_tokens: the numbers of tokens for which there are kernels.
            target: the target of the kernels.
            more: options of `kernelgen model`.
            file: an existing model in place of a random one.

        Raises:
            SystemExit: a program is missing, or failed.
        """
        folder.mkdir(exist_ok=True)
        self.file = file or folder / "model.gguf"
        manifest, kernels, cache = folder / "model.yaml", folder / "kernels", folder / "cache"
        cache.mkdir(mode=0o700)
        self._llama = harness.Programs.find()
        if file is None:
            random_llama.write(self.file, weights=weights, size=size or random_llama.Size())
        sizes = [
            "--n-ctx=256",
            f"--n-tokens={n_tokens}",
            "--flash-attn=on",
            "--weights=none",
            f"--target={target}",
            *more,
        ]
        for words in (
            ["model", self.file, "-o", manifest, *sizes, *Programs.find().options()],
            ["build", manifest, "--compiler=simulator", "-o", kernels],
        ):
            done = subprocess.run([*KERNELGEN, *words], env=environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"kernelgen {words[0]}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        self._device = self._llama.environment(kernels=kernels) | {"NEURON_SIMULATOR_CACHE": str(cache)}

    def run(
        self, program: str, *arguments: object, device: bool = True, **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of llama.cpp's programs.

        Args:
            program: its name.
            *arguments: its arguments.
            device: whether it runs on the simulated device; else on the CPU alone.
            **variables: additional environment variables.

        Raises:
            SystemExit: it failed.
        """
        base = self._device if device else os.environ
        more = {name: str(value) for name, value in variables.items()}
        found = {**base, "LD_LIBRARY_PATH": str(self._llama.llama_cpp), **more}
        done = self._llama.run(program, *arguments, environment=found)
        if done.returncode:
            raise SystemExit(f"{program}: exit status {done.returncode}\n{done.stderr[-4000:]}")
        return done

    def bench(
        self, *, prompt: int, generated: int, runs: int, options: tuple[object, ...] = (), **variables: Any
    ) -> tuple[list[float], str]:
        """Returns the milliseconds per token in each run of llama-bench, and its stderr.

        Args:
            prompt: the tokens of the prompt.
            generated: the generated tokens.
            runs: the number of runs, after a warm-up.
            options: more options of llama-bench.
            **variables: as for `run`, and `device`.
        """
        words = ("-m", self.file, "-p", prompt, "-n", generated, "-r", runs, "-fa", 1, "-o", "json", *options)
        done = self.run("llama-bench", *words, **variables)
        (result,) = json.loads(done.stdout)
        return [ns / (prompt + generated) / 1e6 for ns in result["samples_ns"]], done.stderr

    def token_ms(self, quick: bool, **variables: Any) -> float:
        """Returns the mean milliseconds per generated token, on all of this process's processors."""
        threads = ("-t", len(os.sched_getaffinity(0)))
        n, runs = (8, 1) if quick else (32, 3)
        found, _ = self.bench(prompt=0, generated=n, runs=runs, options=threads, **variables)
        return sum(found) / len(found)

    def token_cpu_ms(self, quick: bool, *, tokens: int = 24, device: bool = True, **variables: object) -> float:
        """Returns the CPU milliseconds per generated token: of llama-bench, the simulator's helper and XLA.

        Other programs on the machine affect CPU time less than wall time. The result is the least of several
        repetitions in one process, without the first, which loads kernels; it is at least the resolution of the process
        clock.

        Args:
            quick: whether a few tokens are enough.
            tokens: the tokens per repetition.
            device: whether it runs on the simulated device; else on the CPU alone.
            **variables: additional environment variables.
        """
        n, repetitions = (4, 2) if quick else (tokens, 4)
        base = self._device if device else os.environ
        found = {**base, "LD_LIBRARY_PATH": str(self._llama.llama_cpp), **{k: str(v) for k, v in variables.items()}}
        words = [
            "-m",
            self.file,
            "-p",
            0,
            "-n",
            ",".join([str(n)] * repetitions),
            "-r",
            1,
            "-fa",
            1,
            "-t",
            1,
            "-o",
            "jsonl",
        ]
        command = [str(self._llama.llama_cpp / "llama-bench"), *map(str, words), "--no-warmup"]
        with subprocess.Popen(
            command, env=found, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            worked = [_cpu_seconds(process.pid) for line in process.stdout if line.startswith("{")]
        if process.returncode or len(worked) != repetitions:
            raise SystemExit(f"llama-bench: exit status {process.returncode}")
        least = min(after - before for before, after in itertools.pairwise(worked))
        return max(least, 1 / os.sysconf("SC_CLK_TCK")) / n * 1e3


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process and all its descendants."""
    try:
        # The second word is a name in parentheses that may contain spaces.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()
        ]
    except OSError:  # the process has ended
        return 0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK") + sum(_cpu_seconds(c) for c in children)
