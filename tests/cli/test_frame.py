"""The command line as a whole: help, start-up, and the exit of every kind of error."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import kernelgen as package
from kernelgen.cli import frame, version

from .conftest import Done, environment

Run = Callable[..., Done]

HEAVY = ("jax", "jaxlib", "numpy", "gguf", "rich", "google.protobuf", "asyncio")


def test_help_lists_every_command(kernelgen: Run) -> None:
    done = kernelgen("--help")
    assert (done.code, done.err) == (0, "")
    shown = re.findall(r"^(\S.*):\n((?:  .*\n)+)", done.out.partition("--help")[2], re.MULTILINE)
    groups = {title: [line.split()[0] for line in lines.splitlines()] for title, lines in shown}
    assert groups == {
        "From a model to its kernels": "model build repack coverage forecast report".split(),
        "Run programs": ["simulate", "doctor"],
        "Write manifests": ["validate", "plan", "list"],
        "Write kernels": ["run", "check"],
        "Inspect files": ["inspect", "cache"],
        "Single steps of a build, for scripts": "generate emit prebuild compile bundle".split(),
    }
    assert [name for names in groups.values() for name in names] == list(frame.COMMANDS)
    columns = {line.index(frame.COMMANDS[line.split()[0]]) for _, lines in shown for line in lines.splitlines()}
    assert len(columns) == 1, "the descriptions of all groups stand below each other"


def completions(words: str) -> list[str]:
    """Returns bash's completions of the last word."""
    environ = {
        **environment(),
        "_KERNELGEN_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - (not words.endswith(" "))),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from kernelgen.cli import main; main()"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_a_shell_completes_commands_options_and_values() -> None:
    assert completions("kernelgen ") == list(frame.COMMANDS)
    assert completions("kernelgen co") == ["coverage", "compile"]
    assert completions("kernelgen build --comp") == ["--compiler"]
    assert completions("kernelgen build --compiler s") == ["simulator"]
    assert completions("kernelgen plan --target trn1") == ["trn1", "trn1n"]


@pytest.mark.parametrize("name", list(frame.COMMANDS))
def test_each_command_is_there_and_described_as_help_says(kernelgen: Run, name: str) -> None:
    command = importlib.import_module(frame.module_of(name)).command
    assert isinstance(command, click.Command)
    assert command.get_short_help_str(limit=200) == frame.COMMANDS[name]
    done = kernelgen(name, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: kernelgen {name} ")


VERSION = rf"kernelgen {re.escape(package.__version__)} \((commit unknown|commit [0-9a-f]{{12}}(-dirty)?)\)\nPython 3\.\S+, JAX \d\S+, Linux \w+\n"


def test_version(kernelgen: Run) -> None:
    done = kernelgen("--version")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(VERSION, done.out)


def test_the_version_has_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "tools" / "kernelgen"
    installed.mkdir(parents=True)
    monkeypatch.setattr(version, "PACKAGE", installed)
    assert "(commit unknown)" in version.text()
    (installed / version.COMMIT).write_text("0123456789ab\n")
    assert "(commit 0123456789ab)" in version.text()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    (tmp_path / "pyproject.toml").touch()
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert f"(commit {head.strip()})" in version.text()
    (tmp_path / "pyproject.toml").write_text("changed\n")
    assert f"(commit {head.strip()}-dirty)" in version.text()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["validate", "{basic}"], ["plan", "{basic}"], ["list"]], ids=lambda a: a[0]
)
def test_these_start_without_heavy_modules(arguments: list[str], basic: Path) -> None:
    arguments = [a.format(basic=basic) for a in arguments]
    code = f"""
import sys
from kernelgen import cli
assert cli.run({arguments!r}) == 0
print("imported:", *[m for m in {HEAVY!r} if m in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "imported:"


def test_an_unknown_command_gets_the_nearest(kernelgen: Run) -> None:
    done = kernelgen("biuld")
    assert (done.code, done.out) == (2, "")
    assert "no command 'biuld': did you mean 'build'?" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "Missing argument 'MANIFEST"),
        (["plan", "--targets", "trn1", "x.yaml"], "No such option"),
        (["build", "x.yaml"], "Missing option"),
        (["build", "x.yaml", "-o", "out", "-j", "0"], "0 is not in the range 1<=x<=4096"),
        (["plan", "--target", "trn9", "x.yaml"], "unknown target 'trn9'"),
        (["plan", "--target", "tr1", "x.yaml"], "did you mean 'trn1'?"),
        (["build", "x.yaml", "-o", "out", "--compiler", "gcc"], "'gcc' is not one of"),
        (["emit", "-o", "out"], "give a MANIFEST or --spec"),
    ],
)
def test_wrong_usage_is_reported_with_the_usage(kernelgen: Run, arguments: list[str], message: str) -> None:
    done = kernelgen(*arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert f"see kernelgen {arguments[0]} --help" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["validate", "plan", "build", "emit", "coverage"])
def test_a_manifest_that_is_not_there(kernelgen: Run, command: str, tmp_path: Path) -> None:
    more = {"build": ["-o", tmp_path], "emit": ["-o", tmp_path], "coverage": ["--graph-ops", tmp_path / "x"]}
    done = kernelgen(command, tmp_path / "missing.yaml", *more.get(command, []))
    assert (done.code, done.out) == (2, "")
    assert "missing.yaml" in done.err
    assert "Traceback" not in done.err


def test_a_target_that_the_manifest_is_not_for(kernelgen: Run, basic: Path) -> None:
    done = kernelgen("plan", basic, "--target", "trn3")
    assert done.code == 2
    assert "manifest 'basic' is for trn1, inf2, trn2, not for trn3" in done.err


def test_kernel_folders_that_cannot_be_distinguished(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    for name in ("a/mine", "b/mine"):
        (tmp_path / name).mkdir(parents=True)
    done = kernelgen("plan", basic, "--kernels", tmp_path / "a/mine", "--kernels", tmp_path / "b/mine")
    assert done.code == 2
    assert "is already named 'mine'" in done.err


def fail(error: BaseException) -> click.Command:
    @click.command()
    def command() -> None:
        raise error

    return command


def replace_command(monkeypatch: pytest.MonkeyPatch, name: str, command: click.Command) -> None:
    monkeypatch.setattr(importlib.import_module(frame.module_of(name)), "command", command)


def test_a_bug_is_reported_as_one_with_its_traceback(kernelgen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_command(monkeypatch, "list", fail(ZeroDivisionError("a bug")))
    done = kernelgen("list")
    assert (done.code, done.out) == (70, "")
    assert "Traceback" in done.err and "ZeroDivisionError: a bug" in done.err
    assert "is a bug in it, not a mistake in your input" in done.err
    assert "the command: kernelgen list" in done.err


def test_interrupted(kernelgen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_command(monkeypatch, "list", fail(KeyboardInterrupt()))
    assert kernelgen("list") == Done(130, "", "\ninterrupted\n")


def test_a_full_disk_is_not_a_bug(kernelgen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_command(monkeypatch, "list", fail(OSError(28, "No space left on device", "/some/file")))
    done = kernelgen("list")
    assert done == Done(1, "", "error: /some/file: No space left on device\n")


def test_a_reader_that_stops_reading_is_not_an_error() -> None:
    command = f"{sys.executable} -m kernelgen list --format json | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}; echo $?"],
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("{")
    assert done.stderr == ""


def test_a_users_folder_may_be_called_kernels(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    own = "from kernelgen.emitters import emitter\n\n\n@emitter('relu')\ndef relu(x):\n    return x\n"
    (tmp_path / "kernels" / "own.py").write_text(own)
    done = kernelgen("plan", basic, "--kernels", tmp_path / "kernels")
    assert done.code == 0, done.err
    emitters = {line.split()[0].partition("-")[0]: line.split()[1] for line in done.out.splitlines() if "-f32-" in line}
    assert emitters["relu"] == "kernels/own.py" and emitters["add"] == "kernelgen/elementwise.py"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_closed_standard_stream_is_not_a_bug(basic: Path, closed: str) -> None:
    command = f"{sys.executable} -m kernelgen plan {basic} {closed}"
    done = subprocess.run(["sh", "-c", command], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "basic" in done.stdout or closed != "<&-"


def test_of_very_many_mistakes_the_first_are_shown(kernelgen: Run, tmp_path: Path) -> None:
    entries = "".join(f"  - {{op: relu{n}}}\n" for n in range(5000))
    (tmp_path / "many.yaml").write_text(f"format: 1\nname: many\ntargets: [trn1]\nkernels:\n{entries}")
    done = kernelgen("validate", tmp_path / "many.yaml")
    lines = done.err.splitlines()
    assert done.code == 2 and len(done.err) < 100_000
    assert sum(": error: " in line for line in lines) == 100
    total = int(lines[-1].split()[0])
    assert total >= 5000 and lines[-2] == f"and {total - 100} more"


def test_control_characters_of_a_file_do_not_reach_the_terminal(kernelgen: Run, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text('format: 1\nname: "\\e]0;title\\a"\ntargets: [trn1]\n')
    done = kernelgen("validate", tmp_path / "odd.yaml")
    assert done.code == 2 and "\x1b" not in done.err and "\x07" not in done.err and "\\x1b" in done.err
