"""Each command refuses a FIFO or a device as an input at once, and names the kind of file."""

import os
from pathlib import Path

import pytest

from kernelgen import cli, fileio
from kernelgen.bundle import describe as inspecting
from kernelgen.bundle import pack, reader, tree
from kernelgen.cli.run_kernel import _mapped
from kernelgen.emitters.scan import of_function, scan
from kernelgen.errors import KernelgenError
from kernelgen.model import graph_ops
from kernelgen.neff import container


@pytest.fixture(params=["a FIFO", "a device"])
def endless(request: pytest.FixtureRequest, tmp_path: Path):
    def make(name: str) -> Path:
        path = tmp_path / name
        if request.param == "a FIFO":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        return path

    make.kind = request.param
    return make


@pytest.mark.parametrize("name", ["k.neff", "k.hlo.pb", "k.kernels.gguf", "index.json"])
def test_inspect_refuses_it(endless, name):
    with pytest.raises(KernelgenError, match=f"it is {endless.kind}, not a file"):
        inspecting.describe(endless(name))


def test_a_source_is_not_read(endless):
    with pytest.raises(KernelgenError, match=f"can't read '.*k.py': it is {endless.kind}, not a file"):
        of_function(endless("k.py"), "f")


def test_a_module_of_a_library_is_not_read(endless):
    found, mistakes = scan(endless("k.py"))
    assert not found
    assert f"it is {endless.kind}, not a file" in mistakes[0].message


def test_an_export_is_not_read(endless):
    with pytest.raises(KernelgenError, match=f"it is {endless.kind}, not a file"):
        graph_ops.read_graphs(endless("graphs.txt"))


def test_an_array_is_not_read(endless):
    with pytest.raises(KernelgenError, match=f"it is {endless.kind}, not a file"):
        _mapped(str(endless("x.npy")))


@pytest.mark.parametrize("read", [container.read_header_of, pack.read, fileio.read_input])
def test_a_reader_refuses_it(endless, read):
    with pytest.raises(OSError, match=f"it is {endless.kind}, not a file"):
        read(endless("k"))


def test_a_tree_with_one_is_refused(endless):
    with pytest.raises(OSError, match=f"it is {endless.kind}, not a file"):
        tree.read_index(endless("index.json").parent)


def test_it_is_not_a_bundle(endless):
    assert not reader.is_bundle(endless("k"))


def test_a_source_that_is_too_large_is_refused(tmp_path):
    path = tmp_path / "k.py"
    path.touch()
    os.truncate(path, 2**40)

    with pytest.raises(KernelgenError, match="has 1099511627776 bytes, more than"):
        of_function(path, "f")


@pytest.mark.parametrize("name", ["k.neff", "k.hlo.pb"])
def test_a_file_larger_than_any_is_not_read(tmp_path, name):
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 2**40)
    with pytest.raises(KernelgenError, match="it has 1099511627776 bytes, more than 2147483648"):
        inspecting.describe(tmp_path / name)


def test_compile_refuses_a_file_larger_than_any(tmp_path, capsys):
    hlo = tmp_path / "k.hlo.pb"
    hlo.touch()
    os.truncate(hlo, 2**40)
    assert cli.run(["compile", str(hlo), "-o", str(tmp_path / "k.neff"), "--target", "trn1", "--cache", "off"]) == 2
    assert f"error: {hlo}: it has 1099511627776 bytes, more than 2147483648\n" in capsys.readouterr().err
