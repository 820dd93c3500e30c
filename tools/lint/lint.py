"""Runs the linters over the checkout.

These are ruff (format and lint), mypy --strict, buildifier, clang-format, shellcheck, yamllint, and three of the
project's own: one for links and paths that exist on one machine only, one for words that have a plainer synonym
(words.txt), and one for the size of the project (limits.txt).

    ./bazelw run //tools/lint             one line per linter, and its output if it fails; exit status 1 then
    ./bazelw run //tools/lint -- --fix    fixes what ruff, buildifier and clang-format can fix

All except buildifier are packages of the development environment, which pins their versions. Buildifier is an npm
package that contains its binary; without npm, a `buildifier` on PATH is used.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import limits

BUILDIFIER = "@bazel/buildifier@8.2.1"
STARLARK = (".bzl", ".bazel", "BUILD", "WORKSPACE")
CPP = (".c", ".cc", ".cpp", ".h")  # without .inc, which is generated
YAML = (".yaml", ".yml")

_SHEBANG = re.compile(r"#!.*\b(?:ba|da)?sh\n")
_SCRIPT_IN_STARLARK = re.compile(r'"""\\\n(#!/bin/sh\n.*?)"""', re.DOTALL)
_FIELD = re.compile(r"\{(\{)|\}(\})|\{\w+\}")
_CMAKE_FIELD = re.compile(r"@\w+@")
# A folder of one user, not part of a longer path or of an address.
_USERS_FOLDER = re.compile(
    rb"(?:(?<![\w./~$}>-])|(?<=-[IL])|(?<=file://))/(?:root|(?:home|Users)/\w+)(?=/|[\s\"'`:,;)]|$)"
)
_READ = (".md", ".py", ".bzl", ".cmake", *CPP)
_PROSE = re.compile(r"//|#|/\*|^ \* |\"")  # a comment or a string in a source
_CODE = re.compile(r"`[^`]*`")
_STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def buildifier() -> list[str]:
    """Returns the command that runs buildifier.

    Raises:
        SystemExit: neither npx nor buildifier exists.
    """
    if shutil.which("npx"):
        return ["npx", "--yes", BUILDIFIER]
    if found := shutil.which("buildifier"):
        return [found]
    raise SystemExit("buildifier needs npx (on Debian: apt-get install npm), or a buildifier on PATH")


def shell_scripts(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every shell script: files with a shell's `#!`, CMake's templates, and templates in Starlark.

    The fields of a template are replaced with their names.
    """
    for file in files:
        if file.endswith(".bzl"):
            for number, script in enumerate(_SCRIPT_IN_STARLARK.findall(Path(file).read_text())):
                yield f"{file}.{number}", _FIELD.sub(lambda m: m[1] or m[2] or m[0][1:-1], script)
        elif Path(file).suffix in ("", ".in", ".sh"):
            with Path(file).open("rb") as stream:
                if not _SHEBANG.match(stream.readline().decode(errors="replace")):
                    continue
            text = Path(file).read_text()
            yield file, _CMAKE_FIELD.sub(lambda m: m[0][1:-1], text) if file.endswith(".in") else text


def commands(files: Sequence[str], scripts: Sequence[str], fix: bool) -> Mapping[str, Sequence[str]]:
    """Returns the linters' command lines by their names.

    Args:
        files: the checkout's files, relative to the current folder.
        scripts: the files to which the shell scripts are written.
        fix: whether to fix what can be fixed.
    """
    python = [sys.executable, "-m"]
    starlark = [file for file in files if file.endswith(STARLARK)]
    cpp = [file for file in files if file.endswith(CPP)]
    yaml = [file for file in files if file.endswith(YAML)]
    return {
        "ruff format": [*python, "ruff", "format", *([] if fix else ["--check", "--diff"]), "."],
        "ruff check": [*python, "ruff", "check", *(["--fix"] if fix else []), "."],
        "mypy --strict": [*python, "mypy", "--strict", "tools/kernelgen", "tools/nki_interpreter"],
        "buildifier": [*buildifier(), f"--mode={'fix' if fix else 'check'}", "--lint=warn", *starlark],
        "clang-format": [
            sys.executable,
            "-c",
            "import clang_format as c; c.clang_format()",
            *(["-i"] if fix else ["--dry-run", "--Werror"]),
            *cpp,
        ],
        "shellcheck": [str(Path(sys.executable).with_name("shellcheck")), *scripts],
        "yamllint": [*python, "yamllint", "--strict", *yaml],
    }


def of_one_machine(files: Sequence[str]) -> Iterator[str]:
    """Yields the errors in files that work on one machine only.

    Args:
        files: tracked files and links, relative to the current folder, which is the checkout's root.
    """
    checkout = Path.cwd().resolve()
    for file in files:
        path = Path(file)
        if path.is_symlink():
            to = path.readlink()
            if to.is_absolute() or not (path.parent / to).resolve().is_relative_to(checkout):
                yield f"{file}: it is a link to {to}, which is not in the repository"
            continue
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if found := _USERS_FOLDER.search(line) or re.search(re.escape(bytes(checkout)) + rb"(?![\w-])", line):
                yield f"{file}:{number}: {found[0].decode()} is a folder of one machine: name it relative to the repository"


def prose(file: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, text) of a file's prose: Markdown without code, strings and comments of sources."""
    text = Path(file).read_text(encoding="utf-8")
    if file.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT or (token.type in _STRINGS and " " in token.string):
                for number, line in enumerate(token.string.splitlines(), token.start[0]):
                    yield number, _CODE.sub("`", line)
        return
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if file.endswith(".md"):
            fenced ^= line.lstrip().startswith("```")
            if fenced or line.startswith("    "):
                continue
        elif not (_PROSE.search(line) or file.endswith(".bzl")):
            continue
        yield number, _CODE.sub("`", line)


def words() -> list[tuple[re.Pattern[str], str]]:
    """Returns words.txt: (pattern, replacement)."""
    lines = Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in rows]


def unplain(files: Sequence[str]) -> Iterator[str]:
    """Yields the places of words that have a plainer synonym: file:line: the found word, the replacement."""
    rows = words()
    for file in files:
        if file.endswith(_READ) and file != "tests/lint/test_lint.py":  # that file contains all of the words
            lines = Path(file).read_text(encoding="utf-8").splitlines() if file.endswith(".md") else []
            for number, text in prose(file):
                if lines and number > 1 and text.strip() and lines[number - 2] == lines[number - 1]:
                    yield f"{file}:{number}: it repeats the line before it: remove one of them"
                for pattern, advice in rows:
                    if found := pattern.search(text):
                        yield f"{file}:{number}: '{found[0].strip()}': write {advice}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fix", action="store_true", help="Fix what can be fixed.")
    args = parser.parse_args()
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).resolve().parents[2]))
    tracked = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.splitlines()
    files = [file for file in tracked if Path(file).is_file()]
    failed = 0
    wrong = list(of_one_machine([file for file in tracked if Path(file).is_file() or Path(file).is_symlink()]))
    errors_by_lint: dict[str, list[str]] = {
        "links and paths of one machine": wrong,
        "plain words": list(unplain(files)),
        "size": list(limits.exceeded(limits.measure(files), limits.read_limits(limits.LIMITS.read_text()))),
    }
    for name, errors in errors_by_lint.items():
        print("\n".join([f"{'failed' if errors else 'passed'}: {name}", *errors]), flush=True)
        failed += bool(errors)
    with tempfile.TemporaryDirectory() as scratch:
        scripts = []
        for name, text in shell_scripts(files):
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            scripts.append(str(path))
        for name, command in commands(files, scripts, args.fix).items():
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            print(f"{'failed' if done.returncode else 'passed'}: {name}", flush=True)
            if done.returncode:
                failed += 1
                print(done.stdout.replace(f"{scratch}/", ""), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
