"""Other files than models, damaged headers, and options that do not go together: an error, exit status 2, no manifest."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import headers
import pytest
import random_llama
import random_projector
from headers import GgufHeader, Tensor

from kernelgen import cli
from kernelgen.model.exporter import Exporter

SIZE = random_llama.Size(n_embd=128, n_head=2, n_head_kv=1, n_ff=192, n_layer=3)
WINDOWED = replace(SIZE, n_layer=4, n_swa=64)
Said = pytest.CaptureFixture[str]


def lines(text: str) -> list[tuple[str, str]]:
    """Returns (arguments, message) of each line `arguments => message`."""
    return [(arguments, message) for arguments, _, message in (line.partition(" => ") for line in text.splitlines())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model, and with adapters, drafts and projectors that fit it or do not."""
    folder = tmp_path_factory.mktemp("files")
    model = folder / "model.gguf"
    random_llama.write(model, size=SIZE, sparse=True)
    (folder / "cut.gguf").write_bytes(model.read_bytes()[:500])
    random_llama.write(folder / "narrow.gguf", size=random_llama.Size(n_embd=64, n_head=2), sparse=True)
    random_llama.write(folder / "words.gguf", size=replace(SIZE, n_vocab=1000), sparse=True)
    (folder / "other.gguf").write_bytes(model.read_bytes().replace("▁".encode(), "▂".encode()))
    random_llama.write_adapter(folder / "rank8.gguf", SIZE, rank=8, targets=["attn_q"])
    random_llama.write_adapter(folder / "other-lora.gguf", random_llama.Size(), rank=8, targets=["attn_q"])
    random_llama.write_bert(folder / "bert.gguf", SIZE)
    random_llama.write_eagle3(folder / "far.gguf", SIZE, (0, 1, 7))
    random_llama.write_gemma4(folder / "gemma4.gguf", WINDOWED)
    random_llama.write_gemma4(folder / "wide.gguf", replace(WINDOWED, n_embd=256))
    random_llama.write_gemma4_head(folder / "head.gguf", folder / "gemma4.gguf", WINDOWED)
    random_projector.write(folder / "sound.gguf", "ultravox", size=random_projector.Size(n_layer=3))
    random_projector.write(folder / "gemma4v.gguf", "gemma4v", size=random_projector.Size(n_layer=3))
    projector = folder / "gemma4v.gguf"
    projector.write_bytes(projector.read_bytes()[: -(projector.stat().st_size // 2)])
    for i in range(3):
        headers.write(headers.qwen3(), folder / f"split-{i + 1:05}-of-00003.gguf", part=(i, 3))
        headers.write(headers.qwen3(), folder / f"part-{i + 1:05}-of-00003.gguf", part=(i, 3))
    (folder / "part-00003-of-00003.gguf").unlink()
    os.mkfifo(folder / "pipe")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def refusal(
    folder: Path, exporter: Exporter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Returns a function that runs `kernelgen model` with wrong arguments in the folder, and returns its message."""

    def refusal(arguments: str) -> str:
        monkeypatch.chdir(folder)
        where = ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries)]
        assert cli.run(["model", "-o", "m.yaml", *where, *shlex.split(arguments)]) == 2
        assert not Path("m.yaml").exists()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return captured.err

    return refusal


FILES = """\
absent.gguf => can't read 'absent.gguf': No such file or directory
pipe => pipe is not a file or a folder
empty => empty is a folder without a config.json
cut.gguf => the header is damaged or cut off
split-00002-of-00003.gguf => name the first, which ends with -00001-of-00003.gguf
part-00001-of-00003.gguf => part-00003-of-00003.gguf: No such file or directory"""

SIZES = """\
model.gguf --n-tokens 0 => expected numbers from 1, separated by commas, not '0'
model.gguf --n-tokens 513 => --n-tokens 513: a call has at most 512 tokens
model.gguf --n-ctx 99999999 => --n-ctx 99999999: a context has at most 16777216 cells
model.gguf --n-ctx 256 --n-tokens 300 => --n-tokens 300: a call has at most 256 tokens
model.gguf --n-kv 100 => --n-kv 100: lengths of the cache are multiples of 256
model.gguf --n-ctx 4096 --n-kv 8192 => --n-kv 8192: lengths of the cache are multiples of 256 up to 4096
model.gguf --n-ctx any --flash-attn off => without flash attention a cache's length is in the strides
model.gguf --n-ctx any,256 => expected numbers from 1, separated by commas, not 'any,256'
model.gguf --type-v q8_0 --flash-attn off => llama.cpp has a q8_0 cache of values only with flash attention
model.gguf --ftype q4_k_m => --ftype: unknown quantization 'q4_k_m': expected one of F32, F16,"""

GROUPS = """\
model.gguf --fuse layers:0 => 'layers:0' is not one of layer, layers:N, step, parts, parts+sums, none
model.gguf --causal --fuse none => --causal is for graph kernels, and --fuse none makes none
model.gguf --weights planes --weights auto => --weights auto is what the forecast chooses: give no other --weights beside it
model.gguf --lnc 2 --target trn1 => --lnc 2: trn1 has 1"""

FEATURES = """\
model.gguf --lora absent.gguf => absent.gguf: No such file
model.gguf --lora model.gguf => model.gguf: llama.cpp can't load the adapter: failed to apply lora adapter: expect general.type
model.gguf --lora rank8.gguf:nan => an adapter is multiplied by a finite number other than 0, not by nan
model.gguf --lora rank8.gguf:0 => an adapter is multiplied by a finite number other than 0, not by 0
model.gguf --lora other-lora.gguf => has incorrect shape (hint: maybe wrong base model?)
narrow.gguf --type-k q8_0 --context-shift => whose heads are not multiples of 64: have the keys in f16
bert.gguf --embeddings --context-shift => llama.cpp shifts no cache of bert.gguf: leave the option out
model.gguf --encoder => the model has not both an encoder and a decoder
model.gguf --pooling rank => --pooling rank: embeddings are pooled; give --embeddings too
model.gguf --embeddings --n-outputs 1 => a call has the embeddings of all its tokens
model.gguf --rope-scale 4 --rope-freq-scale 0.25 => --rope-scale is 1 / --rope-freq-scale: give one of them
model.gguf --override-kv llama.block_count=3 => --override-kv: expected KEY=int:N,
model.gguf --samplers top_n_sigma => unknown sampler 'top_n_sigma': llama.cpp computes these on a device: greedy, dist
model.gguf --samplers top_k=x => --samplers: expected a number, not 'x'
model.gguf --samplers top_k=1:2 => --samplers: 'top_k=1:2': top_k has 1 number
model.gguf --samplers greedy, => unknown sampler ''"""

DRAFTS = """\
model.gguf --spec-type draft-mtp => the model has no MTP layers (--spec-type draft-mtp)
model.gguf --spec-type draft-mtp --model-draft model.gguf => the draft has no MTP layers (--spec-type draft-mtp)
model.gguf --spec-type draft-mtp --model-draft head.gguf => the draft is a head of a gemma4 whose embedding has 128 numbers, and the model is a llama with 128
wide.gguf --spec-type draft-mtp --model-draft head.gguf => the draft is a head of a gemma4 whose embedding has 128 numbers, and the model is a gemma4 with 256
model.gguf --spec-type draft-eagle3 => --spec-type draft-eagle3: give the draft's file, --model-draft
model.gguf --spec-type draft-eagle3 --model-draft model.gguf => the draft's architecture is not eagle3
model.gguf --spec-type draft-eagle3 --model-draft far.gguf => the draft reads layer 7 of a model of 3
model.gguf --spec-type draft-mtp --embeddings => --spec-type draft-mtp with --embeddings or --encoder:
model.gguf --model-draft words.gguf => llama.cpp does not use the draft words.gguf: its vocabulary has 1000 tokens, not 260
model.gguf --model-draft other.gguf => llama.cpp does not use the draft other.gguf: its vocabulary has another token 259"""

SPLIT = """\
model.gguf --devices 2 => give --split-mode tensor too
model.gguf --split-mode tensor --devices 1 => say over how many devices, --devices 2
model.gguf --split-mode tensor --devices 17 => at most 16 devices
model.gguf --split-mode tensor --devices 2 --flash-attn both => only with flash attention
model.gguf --split-mode tensor --devices 2 --weights bf16 => leave --weights out
model.gguf --split-mode tensor --devices 2 --lora rank8.gguf => llama.cpp splits no adapters
model.gguf --split-mode tensor --devices 2 --samplers greedy => --samplers: llama.cpp samples on the CPU with --split-mode tensor
model.gguf --split-mode tensor --devices 2 --spec-type draft-mtp => --spec-type draft-mtp with --split-mode tensor: such a draft has no kernels
model.gguf --split-mode tensor --devices 2,4 --target trn1 --fuse layer => --devices 4 --fuse layer: trn1 has collectives over 1, 2, 8, 16 or 32 cores, not 4"""

PROJECTORS = """\
 => Missing argument 'SOURCE...'
--image-size 640x480 => --image-size is for a projector: give --mmproj too
--mmproj sound.gguf --audio-seconds 9999 => --audio-seconds 9999: sound of at most 3600 s
--mmproj sound.gguf --image-size 640 => expected sizes such as 640x480, of at most 16384 pixels, not '640'
--mmproj sound.gguf --n-tokens 3 => --n-tokens is for models, and no SOURCE is given beside --mmproj
--mmproj sound.gguf --image-size 640x480 => sound.gguf: the file has no projector of images
--mmproj absent.gguf => absent.gguf: No such file
--mmproj model.gguf => model.gguf: this is not a projector: its architecture is llama
--mmproj cut.gguf => cut.gguf: the header is damaged or cut off
--mmproj gemma4v.gguf => gemma4v.gguf: the file ends before the number v.blk."""


@pytest.mark.parametrize(
    ("arguments", "message"), lines("\n".join((FILES, SIZES, GROUPS, FEATURES, DRAFTS, SPLIT, PROJECTORS)))
)
def test_arguments_that_are_refused(arguments: str, message: str, refusal: Callable[[str], str]) -> None:
    assert message in refusal(arguments)


PROGRAM = """\
 => no model given
a.gguf => no --graph given
a.gguf b.gguf => one model at a time: a.gguf, b.gguf
--graph => --graph needs a value
--graph n_tokens=x => expected a number up to 1073741824, not 'x'
--graph n_tokens=3,n_seqs=2 => n_tokens is a multiple of n_seqs
--graph size=1 => expected n_tokens=, n_outputs=, n_seqs= or n_kv=, not 'size=1'
--cache-type-k f99 => unknown type 'f99'
--flash-attn maybe => --flash-attn: expected off or on, not 'maybe'
--what => unknown option --what
--mmproj p.gguf --shift => --mmproj is given without a model, --graph and --shift
--mmproj p.gguf --image-size 640x480x3 => --image-size: expected WIDTHxHEIGHT
model.gguf --graph n_tokens=1 --devices 2 => --devices is 2 to 16 with --split-mode tensor, and not given without
model.gguf --graph n_tokens=1 --split-mode row => --split-mode: expected none or tensor, not 'row'"""


def test_the_program_says_what_is_wrong_with_its_arguments(exporter: Exporter, folder: Path) -> None:
    for arguments, message in lines(PROGRAM):
        command = [exporter.program, *arguments.split()]
        environment = os.environ | {"LD_LIBRARY_PATH": str(exporter.libraries)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, message in done.stderr.splitlines()[0]) == (2, True), (arguments, done.stderr)


QWEN3 = headers.qwen3()


def changed(*without: str, **fields: headers.Value) -> GgufHeader:
    kept = {key: value for key, value in QWEN3.fields.items() if key not in without}
    return replace(QWEN3, fields=kept | fields)


def named(name: str) -> GgufHeader:
    """Returns the header with a tensor of another name."""
    return replace(QWEN3, tensors=[*QWEN3.tensors, Tensor(name, (8,), "f32")])


def patched(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda good: good[:at] + data + good[at + len(data) :]


HEADERS: dict[str, tuple[GgufHeader | Callable[[bytes], bytes], str]] = {
    "no bytes": (lambda good: b"", "is nothing that kernelgen model takes"),
    "another file": (lambda good: b"PK\x03\x04 and so on", "is nothing that kernelgen model takes"),
    "the magic alone": (lambda good: good[:4], "the header is damaged or cut off"),
    "half": (lambda good: good[: len(good) // 2], "the header is damaged or cut off"),
    "2^63 tensors": (patched(8, b"\0" * 7 + b"\x80"), "damaged or cut off: number of tensors"),
    "2^63 values": (patched(16, b"\0" * 7 + b"\x80"), "damaged or cut off: number of key value pairs"),
    "a long name": (patched(24, b"\xff" * 6 + b"\0\0"), "damaged or cut off: "),
    "an unknown architecture": (replace(QWEN3, architecture="qwen99"), "unknown model architecture"),
    "no hyperparameter": (changed("embedding_length"), "key not found in model: qwen3.embedding_length"),
    "another type": (changed(block_count="two"), "key qwen3.block_count has wrong type str but expected type u32"),
    "another shape": (changed(embedding_length=512), "has wrong shape"),
    "a missing tensor": (replace(QWEN3, tensors=QWEN3.tensors[1:]), "tensor 'token_embd.weight' not found"),
    "a name that a terminal obeys": (named("\x1b[2J\n\x07"), "llama.cpp "),
    "layers beyond all bounds": (changed(block_count=2**32 - 1), "llama.cpp stops: "),
    "no heads": (changed(**{"attention.head_count": 0}), "llama.cpp "),
    "65535 files": (changed(**{".split.count": 65535}), "llama.cpp "),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_refused(name: str, exporter: Exporter, tmp_path: Path, capsys: Said) -> None:
    change, message = HEADERS[name]
    file = tmp_path / "model.gguf"
    if isinstance(change, GgufHeader):
        headers.write(change, file)
    else:
        file.write_bytes(change(headers.write(QWEN3, file).read_bytes()))
    where = ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries)]
    assert cli.run(["model", str(file), "-o", str(tmp_path / "m.yaml"), *where]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}") and message in said
    assert all(line.isprintable() for line in said.split("\n"))
    assert not (tmp_path / "m.yaml").exists()


def test_without_the_program_or_its_libraries_the_message_says_how_to_get_them(
    exporter: Exporter, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.delenv("NEURON_KERNELGEN_EXPORTER", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    build = "cmake -S backend/exporter -B build/exporter -DGGML_NEURON_LLAMA_DIR=<llama.cpp's source tree>"
    for arguments, message in (
        ([], build),
        (["--exporter", "nowhere"], build),
        (["--llama-cpp", str(tmp_path)], build),
        (["--llama-cpp", "nowhere"], "--llama-cpp nowhere: the folder does not exist"),
        (["--exporter", str(exporter.program)], "--llama-cpp <folder>"),
    ):
        assert cli.run(["model", str(folder / "model.gguf"), "-o", str(tmp_path / "m.yaml"), *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def exporting(exporter: Exporter, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Gives a running exporter: a context of 16 million cells, filled 64 at a time, takes a minute."""
    file = headers.write(QWEN3, tmp_path / "model.gguf")
    command = [exporter.program, file, "--ctx-size", str(1 << 24), "--ubatch-size", "64"]
    command += ["--graph", f"n_tokens=64,n_kv={1 << 24}"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(exporter.libraries)}
    with subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE) as process:
        yield process


def test_ending_the_program_ends_the_work(exporting: subprocess.Popen[bytes]) -> None:
    children = Path(f"/proc/{exporting.pid}/task/{exporting.pid}/children")
    while not children.read_text().split():
        time.sleep(0.01)
    exporting.send_signal(signal.SIGKILL)
    exporting.wait()
    assert exporting.stdout is not None
    assert exporting.stdout.read() == b""  # the child holds stdout open until it ends
