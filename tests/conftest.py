"""What all tests share: no cache of NEFFs, NEFFs in the real form, quick compiles, and Bazel's sharding protocol for pytest (each shard
runs every n-th test; tests that `pytest.mark.together` gives the same name count as one). Tests that `pytest.mark.long` marks run only
when KERNELGEN_LONG_TESTS is set, as `./bazelw test --config=long //...` does.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests of builds count what is compiled: what others have in a cache must not be found. Tests of the cache name one.
os.environ["NEURON_KERNELGEN_NEFF_CACHE"] = "off"
os.environ.pop("NEURON_KERNELGEN_SHARED_CACHE", None)

# Tests run a kernel once or a few times, on small tensors: XLA compiles in a third of the time without LLVM's optimizations, and when
# LLVM rather than XLA's own passes on MLIR lowers what is fused.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")


@pytest.fixture(scope="session")
def real_neff() -> Callable[..., bytes]:
    """Makes NEFFs in the form that neuronx-cc writes, by the double's function `neff(hlo, target, lnc, …)`."""
    made: Callable[..., bytes] = runpy.run_path(str(Path(__file__).parent / "compilers" / "fake_neuronx_cc"))["neff"]
    return made


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    kept = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("KERNELGEN_LONG_TESTS"):
        keep(config, items, [item for item in items if item.get_closest_marker("long") is None])
    if "TEST_TOTAL_SHARDS" not in os.environ:
        return
    Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()
    total, index = int(os.environ["TEST_TOTAL_SHARDS"]), int(os.environ["TEST_SHARD_INDEX"])
    names = [str(mark.args) if (mark := item.get_closest_marker("together")) else item.nodeid for item in items]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    chosen = [item for item, name in zip(items, names, strict=True) if numbers[name] % total == index]
    keep(config, items, chosen)
