"""Tokens sampled on a NeuronCore (llama.cpp's --backend-sampling) equal the CPU's, or have the same distribution."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import calls
import harness
import numpy as np
import pytest
import random_llama
import recordings
from scipy.stats import chi2_contingency

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


@dataclass(frozen=True)
class Sampled:
    """The output of the program `sampling`, and the backend's log."""

    printed: str
    log: str

    def steps(self, name: str) -> list[list[int]]:
        """Returns the numbers with a name that each step prints, such as the tokens of the device."""
        found = re.findall(rf"^step .*\b{name}=(\S+)", self.printed, re.MULTILINE)
        return [list(map(int, numbers.split(","))) for numbers in found]


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
        return Sampled(done.stdout, done.stderr)

    def environment(self, **options: Path) -> dict[str, str]:
        variables = {"LD_LIBRARY_PATH": str(self.programs.llama_cpp), "OMP_NUM_THREADS": "1"}
        return self.programs.environment(**options, log=True, buffers="device") | variables


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
    found = bench.sample(chain, n_seqs=n_seqs)
    tokens = found.steps("device")
    assert tokens == found.steps("cpu")
    assert len({token for step in tokens for token in step}) > 3
    assert found.steps("on_device") == [[n_seqs]] * N_STEPS
    n_logits = SIZE.n_vocab if chain == "greedy" else 1
    assert found.steps("logits") == [[n_logits] * n_seqs] * N_STEPS
    # llama.cpp reads logits, probabilities and candidates with each token
    n_bytes = n_seqs * (4 * (SIZE.n_vocab + 1) if chain == "greedy" else 16)
    assert f"and {n_bytes} bytes from them" in found.log, found.log


@pytest.mark.long
@pytest.mark.parametrize("n_seqs", [1, N_SEQS])
@pytest.mark.parametrize("chain", [*DRAWN, *OTHERS])
def test_equal_seeds_draw_the_cpu_s_tokens(bench: Bench, chain: str, n_seqs: int) -> None:
    """One token may differ, where a random number falls between two tokens: logits differ in the last bits. Each run
    draws the same tokens.
    """
    found = bench.sample(chain, n_seqs=n_seqs)
    device, cpu = (np.array(found.steps(side)) for side in ("device", "cpu"))
    assert (device != cpu).sum() <= 1, (device, cpu)
    assert found.steps("on_device") == [[n_seqs]] * N_STEPS
    assert bench.sample(chain, n_seqs=n_seqs).steps("device") == found.steps("device")


@pytest.mark.long
@pytest.mark.parametrize("chain", [DEFAULT, "min_p=0.4,dist", OTHERS[0]])
def test_tokens_are_drawn_as_often_as_on_the_cpu(bench: Bench, chain: str) -> None:
    printed = bench.sample(chain, n_steps=1, n_draws=500).printed
    draws = np.array(re.findall(r"^token \d+ device=(\d+) cpu=(\d+)$", printed, re.MULTILINE), int)
    draws = draws[draws[:, 1].argsort()]
    assert draws[:, 0].sum() == 500
    rare = draws[:, 1].cumsum() < 100
    counts = np.vstack([draws[rare].sum(axis=0), draws[~rare]]) + 1
    assert len(counts) > 4
    assert chi2_contingency(counts).pvalue > 1e-4
    counts[:, 1] = counts[::-1, 1]
    assert chi2_contingency(counts).pvalue < 1e-4, "the test rejects another distribution"


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
    run(kernels=tmp_path / "none", record=tmp_path / "recorded.graphs")
    manifest = recordings.manifest_of(tmp_path / "recorded.graphs", harness.target())
    recorded = manifest.read_text()
    assert "131072" not in recorded, "the question, which no call asks"
    assert "params: {s: any, b: any}" in recorded
    harness.build_manifest(manifest, tmp_path / "kernels")
    log = run(kernels=tmp_path / "kernels")
    assert "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore" in log
    assert "does not have support" not in log
    for op in ("TOP_K", "ARGSORT", "ARGMAX", "CUMSUM", "FILL"):
        assert re.search(rf"ops ran on NeuronCores: .*\d {op}\b", log)
