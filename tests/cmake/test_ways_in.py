"""find_package() of an installation, add_subdirectory() of the repository, and a build for another machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, SMALL, cmake_project

pytestmark = pytest.mark.together("ways in")


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of an installation with the packs of a small manifest; its build folder is deleted."""
    folder = tmp_path_factory.mktemp("install")
    (folder / "small.yaml").write_text(SMALL)
    top = cmake_project.Project(checkout, folder / "build")
    top.configure(
        f"-DNEURON_KERNELGEN_MANIFESTS={folder}/small.yaml",
        "-DNEURON_KERNELGEN_TARGETS=inf2",
        "-DNEURON_KERNELGEN_COMPILER=simulator",
        "-DCMAKE_INSTALL_DATADIR=data",
    )
    top.make()
    cmake_project.run("cmake", "--install", folder / "build", "--prefix", folder / "first")
    shutil.rmtree(folder / "build")
    # An installation may be moved as a whole.
    return (folder / "first").rename(folder / "prefix")


def test_the_page_shows_a_project_that_works_with_an_installation(installed: Path, tmp_path: Path) -> None:
    """docs/guides/build-with-cmake.md shows the files of the installed example, and the output of its program."""
    page = (ROOT / "docs" / "guides" / "build-with-cmake.md").read_text()
    source = tmp_path / "layer"
    shutil.copytree(installed / "data" / "neuron-kernelgen" / "examples" / "cmake", source)
    for name, language in (("CMakeLists.txt", "cmake"), ("layer.yaml", "yaml"), ("layer.cc", "cpp")):
        assert f"```{language}\n{(source / name).read_text()}```" in page, f"{name} is not as the page shows it"
    commands, printed = [], []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            (commands if line.startswith("$ ") else printed).append(line.removeprefix("$ "))
    assert len(commands) == 3 and printed
    script = " &&\n".join(commands).replace("/opt/neuron-kernelgen", str(installed))
    environment = {**cmake_project.environment(), "NEURON_KERNELGEN_PYTHON": sys.executable}
    output = cmake_project.run("sh", "-c", f"cd {source.parent} && {script}", env=environment)
    assert output.splitlines()[-len(printed) :] == printed


@pytest.mark.long
def test_as_a_subfolder_it_adds_nothing_to_all_and_installs_nothing(checkout: Path, tmp_path: Path) -> None:
    """Kernels without EMBED are an interface library: a target that links to it gets the packs, and the library that
    opens them.
    """
    source = tmp_path / "project"
    cmake_project.write(
        source,
        [
            f'add_subdirectory("{checkout}" kernelgen)',
            "add_subdirectory(sub)",
            "add_executable(main EXCLUDE_FROM_ALL main.cc)",
            "target_link_libraries(main PRIVATE small_kernels)",
            'install(FILES "$<TARGET_PROPERTY:small_kernels,NEURON_KERNELS_PACKS>" DESTINATION share)',
        ],
    )
    (source / "main.cc").write_text(
        "#include <neuron_kernels.h>\n#include <cstdio>\n"
        "int main(int, char ** argv) {\n"
        "    char message[NEURON_KERNELS_MESSAGE_SIZE] = {};\n    neuron_kernels * bundle;\n"
        "    const int status = neuron_kernels_open_file(argv[1], &bundle, message, sizeof(message));\n"
        '    std::printf("%d %s\\n", status, message);\n}\n'
    )
    sub = source / "sub"
    sub.mkdir()
    (sub / "small.yaml").write_text(SMALL)
    (sub / "CMakeLists.txt").write_text(
        "add_neuron_kernels(small_kernels MANIFEST small.yaml TARGETS trn1 FORM PACK EXCLUDE_FROM_ALL)\n"
    )
    user = cmake_project.Project(source, tmp_path / "build")
    user.configure()
    assert user.make().commands == ()
    user.make("--target", "main")
    pack = next(user.build.rglob("small_trn1.kernels.gguf"))
    assert pack.is_relative_to(user.build / "sub")
    assert cmake_project.run(user.build / "main", pack) == "0 \n"
    cmake_project.run("cmake", "--install", user.build, "--prefix", tmp_path / "prefix")
    assert [p.name for p in (tmp_path / "prefix").rglob("*") if p.is_file()] == [pack.name]


@pytest.mark.long
def test_for_another_machine_python_is_this_ones_and_the_assembler_the_others(checkout: Path, tmp_path: Path) -> None:
    """The toolchain looks for programs only in its own root, which has no Python; its compiler logs its calls."""
    log = tmp_path / "log"
    wrapper = tmp_path / "other-linux-gcc"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\nexec {shutil.which("cc")} "$@"\n')
    wrapper.chmod(0o755)
    (tmp_path / "root").mkdir()
    toolchain = tmp_path / "other.cmake"
    toolchain.write_text(
        "set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_SYSTEM_PROCESSOR other)\n"
        f"set(CMAKE_C_COMPILER {wrapper})\nset(CMAKE_CXX_COMPILER {shutil.which('c++')})\n"
        f"set(CMAKE_AR {shutil.which('ar')})\nset(CMAKE_RANLIB {shutil.which('ranlib')})\n"
        f"set(CMAKE_FIND_ROOT_PATH {tmp_path}/root)\nset(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM ONLY)\n"
    )
    source = tmp_path / "project"
    cmake_project.write(
        source,
        [
            f'include("{checkout}/rules/cmake/NeuronKernels.cmake")',
            "add_neuron_kernels(small_kernels MANIFEST small.yaml TARGETS trn1)",
        ],
        "CXX",
    )
    (source / "small.yaml").write_text(SMALL)
    user = cmake_project.Project(source, tmp_path / "build")
    # By name, so CMake looks for it.
    environment = cmake_project.environment()
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    name = Path(sys.executable).name
    cmake_project.run(
        *("cmake", "-G", "Ninja", "-S", user.source, "-B", user.build, f"-DNEURON_KERNELGEN_PYTHON={name}"),
        f"-DCMAKE_TOOLCHAIN_FILE={toolchain}",
        f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
        env=environment,
    )
    user.make("--target", "small_kernels")
    called = log.read_text()
    assert "small_trn1.S.o" in called and "small_trn1.c.o" in called


@pytest.mark.parametrize("way", ["find_package(NeuronKernels REQUIRED)", 'add_subdirectory("{checkout}" kernelgen)'])
def test_program_in_c_links(way: str, installed: Path, checkout: Path, tmp_path: Path) -> None:
    calls = [
        way.format(checkout=checkout),
        "add_executable(main main.c)",
        "target_link_libraries(main PRIVATE NeuronKernels::neuron_kernels)",
    ]
    cmake_project.write(tmp_path / "project", calls, "C")
    (tmp_path / "project/main.c").write_text(
        "#include <neuron_kernels.h>\n"
        "int main(int n, char ** paths) {\n    neuron_kernels * bundle;\n"
        "    char message[NEURON_KERNELS_MESSAGE_SIZE];\n"
        "    return n < 2 ? 2 : neuron_kernels_open_file(paths[1], &bundle, message, sizeof(message));\n}\n"
    )
    user = cmake_project.Project(tmp_path / "project", tmp_path / "build")
    user.configure(f"-DCMAKE_PREFIX_PATH={installed}")
    user.make("--target", "main")
    (pack,) = installed.rglob("*.gguf")
    cmake_project.run(user.build / "main", pack)
