"""Damaged and hostile headers give a manifest, or one line of error and exit status 2.

`./bazelw test --config=long //tests:model --test_env=KERNELGEN_FUZZ_ROUNDS=5000 --test_arg=-kdamaged_headers` damages 5,000.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fuzz_headers
import headers
import pytest
from damage import MetadataEntry, Parts, TensorInfo, parts, put_together

from kernelgen.model.exporter import Exporter

from .conftest import ROOT, run_model

ROUNDS = int(os.environ.get("KERNELGEN_FUZZ_ROUNDS", "90"))

FAR = 2**63
STRING, ARRAY, U32, F32 = 8, 9, 4, 6


@pytest.fixture(scope="session")
def programs(exporter: Exporter, there: Callable[[Path, str], Path]) -> fuzz_headers.ReadingPrograms:
    """Returns the programs. Only the long tests run a build with sanitizers, which takes a minute to compile;
    NEURON_KERNELGEN_SANITIZED_EXPORTER names another build of backend/sanitizers/exporter.
    """
    built = ROOT / "backend/sanitizers/exporter_address/export-graphs"
    variable = "NEURON_KERNELGEN_SANITIZED_EXPORTER"
    long = "KERNELGEN_LONG_TESTS" in os.environ or variable in os.environ
    sanitized = there(built, variable) if long else exporter.program
    assert exporter.libraries is not None
    return fuzz_headers.ReadingPrograms(exporter.program, exporter.libraries, sanitized, exporter.libraries)


@pytest.fixture(scope="session")
def bases(programs: fuzz_headers.ReadingPrograms, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Returns headers of models with a window, with experts, with norms, of a recurrent model, and of one with
    recurrence and experts.
    """
    folder = tmp_path_factory.mktemp("models")
    load_backends = Path(os.environ.get("LLAMA_LOAD_BACKENDS", ROOT / "tools/llama_cpp/libload_backends.so")).absolute()
    fuzz_headers.save_models(programs.libraries, load_backends, "^(mamba|qwen3next)$", folder)
    found = fuzz_headers.bases(folder)
    assert {"mamba-dense", "qwen3next-moe", "gemma2"} <= set(found)
    return found


def test_a_header_is_taken_apart_and_put_together(bases: dict[str, bytes]) -> None:
    for data in bases.values():
        assert put_together(parts(data)) == data


def test_damaged_headers(programs: fuzz_headers.ReadingPrograms, bases: dict[str, bytes], tmp_path: Path) -> None:
    fuzzer = fuzz_headers.Fuzzer(programs, bases, tmp_path)
    fuzzer.check()
    for seed in range(ROUNDS):
        fuzzer.round(seed, with_kernelgen=seed % 6 == 0)
    assert fuzzer.failures == []
    assert fuzzer.contained == {}
    assert fuzzer.kinds["graphs"] > ROUNDS // 20
    assert fuzzer.kinds["can't load"] > ROUNDS // 10
    assert fuzzer.kinds["damaged or cut off"] > ROUNDS // 10


