"""Build steps that share processes: a step's result does not depend on its process, and no process remains."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
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


def command(folder: Path, *step: str, slots: int = 1) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "servers").write_text(f"{slots} version\n")
    return [sys.executable, "-P", "-S", str(PROGRAM), str(folder), *step]


def environment(*more: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, more), *sys.path]))}


def emit(tmp_path: Path, body: str) -> list[str]:
    """Returns the command that emits `SPEC` with an emitter of this body."""
    module = tmp_path / "mine" / "own.py"
    module.parent.mkdir(exist_ok=True)
    module.write_text(EMITTER.format(body))
    files = [f"--output={hlo(tmp_path)}", f"--depfile={tmp_path}/d"]
    step = ["emit", f"--spec={SPEC.json}", "--library=mine", f"--emitter={module}", *files]
    return command(tmp_path / "workers", *step)


def run(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    words = emit(tmp_path, body)
    return subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, check=False)


def hlo(tmp_path: Path) -> Path:
    return tmp_path / "k.hlo.pb"


def servers(folder: Path) -> list[int]:
    """Returns the processes of a folder's servers."""
    log, found = folder / "0-version.log", []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"--serve" in (process / "cmdline").read_bytes() and (process / "fd/2").readlink() == log:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_step_gives_the_same_whoever_runs_it(tmp_path: Path) -> None:
    done = run(tmp_path, "return x * 2")
    assert (done.returncode, done.stderr) == (0, "")
    first = hlo(tmp_path).read_bytes()
    words = [sys.executable, "-P", "-m", "kernelgen.steps.worker", *emit(tmp_path, "return x * 2")[5:]]
    hlo(tmp_path).unlink()
    subprocess.run(words, env=environment(), check=True)
    assert hlo(tmp_path).read_bytes() == first
    # The running process notices an edit, and reports a mistake.
    [server] = servers(tmp_path / "workers")
    assert run(tmp_path, "return x * 5").returncode == 0
    assert hlo(tmp_path).read_bytes() != first
    done = run(tmp_path, "return y")
    assert done.returncode != 0
    assert "own.py" in done.stderr and "'y'" in done.stderr
    assert servers(tmp_path / "workers") == [server]

    # A killed process is replaced; one that dies during a step is an error, and the next step works.
    os.kill(server, signal.SIGKILL)
    assert run(tmp_path, "return x * 3").returncode == 0
    done = run(tmp_path, "import os; os.write(2, b'last words'); os.kill(os.getpid(), 9)")
    assert done.returncode == 1
    assert "the process that ran this step died" in done.stderr and "last words" in done.stderr
    assert run(tmp_path, "return x * 4").returncode == 0


def test_a_module_from_elsewhere_is_imported_again_when_it_changes(tmp_path: Path) -> None:
    hlos = []
    for factor in ("2", "300"):
        (tmp_path / "users_helper.py").write_text(f"FACTOR = {factor}\n")
        done = run(tmp_path, "import users_helper\n    return x * users_helper.FACTOR")
        assert (done.returncode, done.stderr) == (0, "")
        hlos.append(hlo(tmp_path).read_bytes())
    assert hlos[0] != hlos[1]


def test_a_depfile_names_the_emitter_its_helpers_and_kernelgen_but_no_other_emitter(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "helper one.py").write_text("")
    (tmp_path / "mine" / "helper.py").write_text("def twice(x):\n    return x + x\n")
    (tmp_path / "mine" / "other.py").write_text(EMITTER.format("return x").replace("relu", "silu"))
    assert run(tmp_path, "from .helper import twice\n    return twice(x)").returncode == 0
    target, _, sources = (tmp_path / "d").read_text().partition(":")
    names = [Path(line.strip(" \\")).name for line in sources.splitlines() if line.strip(" \\")]
    assert target == str(hlo(tmp_path))
    assert {"own.py", "helper.py", "canonicalize.py", "worker.py"} <= set(names)
    assert not {"other.py", "rope.py", "helper one.py", "simulator.py"} & set(names)


def test_steps_wait_for_a_slot(tmp_path: Path) -> None:
    (tmp_path / "0.lock").touch()
    with (tmp_path / "0.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = command(tmp_path, "no-such-step")
        waiting = subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
        # A step takes another slot if that is free.
        words = command(tmp_path, "no-such-step", slots=2)
        assert subprocess.run(words, env=environment(), capture_output=True).returncode == 2
    assert waiting.wait(60) == 2
    assert waiting.stderr is not None and "unknown step 'no-such-step'" in waiting.stderr.read()
    waiting.stderr.close()


def test_where_no_server_can_be_the_step_runs_in_the_process_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(program: str, arguments: list[str]) -> None:
        assert Path.cwd() == tmp_path and arguments[-2:] == ["embed", "--pack=x"]
        raise SystemExit(7)

    def refuse(name: str, request: object) -> None:
        raise PermissionError("no sockets here")

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(ondemand, "_ask", refuse)
    monkeypatch.chdir(tmp_path)
    command(tmp_path / "workers")
    with pytest.raises(SystemExit, match="7"):
        ondemand.main([str(tmp_path / "workers"), "embed", "--pack=x"])


def test_a_server_ends_when_nothing_comes_or_its_client_or_its_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "workers"

    def server() -> subprocess.Popen[bytes]:
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/0-version.sock")
            listener.listen()
            code = "from kernelgen.build import ondemand as o; o.IDLE_SECONDS = .2; o.serve({}, '0-version')"
            words = [sys.executable, "-P", "-c", code.format(listener.fileno())]
            files = (listener.fileno(),)
            return subprocess.Popen(words, env=environment(), cwd=folder, pass_fds=files, start_new_session=True)

    def stays(process: subprocess.Popen[bytes]) -> None:
        with (folder / "0.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a step is on its way
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)

    idle = server()
    stays(idle)
    assert idle.wait(20) == 0 and not (folder / "0-version.sock").exists()
    shutil.rmtree(folder)

    lost = server()
    stays(lost)
    shutil.rmtree(folder)
    assert lost.wait(20) == 0

    busy = server()
    words = emit(tmp_path, "import time; print(1, file=open('begun', 'w')); time.sleep(600)")
    client = subprocess.Popen(words, cwd=tmp_path)
    while not (tmp_path / "begun").exists():
        assert busy.poll() is None and client.poll() is None
        time.sleep(0.02)
    client.kill()
    client.wait()
    assert busy.wait(5) == -signal.SIGKILL
