"""Tokens sampled on a NeuronCore (llama.cpp's --backend-sampling) equal the CPU's, or have the same distribution."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import calls
import harness
import numpy as np
import pytest
import random_llama

SIZE = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=2, n_ctx=512, n_vocab=4000)
GREEDY = "temperature=0,dist"
DEFAULT = "top_k=40,top_p=0.95,min_p=0.05,temperature=0.8,dist"
EXACT = ("greedy", GREEDY, f"top_k=8,{GREEDY}")
"""Chains that leave one token, whatever the random number is."""
DRAWN = (DEFAULT, "penalties=16:1.3:0.1:0.1,top_k=20,temperature=0.7:0.2:1.5,top_p=0.9,dist", "min_p=0.4,dist")
"""Chains that draw one of several tokens. They sort candidates or keep the vocabulary's order as the CPU does, so equal
seeds draw equal tokens. A dynamic temperature comes before samplers that hide candidates: after them, llama.cpp counts
hidden candidates on a device, but not on the CPU.
"""
OTHERS = (
    "top_k=40,top_p=0.6,min_p=0.2,temperature=1.6,dist",
    "penalties=16:1.6:0.4:-0.2,top_k=20,temperature=1.2:0.7:0.8,top_p=0.7,dist",
    "min_p=0.6,dist",
)
"""The same chains with other numbers, for which no kernels are made. The sizes in shapes are equal: the number of last
tokens, and `top_k`.
"""
N_SEQS = 3
N_STEPS = 12
CONFIDENT = 3.72
"""Standard deviations that one value in 10,000 exceeds."""


@dataclass(frozen=True)
class Sampled:
    """The output of the program `sampling`.

    Attributes:
        device, cpu: the tokens of each step, of each sequence.
        on_device: the number of tokens of each step that the device sampled.
        logits: the number of logits that came with each token.
        draws: how often each token was drawn, and its probability.
        log: the backend's log.
    """

    device: list[list[int]]
    cpu: list[list[int]]
    on_device: list[int]
    logits: list[list[int]]
    draws: Mapping[int, tuple[int, float]]
    log: str

    def moved_out(self) -> int:
        """Bytes that the last call moved from the device."""
        found = re.search(r"and (\d+) bytes from them", self.log)
        assert found, self.log
        return int(found[1])


@dataclass(frozen=True)
class Bench:
    """A model, and the kernels for all chains."""

    programs: harness.Programs
    folder: Path

    def sample(self, chain: str, *, n_seqs: int = 1, n_steps: int = N_STEPS, n_draws: int = 0) -> Sampled:
        """Runs the program; checks that only the embedding's rows run on the CPU."""
        text = self.folder / "text"
        text.write_text(calls.TEXT)
        command = [calls.program("sampling"), self.programs.llama_cpp, self.folder / "model.gguf", text, chain]
        numbers = (1, n_seqs, 5, n_steps, n_draws)
        done = harness.run([*command, *numbers], self.environment(kernels=self.folder / "kernels"))
        assert done.returncode == 0, done.stderr[-3000:]
        assert "does not have support" not in done.stderr
        assert "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore" in done.stderr
        assert "because no kernel computes them" not in done.stderr, done.stderr[-3000:]

        def numbers_of(name: str) -> list[list[int]]:
            return [
                list(map(int, found.split(","))) for found in re.findall(rf"^step .*\b{name}=(\S+)", done.stdout, re.M)
            ]

        draws = re.findall(r"^token (\d+) drawn=(\d+) likely=(\S+)", done.stdout, re.M)
        return Sampled(
            numbers_of("device"),
            numbers_of("cpu"),
            [n for (n,) in numbers_of("on_device")],
            numbers_of("logits"),
            {int(token): (int(n), float(likely)) for token, n, likely in draws},
            done.stderr,
        )

    def environment(self, **options: Path) -> dict[str, str]:
        return self.programs.environment(**options, log=True, buffers="device") | {
            "LD_LIBRARY_PATH": str(self.programs.llama_cpp),
            "OMP_NUM_THREADS": "1",
        }


