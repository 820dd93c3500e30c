"""tools/lint finds mistakes in C++, in shell scripts and the scripts inside templates, in YAML, and in sentences."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("lint", ROOT / "tools/lint/lint.py")
assert _spec and _spec.loader
lint = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lint)

GOOD = {
    "good.cpp": "int main(int argc, char ** argv) {\n    return argc;\n}\n",
    "good.yml": "on: {push: {}}\nsteps:\n- run: true\n",
    "run": '#!/usr/bin/env bash\necho "$@"\n',
    "step.in": '#!/bin/sh\nexec @python@ "$@"\n',
    "launcher.bzl": '_A = """\\\n#!/bin/sh\n# Runs {key}.\nexec "${{HOME:-/}}/{key}" "$@"\n"""\n\n_B = """\\\n#!/bin/sh\nself=$0\nexec "${self%/*}/x" "$@"\n"""\n',
    "picture.png": "\x89",
}


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files in which no linter finds anything."""
    for name in (".clang-format", ".yamllint.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name, text in GOOD.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lint, "buildifier", lambda: ["buildifier"])
    return tmp_path


def run(name: str, fix: bool = False) -> tuple[int, str]:
    """Runs one linter over the current folder; returns its exit status and output."""
    files = sorted(path.name for path in Path().iterdir() if path.is_file())
    scripts = []
    for script, text in lint.shell_scripts(files):
        path = Path("scripts", script)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        scripts.append(str(path))
    done = subprocess.run(lint.commands(files, scripts, fix)[name], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["clang-format", "shellcheck", "yamllint"])
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    assert run(name) == (0, "")


@pytest.mark.parametrize("suffix", [".c", ".cc", ".cpp", ".h"])
def test_clang_format_finds_and_mends(suffix: str) -> None:
    bad = Path("bad" + suffix)
    bad.write_text("int  zero( void ){ return 0; }\n")
    status, output = run("clang-format")
    assert status != 0 and str(bad) in output
    assert run("clang-format", fix=True)[0] == 0
    assert bad.read_text() == "int zero(void) {\n    return 0;\n}\n"
    assert run("clang-format") == (0, "")


def test_generated_tables_are_left_alone() -> None:
    Path("table.inc").write_text("int  x ;\n")
    assert run("clang-format") == (0, "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run", "#!/usr/bin/env bash\ncd $1\n"),
        ("tool.sh", "#!/bin/sh\ncd $1\n"),
        ("step.in", "#!/bin/sh\ncd @folder@ $1\n"),
        ("launcher.bzl", '_A = """\\\n#!/bin/sh\ncd "${{HOME}}" {key} $1\n"""\n'),
    ],
)
def test_shellcheck_finds_an_unquoted_variable(name: str, text: str) -> None:
    Path(name).write_text(text)
    status, output = run("shellcheck")
    assert status == 1
    assert "SC2086" in output and f"In scripts/{name}" in output


@pytest.mark.parametrize("text", ["a: 1\na: 2\n", "a:  1\n", "a: [1, 2 ]\n", f"a: {'x' * 160}\n", "a: yes\n"])
def test_yamllint_finds(text: str) -> None:
    Path("bad.yaml").write_text(text)
    status, output = run("yamllint")
    assert status != 0 and "bad.yaml" in output


@pytest.mark.parametrize(
    ("target", "leaves"),
    [("run", False), ("../{folder}/run", False), ("../run", True), ("/run", True), ("absent/../../run", True)],
)
def test_a_link_stays_in_the_repository(checkout: Path, target: str, leaves: bool) -> None:
    to = target.format(folder=checkout.name)
    Path("link").symlink_to(to)
    assert list(lint.of_one_machine(["link"])) == leaves * [
        f"link: it is a link to {to}, which is not in the repository"
    ]


@pytest.mark.parametrize("folder", ["/" + "root", "/home" + "/me", "/Users" + "/me", "{checkout}"])
@pytest.mark.parametrize("line", ["{}/.cache", "x={}", '"{}",', "-I{}/include", "file://{}/x"])
def test_a_folder_of_one_machine_is_found(checkout: Path, folder: str, line: str) -> None:
    folder = folder.format(checkout=checkout)
    Path("notes.md").write_text(f"good\n{line.format(folder)}\n")
    assert list(lint.of_one_machine([*GOOD, "notes.md"])) == [
        f"notes.md:2: {folder} is a folder of one machine: name it relative to the repository"
    ]


@pytest.mark.parametrize(
    "line", ["$HOME/root", "a/home/me", "/rooted", "/home", "https://host/root/x", "~/Users/me", "${A}/root"]
)
def test_other_paths_are_taken(line: str) -> None:
    Path("notes.md").write_text(line)
    assert not list(lint.of_one_machine(["notes.md"]))


def test_a_word_with_a_plainer_synonym_is_refused() -> None:
    words, advice = "The graph is made anew.", '"again", "new"'
    texts = {
        "page.md": f"# Page\n\n{words}\n\n    {words}\n\n```\n{words}\n```\n",
        "message.py": f'X = 1\n\nprint(f"{{X}}: {words}")\n',
        "docstring.py": f'"""Module.\n\n{words}\n"""\n',
        "message.cpp": f'int main() {{\n\n    puts("{words}");\n}}\n',
        "comment.bzl": f'"""Rules."""\n\n# {words}\n',
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    found = list(lint.unplain(sorted(texts)))
    assert [one.partition(": ")[0] for one in found] == [f"{name}:3" for name in sorted(texts)]
    assert all(one.endswith(f"': write {advice}") for one in found)


def test_a_line_that_a_page_repeats_is_found() -> None:
    Path("page.md").write_text("- One.\n- One.\n\n\n| `a` |\n| `b` |\n\n    code\n    code\n")
    assert list(lint.unplain(["page.md"])) == ["page.md:2: it repeats the line before it: remove one of them"]


def test_size_above_its_limit_is_an_error() -> None:
    limits = lint.limits
    long_function = "def f():\n" + "    x = 1\n" * limits.MAX_FUNCTION_LINES
    Path("long.py").write_text(long_function)
    Path("page.md").write_text("# Three words\n\n    code that does not count\n\n```\nnor this\n```\n")
    sizes = limits.measure(["long.py", "page.md", "good.cpp", "good.yml"])
    assert (sizes["functions of more than 60 lines"], sizes["words in pages"]) == (1, 3)
    assert (sizes["lines of C++"], sizes["lines of Python in long.py"]) == (3, 61)
    current = "".join(f"{size} {name}  # reason\n" for name, size in sizes.items())
    assert list(limits.exceeded(sizes, limits.read_limits(current))) == []
    lower = current.replace("61 lines of Python  ", "60 lines of Python  ").replace("3 words in pages", "#")
    assert list(limits.exceeded(sizes, limits.read_limits(lower))) == [
        "lines of Python: 61, more than the limit of 60 in tools/lint/limits.txt: remove some",
        "limits.txt: no limit for 'words in pages', which is 3",
    ]
