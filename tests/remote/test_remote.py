"""Bazel with a shared cache and on a cluster, as in a team: real servers on loopback, real builds in scratch checkouts.

If the servers' packages are not available, these tests are skipped with the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import cluster as clusters
import pytest
import yaml

import incremental_bazel
import scratch

SIMULATOR = {"neuron-compiler": ["simulator"], "neuron-target": ["trn1", "inf2", "trn2"]}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A scratch folder that a server without root's rights may enter; pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(prefix="neuron-kernelgen-servers-", ignore_cleanup_errors=True) as text:
        Path(text).chmod(0o755)
        yield Path(text)


@pytest.fixture
def cluster(folder: Path) -> Iterator[clusters.Cluster]:
    try:
        with clusters.cluster(folder) as made:
            yield made
            commands = running()
            assert any(str(folder) in command for command in commands)
    except clusters.Missing as missing:
        pytest.skip(f"no cluster here: {missing}")
    # No process remains.
    wait_until(lambda: not any(str(folder) in command for command in running()), 10, "the end of all processes")


def running() -> list[str]:
    """Returns the command lines of all processes."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(process.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def packs(checkout: scratch.Checkout, target: str) -> str:
    """Returns the digest of a bundle's pack."""
    lines = checkout.bazel("cquery", "--output=files", target + ".pack").output.splitlines()
    path = next(line for line in lines if line.endswith("kernels.gguf"))
    return hashlib.sha256((checkout.path / path).read_bytes()).hexdigest()


def ran_where(checkout: scratch.Checkout) -> Counter[tuple[str, str]]:
    """Returns how many actions of the last build ran, by mnemonic and runner."""
    spawns = scratch.spawns(checkout.output_root / "execution.json")
    return Counter((str(spawn["mnemonic"]), str(spawn["runner"])) for spawn in spawns)


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def jobs(worker: clusters.Server) -> int:
    """Returns how many actions a worker has run, from its log."""
    return worker.log.read_text(errors="replace").count("Runner exited with code 0")


def keep(checkout: scratch.Checkout, kernels: int) -> None:
    """Keeps only `kernels` kernels in the basic manifest: a worker of a cluster imports JAX for each emit and each compile."""
    path = checkout.path / "manifests/basic.yaml"
    manifest = yaml.safe_load(path.read_text())
    assert len(manifest["kernels"]) > kernels
    # YAML reads JSON.
    path.write_text(json.dumps(manifest | {"kernels": manifest["kernels"][:kernels]}))


def one_of_each_op(manifest: str, ops: int) -> str:
    """Returns a manifest with the last kernel of each of the first `ops` ops, for the first size of each."""
    content = yaml.safe_load(manifest)
    kernels = list({kernel["op"]: kernel for kernel in content["kernels"]}.values())
    assert len(kernels) >= ops
    sizes = {name: values[:1] for name, values in content["sizes"].items()}
    return json.dumps(content | {"kernels": kernels[:ops], "sizes": sizes})


@pytest.mark.long
@pytest.mark.parametrize("kernels", [4, 11])
def test_a_model_is_built_by_two_workers(kernels: int, cluster: clusters.Cluster, checkout: scratch.Checkout) -> None:
    workers = [cluster.worker(name, SIMULATOR) for name in ("one", "two")]
    (checkout.path / "manifests/llama3.yaml").write_text(one_of_each_op(incremental_bazel.SMALL, kernels))
    flags = ["--config=rbe", f"--remote_executor={cluster.url}"]
    target = "//manifests:llama3_trn1"
    cold = checkout.bazel("build", target, flags=flags)
    ran = ran_where(checkout)
    assert {where for (what, where), count in ran.items() if count and what != "NeuronDriver"} == {"remote"}
    assert cold.emits == cold.compiles == ran["NeuronEmit", "remote"] == kernels
    assert all(jobs(worker) >= kernels // 2 for worker in workers), [jobs(worker) for worker in workers]
    built = packs(checkout, target)
    checkout.bazel("clean")
    warm = checkout.bazel("build", target, flags=flags)
    assert (warm.emits, warm.compiles) == (0, 0)
    assert warm.cached["NeuronEmit"] == warm.cached["NeuronCompile"] == cold.emits
    # The cluster's packs equal this machine's.
    assert built == packs(checkout, target)
    checkout.bazel("clean")
    checkout.bazel("build", target)
    assert built == packs(checkout, target)


@pytest.mark.long
def test_a_worker_without_the_compiler_is_never_given_a_compile(
    cluster: clusters.Cluster, checkout: scratch.Checkout
) -> None:
    """It emits, and has another version of the compiler; compiles wait for the worker with the right one."""
    other = cluster.worker("other", {"neuron-compiler": ["neuronx-cc 2.24.5133.0+58f8de22"], "neuron-target": ["trn1"]})
    kernels = 4
    keep(checkout, kernels)
    flags = ["--config=rbe", f"--remote_executor={cluster.url}"]
    results: list[scratch.Result] = []
    building = threading.Thread(
        target=lambda: results.append(checkout.bazel("build", "//manifests:basic_trn1", flags=flags))
    )
    building.start()
    try:
        # The check of their HLO is one more.
        wait_until(lambda: jobs(other) >= kernels + 1, 300, f"{kernels} emits")
        # The scheduler assigns ten times per second, so 10 s are enough for a mistake.
        time.sleep(10)
        assert jobs(other) == kernels + 1
    finally:
        # Without it the build would wait forever.
        right = cluster.worker("right", SIMULATOR)
        building.join(timeout=300)
    assert results and (results[0].emits, results[0].compiles) == (kernels, kernels)
    # Either worker may make the bundle.
    assert jobs(right) >= kernels
    assert jobs(other) - kernels - 1 + jobs(right) - kernels <= 2


def test_a_preset_that_was_not_filled_in_is_reported(checkout: scratch.Checkout) -> None:
    output = checkout.bazel("build", "--config=rbe", "//manifests:basic_trn1", expect=None).output
    assert "name-your-cluster-in.user.bazelrc.invalid" in output