@pytest.fixture(scope="module")
def bench(programs: harness.Programs, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("sampling")
    random_llama.write(folder / "model.gguf", weights=np.float32, size=SIZE, architecture="qwen3", tied=True)
    chains = [word for chain in (*EXACT, *DRAWN) for word in ("--samplers", chain)]
    more = ("--kv-unified", "--n-seq-max", str(N_SEQS), *chains)
    options = {"n_tokens": (1, 8), "n_ctx": (256,), "fuse": "layer"}
    harness.derive(programs, folder / "model.gguf", folder / "kernels", *more, **options)
    return Bench(programs, folder)


@pytest.mark.long
@pytest.mark.parametrize("n_seqs", [1, N_SEQS])
@pytest.mark.parametrize("chain", EXACT)
def test_the_likeliest_tokens_are_those_of_the_cpu(bench: Bench, chain: str, n_seqs: int) -> None:
    """A step of one or several outputs takes as many launches as without sampling: one, since the layers are alike."""
    found = bench.sample(chain, n_seqs=n_seqs)
    assert found.device == found.cpu
    assert len({token for step in found.device for token in step}) > 3
    assert found.on_device == [n_seqs] * N_STEPS
    n_logits = SIZE.n_vocab if chain == "greedy" else 1
    assert found.logits == [[n_logits] * n_seqs] * N_STEPS
    # llama.cpp reads logits, probabilities and candidates with each token
    assert found.moved_out() == n_seqs * (4 * (SIZE.n_vocab + 1) if chain == "greedy" else 16)


@pytest.mark.long
@pytest.mark.parametrize("n_seqs", [1, N_SEQS])
@pytest.mark.parametrize("chain", [*DRAWN, *OTHERS])
def test_equal_seeds_draw_the_cpu_s_tokens(bench: Bench, chain: str, n_seqs: int) -> None:
    """One token may differ, where a random number falls between two tokens: logits differ in the last bits. Each run
    draws the same tokens.
    """
    found = bench.sample(chain, n_seqs=n_seqs)
    pairs = [pair for steps in zip(found.device, found.cpu, strict=True) for pair in zip(*steps, strict=True)]
    assert sum(device != cpu for device, cpu in pairs) <= 1, pairs
    assert found.on_device == [n_seqs] * N_STEPS
    assert bench.sample(chain, n_seqs=n_seqs).device == found.device


def chi_square(counts: list[int], likely: list[float]) -> tuple[float, float]:
    """Returns the chi-square statistic of the draws, and the value that one in 10,000 exceeds (Wilson and Hilferty,
    1931).

    Tokens with an expected count below five count together.
    """
    n = sum(counts)
    many = [(c, p * n) for c, p in zip(counts, likely, strict=True) if p * n >= 5]
    few = [(c, p * n) for c, p in zip(counts, likely, strict=True) if p * n < 5]
    if few:
        many.append((sum(c for c, _ in few), max(sum(p for _, p in few), 1e-9)))
    degrees = len(many) - 1
    assert degrees > 3
    most = degrees * (1 - 2 / (9 * degrees) + CONFIDENT * math.sqrt(2 / (9 * degrees))) ** 3
    return sum((c - p) ** 2 / p for c, p in many), most


@pytest.mark.long
@pytest.mark.parametrize("chain", [DEFAULT, "min_p=0.4,dist", OTHERS[0]])
def test_tokens_are_drawn_as_often_as_they_are_likely(bench: Bench, chain: str) -> None:
    draws = bench.sample(chain, n_steps=1, n_draws=500).draws
    counts, likely = [n for n, _ in draws.values()], [p for _, p in draws.values()]
    assert sum(counts) == 500
    statistic, most = chi_square(counts, likely)
    assert statistic < most
    # the test rejects another distribution, with the probabilities in reverse order
    order = sorted(range(len(likely)), key=lambda i: likely[i])
    other = [0.0] * len(likely)
    for i, j in zip(order, reversed(order), strict=True):
        other[i] = likely[j]
    statistic, most = chi_square(counts, other)
    assert statistic > most


@pytest.mark.long
def test_llama_cpp_s_own_test_passes(bench: Bench, tmp_path: Path) -> None:
    """test-backend-sampler with the kernels that it records: no op runs on the CPU."""
    folder = harness.built("LLAMA_MORE_PROGRAMS", "backend_sampler")
    command = [folder / "test-backend-sampler", "--model", bench.folder / "model.gguf", "--device", "gpu"]

    def run(**options: Path) -> str:
        environment = bench.environment(**options) | {"LD_PRELOAD": str(bench.programs.load_backends)}
        done = harness.run(command, environment, cwd=bench.programs.llama_cpp)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stderr

    (tmp_path / "none").mkdir()
    run(kernels=tmp_path / "none", record=tmp_path / "recorded.yaml")
    recorded = (tmp_path / "recorded.yaml").read_text()
    assert "131072" not in recorded, "the question, which no call asks"
    assert "params: {s: any, b: any}" in recorded
    harness.build_manifest(tmp_path / "recorded.yaml", tmp_path / "kernels")
    log = run(kernels=tmp_path / "kernels")
    assert "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore" in log
    assert "does not have support" not in log
    for op in ("TOP_K", "ARGSORT", "ARGMAX", "CUMSUM", "FILL"):
        assert re.search(rf"ops ran on NeuronCores: .*\d {op}\b", log)
