"""Times each command of a guide as a newcomer types it: in a clone of this checkout, with an empty home folder.

    python3 tools/first_run/first_run.py docs/guides/llama-cpp-python.md --model MODEL.gguf

It prints a table: the command, its wall time, the CPU time of its processes, and the time to its first output, all in
seconds. docs/results/first-run.md has such tables. On a machine with other work, compare the CPU times. They do not
include a server that a command leaves running, such as Bazel's. The commands use the machine's own packages, and the
environment's settings of pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("MODEL.gguf", "model.gguf")
"""The names of the model's file in guides."""

_BLOCK = re.compile(r"(?:^(?:    |        )\S.*\n|^ {4,}\S.*\n|^\n(?=    ))+", re.MULTILINE)
_FILE = re.compile(r"`([\w.]+\.py)`[^`\n]*:\n\s*\Z")


@dataclass(frozen=True)
class Command:
    """A command of a guide.

    Attributes:
        text: the typed text; for a file that the guide shows, the command that writes it.
        shown: the text in the table.
    """

    text: str
    shown: str


@dataclass(frozen=True)
class Timed:
    """The times of a command, in seconds.

    Attributes:
        seconds: wall time.
        processor: CPU time of the command and of the processes that it waited for.
        first: the time to its first output on standard output; None if it printed nothing.
    """

    command: Command
    seconds: float
    processor: float
    first: float | None


def commands(text: str) -> Iterator[Command]:
    """Yields the commands of a page's indented blocks. A Python program is a command that writes the file that the text names."""
    for found in _BLOCK.finditer(text):
        lines = [line for line in found[0].splitlines() if line.strip()]
        if any(re.match(r"\s*(?:import|from) ", line) for line in lines):
            name = _FILE.search(text[: found.start()])
            indent = min(len(line) - len(line.lstrip()) for line in lines)
            file = name[1] if name else "program.py"
            program = "\n".join(line[indent:] for line in lines)
            yield Command(f"cat >{file} <<'END'\n{program}\nEND", f"({file})")
            continue
        for line in lines:
            for one in line.strip().split(" && "):
                yield Command(one, one)


def sections(text: str, headings: Sequence[str]) -> str:
    """Returns the sections of a page under the given headings of level 2; the whole page if none are given."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(part for part in parts if not headings or part.splitlines()[0].removeprefix("## ") in headings)


def _processor_seconds(process: int) -> float:
    """Returns the user and system seconds of a process and of the children that it waited for."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run(todo: Sequence[Command], folder: Path, environment: dict[str, str]) -> Iterator[Timed]:
    """Runs commands in one shell, and yields the times of each.

    Raises:
        SystemExit: a command failed.
    """
    end = "end-of-command"
    with subprocess.Popen(
        ["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, env=environment, bufsize=0
    ) as shell:
        assert shell.stdin and shell.stdout
        for command in todo:
            print(f"$ {command.shown}", file=sys.stderr, flush=True)
            begun, spent = time.monotonic(), _processor_seconds(shell.pid)
            first = None
            shell.stdin.write(f"{{\n{command.text}\n}} </dev/null\nprintf '\\n{end} %s\\n' $?\n".encode())
            said = b""
            while not (done := re.search(rb"\n" + end.encode() + rb" (\d+)\n\Z", said)):
                if not (piece := os.read(shell.stdout.fileno(), 65536)):
                    raise SystemExit(f"error: the shell ended in: {command.shown}")
                said += piece
                if first is None and said.strip() and not said.strip().startswith(end.encode()):
                    first = time.monotonic() - begun
                sys.stderr.buffer.write(piece)
                sys.stderr.flush()
            if int(done[1]):
                raise SystemExit(f"error: exit status {int(done[1])}: {command.shown}")
            yield Timed(command, time.monotonic() - begun, _processor_seconds(shell.pid) - spent, first)


def table(timed: Sequence[Timed]) -> Iterator[str]:
    """Yields the lines of a table, and of its sum."""
    yield "| command | seconds | processor seconds | to its first output |"
    yield "|---|--:|--:|--:|"
    for one in timed:
        first = "" if one.first is None else f"{one.first:.1f}"
        yield f"| `{one.command.shown}` | {one.seconds:.1f} | {one.processor:.1f} | {first} |"
    yield f"| in all | {sum(one.seconds for one in timed):.0f} | {sum(one.processor for one in timed):.0f} | |"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("guide", type=Path, help="a page with commands in indented blocks")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="a GGUF file")
    parser.add_argument(
        "--section",
        action="append",
        default=[],
        metavar="HEADING",
        help="run only this section; can be given several times",
    )
    parser.add_argument(
        "--beside", action="append", default=[], type=Path, metavar="FOLDER", help="a folder to link beside the clone"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    args = parser.parse_args()
    todo = list(commands(sections(args.guide.read_text(encoding="utf-8"), args.section)))
    if args.dry_run:
        print("\n".join(command.shown for command in todo))
        return
    scratch = Path(tempfile.mkdtemp(prefix="first-run-"))
    try:
        clone = scratch / "neuron-kernelgen"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
        for name in NAMES:
            (clone / name).symlink_to(args.model.resolve())
        for folder in args.beside:
            (scratch / folder.name).symlink_to(folder.resolve())
        home = scratch / "home"
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NEURON_", "GGML_", "XDG_"))}
        load = os.getloadavg()[0]
        timed = list(run(todo, clone, kept | {"HOME": str(home)}))
        print("\n".join(table(timed)))
        print(f"\n{os.cpu_count()} processors; the load was {load:.1f} before the first command")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