def test_a_header_that_is_cut_off_anywhere(
    programs: fuzz_headers.ReadingPrograms, exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = headers.write(headers.qwen3(), tmp_path / "good.gguf").read_bytes()
    # Zeros are missing at the end of the last offset. The last tensor's name comes before its other fields.
    last = len(good) - len(parts(good).tensors[-1].name) - 8 - 4 - 16 - 4 - 8
    file = tmp_path / "model.gguf"
    for i, size in enumerate([*range(0, last, 61), *range(last - 3, last + 3)]):
        file.write_bytes(good[:size])
        if i % 4:
            done = fuzz_headers.run(
                [programs.sanitized, file, *fuzz_headers.GRAPHS], fuzz_headers.environment(programs.sanitized_libraries)
            )
            status, said = done.status, done.err
        else:
            status, said = run_model(exporter, file, tmp_path / "m.yaml"), capsys.readouterr().err
        if size < 4 and i % 4 == 0:  # it could be any kind of source
            assert (status, said.partition("\n")[0]) == (2, f"error: {file} is nothing that kernelgen model takes")
            continue
        assert fuzz_headers.wrong_message(status, said, file) is None
        assert "is not a GGUF file" in said if size < 4 else "the header is damaged or cut off" in said
    assert not (tmp_path / "m.yaml").exists()


def value(kind: int, data: bytes, key: bytes = b"qwen3.new") -> Callable[[Parts], Parts]:
    def change(header: Parts) -> Parts:
        kept = tuple(entry for entry in header.entries if entry.key != key)
        return replace(header, entries=(*kept, MetadataEntry(key, kind, data)))

    return change


def tensor(**changes: object) -> Callable[[Parts], Parts]:
    def change(header: Parts) -> Parts:
        changed: TensorInfo = replace(header.tensors[2], **changes)  # type: ignore[arg-type]
        return replace(header, tensors=(*header.tensors[:2], changed, *header.tensors[3:]))

    return change


def number(key: str, what: int) -> Callable[[Parts], Parts]:
    return value(U32, struct.pack("<I", what), f"qwen3.{key}".encode())


def real(key: str, what: float) -> Callable[[Parts], Parts]:
    return value(F32, struct.pack("<f", what), f"qwen3.{key}".encode())


def text(key: bytes, what: bytes) -> Callable[[Parts], Parts]:
    return value(STRING, struct.pack("<Q", len(what)) + what, key)


HOSTILE = {
    "2^63 values": (lambda h: replace(h, n_entries=FAR), "damaged or cut off: number of key value pairs"),
    "2^63 tensors": (lambda h: replace(h, n_tensors=FAR), "damaged or cut off: number of tensors"),
    "2^40 values": (lambda h: replace(h, n_entries=2**40), "damaged or cut off: "),
    "a string of 2^40 bytes": (value(STRING, struct.pack("<Q", 2**40)), "string length 1099511627776 exceeds maximum"),
    "a string that is longer than the file": (value(STRING, struct.pack("<Q", 2**29)), "exceeds remaining file size"),
    "an array of 2^63 numbers": (value(ARRAY, struct.pack("<IQ", U32, FAR)), "damaged or cut off: "),
    "an array of 2^29 strings": (value(ARRAY, struct.pack("<IQ", STRING, 2**29)), "damaged or cut off: "),
    "an array of arrays": (value(ARRAY, struct.pack("<IQIQ", ARRAY, 1, ARRAY, 1) * 100), "invalid GGUF type 9"),
    "a value of no type": (value(99, b""), "key 'qwen3.new' has invalid GGUF type 99"),
    "a key twice": (lambda h: replace(h, entries=h.entries + h.entries[-1:]), "duplicate key"),
    "a key without a name": (value(U32, bytes(4), b""), "is empty"),
    "a tensor twice": (lambda h: replace(h, tensors=h.tensors + h.tensors[-1:]), "duplicate tensor name"),
    "a name that is too long": (tensor(name=b"x" * 64), "is too long: 64 >= 64"),
    "a name that a terminal obeys": (tensor(name=b"\x1b[2J\n\x07"), "'"),
    "5 dimensions": (tensor(ne=(1, 1, 1, 1, 1)), "invalid number of dimensions: 5 > 4"),
    "2^32 - 1 dimensions": (tensor(n_dims=2**32 - 1), "invalid number of dimensions"),
    "a dimension of 0": (tensor(ne=(0, 128)), "has offset"),
    "a dimension of 2^63": (tensor(ne=(FAR, 1)), "invalid number of elements"),
    "dimensions of 2^62": (tensor(ne=(2**62, 2**62)), "may cause overflow errors"),
    "2^62 bytes": (tensor(ne=(2**60, 1)), "has offset"),
    "no type of ggml's": (tensor(kind=99), "invalid ggml type 99"),
    "a type that ggml had": (tensor(kind=4), "not a multiple of block size (0)"),
    "tensors that overlap": (tensor(offset=0), "has offset 0, expected"),
    "a tensor far away": (tensor(offset=FAR), "expected"),
    "an alignment of 0": (value(U32, bytes(4), b"general.alignment"), "alignment 0 is not a power of 2"),
    "an alignment of 2^31": (value(U32, struct.pack("<I", 2**31), b"general.alignment"), "damaged or cut off: "),
    "a wrong type": (
        text(b"qwen3.block_count", b"two"),
        "key qwen3.block_count has wrong type str but expected type u32",
    ),
    "layers beyond all bounds": (number("block_count", 2**31), "llama.cpp stops: "),
    "no layers": (number("block_count", 0), "llama.cpp stops: "),
    "no heads": (number("attention.head_count", 0), "llama.cpp "),
    "2^31 heads": (number("attention.head_count", 2**31), "llama.cpp "),
    "no size": (number("embedding_length", 0), "llama.cpp "),
    "-1 as a size": (
        value(5, struct.pack("<i", -1), b"qwen3.embedding_length"),
        "key qwen3.embedding_length has wrong type",
    ),
    "experts that are not there": (number("expert_used_count", 8), "llama.cpp stops: "),
    "65535 files": (value(2, struct.pack("<H", 65535), b"split.count"), ": a model of 65535 files"),
    "one of 3 files": (value(2, struct.pack("<H", 3), b"split.count"), "is one of 3 files of a model: name the first"),
    "files elsewhere": (text(b"split.count", b"../../etc"), "llama.cpp "),
    "no tensors": (lambda h: replace(h, tensors=()), "llama.cpp "),
    "no values": (lambda h: replace(h, entries=()), "llama.cpp "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header(
    name: str,
    programs: fuzz_headers.ReadingPrograms,
    exporter: Exporter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change, message = HOSTILE[name]
    file = tmp_path / "model.gguf"
    data = put_together(change(parts(headers.write(headers.qwen3(), file).read_bytes())))
    file.write_bytes(data + bytes(-len(data) % 32))
    assert run_model(exporter, file, tmp_path / "m.yaml") == 2
    said = capsys.readouterr().err
    assert fuzz_headers.wrong_message(2, said, file) is None
    assert message in said
    assert not (tmp_path / "m.yaml").exists()
    checked = fuzz_headers.run(
        [programs.sanitized, file, *fuzz_headers.GRAPHS], fuzz_headers.environment(programs.sanitized_libraries)
    )
    assert checked.status == 2
    assert fuzz_headers.wrong_message(2, checked.err, file) is None


@pytest.mark.parametrize(
    "change",
    [
        real("rope.freq_base", float("nan")),
        real("rope.freq_base", float("-inf")),
        real("attention.layer_norm_rms_epsilon", float("nan")),
        real("attention.layer_norm_rms_epsilon", -1.0),
        text(b"general.name", b"../../\0\xff\xfe\x1b[2J\n- op: evil"),
    ],
)
def test_what_llama_cpp_takes_becomes_a_manifest_or_an_error(
    change: Callable[[Parts], Parts], programs: fuzz_headers.ReadingPrograms, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    data = put_together(change(parts(headers.write(headers.qwen3(), file).read_bytes())))
    file.write_bytes(data + bytes(-len(data) % 32))
    assert fuzz_headers.derive(programs.exporter, programs.libraries, file) is None


def test_split_files_that_lie(exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"model-{i + 1:05}-of-00002.gguf" for i in range(2)]

    def refused(second: Callable[[Parts], Parts]) -> str:
        for i, path in enumerate(paths):
            headers.write(headers.qwen3(), path, part=(i, 2))
        data = put_together(second(parts(paths[1].read_bytes())))
        paths[1].write_bytes(data + bytes(-len(data) % 32))
        assert run_model(exporter, paths[0], tmp_path / "m.yaml") == 2
        said = capsys.readouterr().err
        assert fuzz_headers.wrong_message(2, said, tmp_path / "model-0000") is None
        return said

    assert "invalid split file idx" in refused(value(2, struct.pack("<H", 7), b"split.no"))
    assert f"{paths[1]}: the header is damaged or cut off" in refused(lambda h: replace(h, n_tensors=FAR))
    # a tensor that is in both files
    first = parts(headers.write(headers.qwen3(), tmp_path / "first", part=(0, 2)).read_bytes()).tensors[0]
    assert "llama.cpp " in refused(lambda h: replace(h, tensors=(replace(first, offset=0),)))


def test_only_regular_files_are_read(exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path, "is a folder without a config.json"),
        (tmp_path / "pipe", "is not a file or a folder"),
    ):
        assert run_model(exporter, path, tmp_path / "m.yaml") == 2
        assert f"error: {path} {said}" == capsys.readouterr().err.partition("\n")[0]


def test_ending_the_program_ends_the_work(programs: fuzz_headers.ReadingPrograms, tmp_path: Path) -> None:
    """Ending the exporter ends its child process: a context of 16 million cells, filled 64 at a time, takes a minute."""
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    command = [programs.exporter, file, "--ctx-size", str(1 << 24), "--ubatch-size", "64"]
    command += ["--graph", f"n_tokens=64,n_kv={1 << 24}"]
    process = subprocess.Popen(command, env=fuzz_headers.environment(programs.libraries), stdout=subprocess.PIPE)
    assert process.stdout is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text().split():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout.read() == b""  # the child holds stdout open until it ends
