"""Build steps that share processes: a step's result does not depend on its process, and no process remains."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kernelgen.build import ondemand
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import KernelSpec

PROGRAM = Path(ondemand.__file__)
TENSOR = TensorDesc.parse("(8,2,1,1)/f32")
SPEC = KernelSpec.make("relu", [TENSOR], TENSOR)
EMITTER = 'from kernelgen.emitters import emitter\n\n\n@emitter("relu")\ndef relu(x, *, out):\n    {}\n'


def command(folder: Path, mode: str, *step: str, slots: int = 1) -> list[str]:
    return [sys.executable, "-P", "-S", str(PROGRAM), str(folder), str(slots), mode, *step]


def run(folder: Path, mode: str, *step: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command(folder, mode, *step), env=environment, capture_output=True, text=True, check=False)


def emit(tmp_path: Path, body: str, mode: str = "warm") -> subprocess.CompletedProcess[str]:
    """Emits `SPEC` with an emitter of this body into `tmp_path / mode`."""
    module = tmp_path / "mine" / "own.py"
    module.parent.mkdir(exist_ok=True)
    module.write_text(EMITTER.format(body))
    output = tmp_path / mode
    return run(
        *(
            tmp_path / "workers",
            mode,
            "emit-batch",
            f"--spec={SPEC.json}",
            "--library=mine",
            f"--emitter={module}",
        ),
        *(f"--folder={output}", f"--stamp={output}/stamp", f"--depfile={output}/d"),
    )


def servers(folder: Path) -> list[int]:
    """Returns the servers' processes in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder and b"--serve" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_step_gives_the_same_whoever_runs_it(tmp_path: Path) -> None:
    hlos = []
    for mode in ("fresh", "warm"):
        done = emit(tmp_path, "return x * 2", mode)
        assert (done.returncode, done.stderr) == (0, "")
        hlos.append((tmp_path / mode / f"{SPEC.id}.hlo.pb").read_bytes())
    assert hlos[0] == hlos[1]
    # The running process notices an edit, and reports a mistake.
    [first] = servers(tmp_path / "workers")
    assert emit(tmp_path, "return x * 5").returncode == 0
    assert (tmp_path / "warm" / f"{SPEC.id}.hlo.pb").read_bytes() != hlos[0]
    done = emit(tmp_path, "return y")
    assert done.returncode != 0
    assert "own.py" in done.stderr and "'y'" in done.stderr
    assert not (tmp_path / "warm" / f"{SPEC.id}.hlo.pb").exists()
    assert servers(tmp_path / "workers") == [first]

    # A killed process is replaced; one that dies during a step is an error, and the next step works.
    os.kill(first, signal.SIGKILL)
    assert emit(tmp_path, "return x * 3").returncode == 0
    done = emit(tmp_path, "import os; os.write(2, b'last words'); os.kill(os.getpid(), 9)")
    assert done.returncode == 1
    assert "the process that ran this step died" in done.stderr and "last words" in done.stderr
    assert emit(tmp_path, "return x * 4").returncode == 0


def test_a_depfile_names_the_emitter_its_helpers_and_kernelgen_but_no_other_emitter(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "helper one.py").write_text("")
    (tmp_path / "mine" / "helper.py").write_text("def twice(x):\n    return x + x\n")
    (tmp_path / "mine" / "other.py").write_text(EMITTER.format("return x").replace("relu", "silu"))
    assert emit(tmp_path, "from .helper import twice\n    return twice(x)", "fresh").returncode == 0
    target, _, sources = (tmp_path / "fresh" / "d").read_text().partition(":")
    names = [Path(line.strip(" \\")).name for line in sources.splitlines() if line.strip(" \\")]
    assert target == f"{tmp_path}/fresh/stamp"
    assert {"own.py", "helper.py", "canonicalize.py", "worker.py"} <= set(names)
    assert not {"other.py", "rope.py", "helper one.py", "simulator.py"} & set(names)


def test_steps_wait_for_a_slot(tmp_path: Path) -> None:
    (tmp_path / "0.lock").touch()
    with (tmp_path / "0.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            command(tmp_path, "fresh", "no-such-step"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=subprocess.PIPE,
            text=True,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
        # A step takes another slot if that is free.
        assert subprocess.run(command(tmp_path, "fresh", "no-such-step", slots=2), capture_output=True).returncode == 2
    assert waiting.wait(60) == 2
    assert waiting.stderr is not None and "unknown step 'no-such-step'" in waiting.stderr.read()
    waiting.stderr.close()


def test_where_no_server_can_be_the_step_runs_in_the_process_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def execute(program: str, arguments: list[str]) -> None:
        started.append(arguments)
        raise SystemExit(7)

    def refuse(slot: int, step: object) -> None:
        raise PermissionError("no sockets here")

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(ondemand, "_ask", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="7"):
        ondemand.main([str(tmp_path / "workers"), "2", "warm", "embed", "--pack=x"])
    assert [a[-2:] for a in started] == [["embed", "--pack=x"]]


def test_a_server_ends_when_nothing_comes_but_not_while_a_step_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ondemand, "IDLE_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("0-state.sock")
    listener.listen()
    with Path("0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = threading.Thread(target=ondemand.serve, args=(listener.detach(), "0-state"), daemon=True)
        server.start()
        time.sleep(1)
        assert server.is_alive()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("0-state.sock")
            client.sendall(json.dumps(["no-such-step"]).encode())
            client.shutdown(socket.SHUT_WR)
            code, output = json.loads(client.makefile("rb").read())
        assert code == 2 and "unknown step" in output
        assert server.is_alive()
    server.join(20)
    assert not server.is_alive()
    assert not Path("0-state.sock").exists()


def test_a_server_ends_when_its_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ondemand, "IDLE_SECONDS", 0.2)
    folder = tmp_path / "workers"
    folder.mkdir()
    monkeypatch.chdir(folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("0-state.sock")
    listener.listen()
    shutil.rmtree(folder)
    ondemand.serve(listener.detach(), "0-state")
