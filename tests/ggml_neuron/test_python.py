"""The wheel neuron-kernelgen-llama-cpp: its content, and that it loads the backend into the llama.cpp of the package
llama_cpp.

The package llama_cpp in these tests has the libraries that Bazel builds, in the place and with the version of
llama-cpp-python's.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from programs import ROOT, Programs

from kernelgen.cli import simulate
from kernelgen.model.exporter import VARIABLE

WHEEL = runpy.run_path(str(ROOT / "backend" / "python" / "build_wheel.py"))
VERSION = WHEEL["VERSION"]

LLAMA_CPP = """
import ctypes
from pathlib import Path

ctypes.CDLL(str(Path(__file__).with_name("lib") / "libllama.so"))
"""

DEVICES = """
import ctypes
import neuron_kernelgen.llama_cpp
from neuron_kernelgen.files import libraries

ggml = ctypes.CDLL(str(libraries() / "libggml.so"))
base = ctypes.CDLL(str(libraries() / "libggml-base.so"))
ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
base.ggml_backend_dev_name.argtypes, base.ggml_backend_dev_name.restype = [ctypes.c_void_p], ctypes.c_char_p
ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
print([base.ggml_backend_dev_name(ggml.ggml_backend_dev_get(i)).decode() for i in range(ggml.ggml_backend_dev_count())])
"""


@pytest.fixture(scope="module")
def wheel(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    exporter = folder / "export-graphs"
    exporter.write_text("#!/bin/sh\necho '{}'\n")
    exporter.chmod(0o755)
    binaries = programs.find("libggml-neuron.so"), exporter, programs.simulator
    made: Path = WHEEL["build"](folder / "out", *binaries, VERSION)
    again = WHEEL["build"](folder / "again", *binaries, VERSION)
    assert made.name == again.name and made.read_bytes() == again.read_bytes()
    return made


@pytest.fixture
def site(wheel: Path, programs: Programs, tmp_path: Path) -> Path:
    """Returns a folder of packages: the wheel and llama_cpp."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    libraries = site / "llama_cpp" / "lib"
    libraries.mkdir(parents=True)
    for library in programs.llama_cpp.glob("lib*.so*"):
        (libraries / library.name).symlink_to(library.resolve())
    (site / "llama_cpp" / "__init__.py").write_text(LLAMA_CPP)
    install(site, VERSION)
    return site


def install(site: Path, version: str) -> None:
    for old in site.glob("llama_cpp_python-*"):
        (old / "METADATA").unlink()
        old.rmdir()
    folder = site / f"llama_cpp_python-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: {version}\n")


def run(programs: Programs, site: Path, program: str, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    paths = [str(site), str(ROOT / "tools"), *filter(None, sys.path)]
    environment = programs.environment(PYTHONPATH=os.pathsep.join(paths), **variables)
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)


def test_importing_it_gives_llama_cpp_the_devices(programs: Programs, site: Path, kernels: Path) -> None:
    result = run(programs, site, DEVICES, GGML_NEURON_KERNEL_DIR=kernels)
    assert "NEURON0" in result.stdout, result.stderr
    assert "NEURON0" not in run(programs, site, DEVICES.replace("import neuron_kernelgen.llama_cpp\n", "")).stdout


def test_another_llama_cpp_python_is_refused_with_what_to_install(programs: Programs, site: Path) -> None:
    install(site, "0.0.1")
    said = run(programs, site, "import neuron_kernelgen.llama_cpp").stderr
    assert f"is built for the llama.cpp of llama-cpp-python {VERSION}; 0.0.1 is installed" in said
    assert f"pip install llama-cpp-python=={VERSION}" in said


def test_kernelgen_finds_the_exporter_of_the_wheel(programs: Programs, site: Path) -> None:
    program = (
        "from kernelgen.model import exporter; found = exporter.find(None, None); print(found.program, found.libraries)"
    )
    result = run(programs, site, program, **{VARIABLE: "", "PATH": "/usr/bin:/bin"})
    (site / "neuron_kernelgen" / "export-graphs").chmod(0o755)
    program_, libraries = result.stdout.split()
    assert program_ == str(site / "neuron_kernelgen" / "export-graphs")
    assert Path(libraries).name.startswith("neuron-kernelgen-") and not Path(libraries).exists()  # it has ended
    (site / "llama_cpp" / "__init__.py").unlink()
    install(site, "0.0.1")
    result = run(programs, site, program, **{VARIABLE: "", "PATH": "/usr/bin:/bin"})
    assert f"pip install llama-cpp-python=={VERSION}" in result.stderr


def test_the_wheel_is_for_the_llama_cpp_that_bazel_fetches(wheel: Path) -> None:
    source = (ROOT / "rules/private/repositories/pypi_sdist.bzl").read_text()
    assert f'version = "{VERSION}"' in source
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
        (program,) = (one for one in archive.infolist() if one.filename.endswith("export-graphs"))
    assert f"Requires-Dist: llama-cpp-python=={VERSION}" in metadata
    assert program.external_attr >> 16 & 0o111


def test_the_wheel_installs_the_simulator_where_kernelgen_looks(
    wheel: Path, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("libnrt.so.1"))
        path = name.partition(".data/data/")[2]  # the path below the prefix where pip installs it
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(archive.read(name))
    assert (tmp_path / path).read_bytes() == programs.simulator.read_bytes()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert tmp_path / path in simulate.places()
