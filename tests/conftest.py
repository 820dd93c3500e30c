"""Settings for all tests: no cache of NEFFs, NEFFs in the real form, fast compiles, and Bazel's sharding protocol for
pytest.

Each shard runs every n-th test. Tests with the same name in `pytest.mark.together` are in one shard; so are the files
of a folder in `OF_ONE_SHARD`. Tests with `pytest.mark.long` run only if KERNELGEN_LONG_TESTS is set, as `./bazelw test
--config=long //...` does.

Tests that run kernels on simulated NeuronCores use one of `TARGETS`: each file of tests has a target that follows from
its name, unless `--neuron-target` or KERNELGEN_TEST_TARGET names one for all, as `./bazelw test --config=trn2 //...`
does.

`python -m pytest` in a checkout runs the tests without Bazel: a test whose program is not built is skipped (`there`).
`-m "not slow"` omits the folders of `SLOW`; the rest takes about two minutes.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Tests of builds count compiles, so no earlier cache entry may be found. Tests of the cache name a cache.
os.environ["NEURON_KERNELGEN_NEFF_CACHE"] = "off"
os.environ.pop("NEURON_KERNELGEN_SHARED_CACHE", None)

# Tests run a kernel a few times on small tensors. XLA compiles in a third of the time without LLVM's optimizations, and
# with fusions lowered by LLVM instead of XLA's MLIR passes.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

# NumPy's threads for matrix products spin for a tenth of a second in each process that imports NumPy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Processes that tests start find kernelgen as the tests do, without Bazel's environment.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1] / "tools"), os.environ.get("PYTHONPATH")])
)

SLOW = frozenset(
    "backend bazel bazelw benchmarks cache ci cli cmake docs e2e examples ggml_neuron kernels languages llama model remote simulator".split()
)
"""Folders whose tests start builds, run llama.cpp's programs, or compute every kernel."""

TARGETS = ("trn1", "trn2", "inf2")
"""Targets of the tests. trn1n is trn1 with a faster network, and AWS does not document trn3 in full."""
TARGET = "KERNELGEN_TEST_TARGET"

OF_ONE_SHARD = {"ggml_neuron": ("inf2",), "simulator": ("trn2",)}
"""Folders whose tests share programs that are built for a target. One of two shards has the files of the listed
targets; the other has the rest and takes about as long.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"run all tests for this target; by default each file of tests has one of them (or {TARGET} names one)"
    parser.addoption("--neuron-target", choices=TARGETS, default=os.environ.get(TARGET) or None, help=text)


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--neuron-target")
    if chosen not in (None, *TARGETS):
        raise pytest.UsageError(f"{TARGET}={chosen}: expected one of {', '.join(TARGETS)}")


def turn(file: Path) -> str:
    """Returns the target of a file's tests if none is chosen."""
    return TARGETS[zlib.crc32(file.name.encode()) % len(TARGETS)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each test that depends on `neuron_target` one target, so all targets together take no longer than one."""
    if "neuron_target" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--neuron-target") or turn(Path(metafunc.module.__file__))
        # Session scope: pytest runs the tests of one target after another, and makes shared fixtures once per target.
        metafunc.parametrize("neuron_target", [chosen], indirect=True, scope="session")


@pytest.fixture(scope="session")
def neuron_target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Gives the target of compiles and of the simulated machine, and sets it in the environment for programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TARGET, request.param)
        yield request.param


@pytest.fixture(scope="session")
def there() -> Callable[[Path, str], Path]:
    """Returns a function that returns the path of a program or folder built from C++: `built`, where Bazel puts it, or
    a variable's value.

    If the path does not exist, the test is skipped; it fails under Bazel, or if the variable is set.
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
    """Returns llama.cpp's source tree: LLAMA_CPP_SOURCES, or the tree that Bazel fetched."""
    fetched = Path(os.environ.get("TEST_SRCDIR", "sources of llama.cpp")).glob("*llama_cpp*/CMakeLists.txt")
    return there(next(fetched, Path("sources of llama.cpp/CMakeLists.txt")).parent, "LLAMA_CPP_SOURCES")


@pytest.fixture(scope="session")
def real_neff() -> Callable[..., bytes]:
    """Returns the double's function `neff(hlo, target, lnc, …)`, which makes NEFFs in neuronx-cc's form."""
    made: Callable[..., bytes] = runpy.run_path(str(Path(__file__).parent / "compilers" / "fake_neuronx_cc"))["neff"]
    return made


@pytest.fixture(scope="session")
def keep_workers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context manager in which builds of this process share the servers that run steps, which have imported JAX."""
    from kernelgen.build import ninja

    folder = tmp_path_factory.mktemp("servers")

    @contextlib.contextmanager
    def keep_workers() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ninja, "SERVERS", folder)
            yield

    return keep_workers


@pytest.fixture(scope="module")
def kept_workers(keep_workers: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Shares servers between the builds of a file of tests, which saves each build a second or two."""
    with keep_workers():
        yield


def keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    kept = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen


def unit(item: pytest.Item) -> str:
    """Returns the name of the group of tests that share a shard with this test."""
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
