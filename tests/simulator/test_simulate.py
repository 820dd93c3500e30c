"""`kernelgen simulate` prepares a program or a shell so that the program loads the simulator as libnrt."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kernelgen as package
from kernelgen import cli
from kernelgen.cli import simulate
from kernelgen.errors import KernelgenError

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """Returns an environment without variables of the simulator, with its own cache folder."""
    mine = ("NEURON_", "GGML_NEURON_", "XDG_", "LD_LIBRARY_PATH")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


@pytest.fixture
def kernelgen(clean: dict[str, str], library: Path) -> Run:
    """Returns a function that runs `kernelgen simulate`; keyword arguments are variables."""

    def run(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kernelgen", "simulate", *map(str, arguments)]
        return subprocess.run(
            command,
            env={**clean, "GGML_NEURON_LIBNRT": str(library), **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


@pytest.fixture
def program(built: Path) -> Path:
    return next(p for p in (built / "nrt_client", built / "tests" / "nrt_client") if p.exists())


def test_a_program_runs_on_the_simulator_and_what_it_compiles_is_kept(
    kernelgen: Run, program: Path, add: Path, tmp_path: Path
) -> None:
    done = kernelgen("--", program, "run", add)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("runtime 2: neuron-kernelgen simulator\n")
    kept = tmp_path / "cache" / "neuron-kernelgen" / "simulator"
    assert list(kept.rglob("*.xla"))


def test_a_shell_is_set_up(clean: dict[str, str], library: Path, program: Path, add: Path) -> None:
    script = (
        f'eval "$({shlex.quote(sys.executable)} -m kernelgen simulate --libnrt {shlex.quote(str(library))} --env)" && '
        f"unset PYTHONPATH && exec {shlex.quote(str(program))} run {shlex.quote(str(add))}"
    )
    done = subprocess.run(["sh", "-c", script], env=clean, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("runtime 2: neuron-kernelgen simulator\n")


def test_the_program_gets_its_arguments_and_gives_its_status(kernelgen: Run) -> None:
    done = kernelgen("--", "sh", "-c", 'echo "$0 $1"; exit 7', "--env", "-x y")
    assert (done.returncode, done.stdout, done.stderr) == (7, "--env -x y\n", "")
    # Python ignores SIGPIPE; programs do not.
    assert kernelgen("sh", "-c", "kill -PIPE $$").returncode == -signal.SIGPIPE


def test_what_is_set_stays(library: Path) -> None:
    own = {
        "NEURON_SIMULATOR_PYTHON": "/py",
        "NEURON_SIMULATOR_CACHE": "/kept",
        "LD_LIBRARY_PATH": f"/a:{library.parent}:/b",
    }
    assert simulate.variables(library, own) == {
        "GGML_NEURON_LIBNRT": str(library),
        "LD_LIBRARY_PATH": f"{library.parent}:/a:/b",
    }
    changed = simulate.variables(library, {"NEURON_KERNELGEN_CACHE": "/mine"})
    assert changed == {
        "GGML_NEURON_LIBNRT": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "NEURON_SIMULATOR_PYTHON": sys.executable,
        "NEURON_SIMULATOR_PATH": str(Path(package.__file__).absolute().parents[1]),
        "NEURON_SIMULATOR_CACHE": "/mine/simulator",
    }
    assert simulate.variables(library, changed).keys() == {"GGML_NEURON_LIBNRT", "LD_LIBRARY_PATH"}


def test_variables_are_quoted_for_the_shell(clean: dict[str, str], library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "it's $HOME; a"
    folder.mkdir()
    (folder / "libnrt.so.1").symlink_to(library)
    command = [sys.executable, "-m", "kernelgen", "simulate", "--env", "--libnrt", str(folder / "libnrt.so.1")]
    printed = subprocess.run(command, env=clean, capture_output=True, text=True, check=True, timeout=60).stdout
    script = printed + 'printf %s "$GGML_NEURON_LIBNRT"'
    assert (
        subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
        == f"{folder}/libnrt.so.1"
    )


def test_the_library_is_found_beside_kernelgen(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    installed = tmp_path / "lib" / "neuron-simulator" / "libnrt.so.1"
    installed.parent.mkdir(parents=True)
    installed.symlink_to(library)
    assert simulate.find(None, {}) == installed


def test_the_library_of_an_installation_and_of_a_checkout_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = tmp_path / "share" / "neuron-kernelgen"
    monkeypatch.setattr(package, "__file__", str(share / "tools" / "kernelgen" / "__init__.py"))
    places = list(simulate.places())
    assert places[0] == tmp_path / "lib" / "neuron-simulator" / "libnrt.so.1"
    assert share / "build" / "simulator" / "libnrt.so.1" in places
    assert share / "bazel-bin" / "backend" / "simulator" / "libnrt.so.1" in places


def test_a_missing_library_is_an_error_that_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "places", lambda: iter([tmp_path / "libnrt.so.1"]))
    with pytest.raises(KernelgenError) as raised:
        simulate.find(None, {})
    (mistake,) = raised.value.diagnostics
    assert mistake.message == "there is no libnrt.so.1 of the simulator beside kernelgen"
    assert mistake.hint is not None
    assert f"cmake --install build/simulator --prefix {shlex.quote(sys.prefix)}" in mistake.hint


def test_another_libnrt_is_refused(kernelgen: Run, tmp_path: Path) -> None:
    other = tmp_path / "libnrt.so.1"
    for data in (b"", b"\x7fELF and so on"):
        other.write_bytes(data)
        done = kernelgen("--env", GGML_NEURON_LIBNRT=str(other))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: GGML_NEURON_LIBNRT: {other} is not the simulator's libnrt\n    build it")
    done = kernelgen("--env", "--libnrt", tmp_path / "none")
    assert done.stderr.startswith(f"error: --libnrt: there is no file {tmp_path}/none\n    build it")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: name a program after --, or give --env"),
        (("--env", "--", "true"), "error: --env takes no program"),
        (
            ("--", "no-such-program"),
            "error: there is no program no-such-program: expected a path, or a name that is on PATH",
        ),
        (("--", __file__.replace(".py", "")), "error: there is no program "),
        (("--bogus",), "error: No such option"),
    ],
)
def test_wrong_usage(kernelgen: Run, arguments: tuple[str, ...], message: str) -> None:
    done = kernelgen(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message), done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_cannot_run_is_reported(kernelgen: Run, tmp_path: Path) -> None:
    broken = tmp_path / "program"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    done = kernelgen("--", broken)
    assert (done.returncode, done.stderr) == (2, f"error: can't run {broken}: No such file or directory\n")


def test_the_doctor_says_which_simulator_there_is(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def line() -> str:
        capsys.readouterr()
        cli.run(["doctor"])
        return next(text for text in capsys.readouterr().out.splitlines() if "simulator's libnrt" in text)

    monkeypatch.setenv("GGML_NEURON_LIBNRT", str(library))
    assert line().split(maxsplit=3) == [
        "ok",
        "simulator's",
        "libnrt",
        str(library),
    ]
    monkeypatch.setenv("GGML_NEURON_LIBNRT", "/nowhere")
    assert "GGML_NEURON_LIBNRT: there is no file /nowhere; docs/guides/use-the-simulator.md" in line()
