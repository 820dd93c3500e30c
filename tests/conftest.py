"""What all tests share: no cache of NEFFs, NEFFs in the real form, quick compiles, and Bazel's sharding protocol for pytest (each shard
runs every n-th test; tests that `pytest.mark.together` gives the same name count as one, as `OF_ONE_SHARD` says of folders). Tests that
`pytest.mark.long` marks run only when KERNELGEN_LONG_TESTS is set, as `./bazelw test --config=long //...` does.

Tests that run kernels on simulated NeuronCores do so for one of `INSTANCES`: each file of tests for one that follows from its name, or
all of them for what `--neuron-target` or KERNELGEN_TEST_TARGET says, as `./bazelw test --config=trn2 //...` does.

`python -m pytest` in a checkout runs them without Bazel: there a test skips when it needs a program that is not built (`there`).
`-m "not slow"` leaves out the folders of `SLOW`, and the rest takes some two minutes.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import selectors
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

# Tests of builds count what is compiled: what others have in a cache must not be found. Tests of the cache name one.
os.environ["NEURON_KERNELGEN_NEFF_CACHE"] = "off"
os.environ.pop("NEURON_KERNELGEN_SHARED_CACHE", None)

# Tests run a kernel once or a few times, on small tensors: XLA compiles in a third of the time without LLVM's optimizations, and when
# LLVM rather than XLA's own passes on MLIR lowers what is fused.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

# NumPy's threads for products of matrices spin for a tenth of a second in each process that imports it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Processes that tests start find kernelgen as the tests do, with no environment of Bazel's.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1] / "tools"), os.environ.get("PYTHONPATH")])
)

SLOW = frozenset(
    "backend bazel bazelw benchmarks cache ci cli cmake docs e2e examples ggml_neuron kernels languages llama model remote simulator".split()
)
"""Folders whose tests start builds, run llama.cpp's programs, or compute every kernel."""

TARGETS = ("trn1", "trn2", "inf2")
"""Those that tests run for; trn1n is trn1 with more network, and AWS does not document trn3 as one."""
TARGET = "KERNELGEN_TEST_TARGET"

OF_ONE_SHARD = {"ggml_neuron": ("inf2",), "simulator": ("trn2",)}
"""Folders whose tests share much that is built for a target, and targets: one of two shards has the files of these, the other has the rest and
takes about as long."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"run all tests for this target; by default each file of tests has one of them (or {TARGET} names one)"
    parser.addoption("--neuron-target", choices=TARGETS, default=os.environ.get(TARGET) or None, help=text)


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--neuron-target")
    if chosen not in (None, *TARGETS):
        raise pytest.UsageError(f"{TARGET}={chosen}: expected one of {', '.join(TARGETS)}")


def turn(file: Path) -> str:
    """Returns the target that a file's tests are for when none is chosen."""
    return TARGETS[zlib.crc32(file.name.encode()) % len(TARGETS)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each test that depends on `neuron_target` one target, so that a run for all of them takes no longer than for one."""
    if "neuron_target" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--neuron-target") or turn(Path(metafunc.module.__file__))
        # Of the whole session: pytest runs the tests of one target after the other, and makes what they share once for each.
        metafunc.parametrize("neuron_target", [chosen], indirect=True, scope="session")


@pytest.fixture(scope="session")
def neuron_target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Gives the target that kernels are compiled for, and that the machine has which the simulator plays; programs find it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TARGET, request.param)
        yield request.param


@pytest.fixture(scope="session")
def there() -> Callable[[Path, str], Path]:
    """Returns a function that gives the path of what is built from C++: `built`, where Bazel puts it, or what a variable names.

    What is absent skips the test, unless Bazel runs it or the variable is set: then it fails.
    """

    def there(built: Path, variable: str) -> Path:
        path = Path(os.environ.get(variable, built)).absolute()
        if not path.exists():
            message = f"{path} is not there: run this through Bazel, or name what is built in {variable}"
            if variable in os.environ or "TEST_SRCDIR" in os.environ:
                pytest.fail(message)
            pytest.skip(message)
        return path

    return there


@pytest.fixture(scope="session")
def llama_cpp_sources(there: Callable[[Path, str], Path]) -> Path:
    """Returns llama.cpp's source tree: LLAMA_CPP_SOURCES, or what Bazel fetched."""
    fetched = Path(os.environ.get("TEST_SRCDIR", "sources of llama.cpp")).glob("*llama_cpp*/CMakeLists.txt")
    return there(next(fetched, Path("sources of llama.cpp/CMakeLists.txt")).parent, "LLAMA_CPP_SOURCES")


@pytest.fixture(scope="session")
def real_neff() -> Callable[..., bytes]:
    """Makes NEFFs in the form that neuronx-cc writes, by the double's function `neff(hlo, target, lnc, …)`."""
    made: Callable[..., bytes] = runpy.run_path(str(Path(__file__).parent / "compilers" / "fake_neuronx_cc"))["neff"]
    return made


@pytest.fixture(scope="session")
def keep_workers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns what leaves workers of one build in this process, which have imported JAX, to the next one with the same environment."""
    from kernelgen.build import executor, pool

    folder = tmp_path_factory.mktemp("workers")

    @contextlib.contextmanager
    def keep_workers() -> Iterator[None]:
        kept: list[pool._Worker] = []
        key: object = None

        def end() -> None:
            while kept:
                worker = kept.pop()
                worker.ask_to_stop()
                worker.kill(time.monotonic() + pool.GRACE)

        class KeptPool(pool.Pool):
            def __init__(self, size: int, logs: Path, environment: Mapping[str, str]) -> None:
                nonlocal key
                # The build's own folder of temporary files goes with the build.
                super().__init__(size, Path(tempfile.mkdtemp(dir=folder)), {**environment, "TMPDIR": str(folder)})
                # Which SDK there is, the build's own process finds out.
                own = (Path.cwd(), {**self._environment, "PYTEST_CURRENT_TEST": "", "NEURON_SDK": ""})
                if own != key:
                    end()
                    key = own
                self._workers = [kept.pop() for _ in range(min(size, len(kept)))]
                for worker in self._workers:
                    self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

            def stop(self) -> None:
                kept.extend(worker for worker in self._workers if not worker.busy)
                self._workers = [worker for worker in self._workers if worker.busy]
                super().stop()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "Pool", KeptPool)
            yield
        end()

    return keep_workers


@pytest.fixture(scope="module")
def kept_workers(keep_workers: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Lets the builds of a file of tests share workers, which takes a second or two off each."""
    with keep_workers():
        yield


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    kept = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen


def unit(item: pytest.Item) -> str:
    """Returns a name for what is in one shard with a test."""
    if mark := item.get_closest_marker("together"):
        return str(mark.args)
    if targets := OF_ONE_SHARD.get(item.path.parent.name):
        return str(turn(item.path) in targets)
    return item.nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW & {*item.path.parts}.difference(Path(__file__).parts):
            item.add_marker("slow")
    if not os.environ.get("KERNELGEN_LONG_TESTS"):
        keep(config, items, [item for item in items if item.get_closest_marker("long") is None])
    if "TEST_TOTAL_SHARDS" not in os.environ:
        return
    Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()
    total, index = int(os.environ["TEST_TOTAL_SHARDS"]), int(os.environ["TEST_SHARD_INDEX"])
    names = [unit(item) for item in items]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    chosen = [item for item, name in zip(items, names, strict=True) if numbers[name] % total == index]
    keep(config, items, chosen)
