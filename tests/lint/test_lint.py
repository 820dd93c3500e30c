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


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("A header is no source.", '"is not a …", or "there is no …"'),
        ("It names a file which is no text.", '"is not a …"'),
        ("It goes by way of the host.", '"through", "by" or "over"'),
        ("What is too long is cut.", 'name the thing: "a file that is too …"'),
        ("The time when it comes to be counts.", '"is created", "becomes"'),
        ("For one who wonders why.", "the question itself"),
        ("Data read again are others.", '"differ", "differs"'),
        ("The sum is another.", '"differ", "differs"'),
        ("The graph is made anew.", '"again", "new"'),
        ("All are equal but for the last.", '"except", "without"'),
        ("Views are not its business.", '"does not …", "… does it"'),
        ("It loops for ever.", '"forever"'),
        ("It fails without a word.", '"without a message"'),
        ("Each is held against the peer.", '"compared with", "compares it with"'),
        ("It prints what became of the case.", '"the outcome of", "how it ended"'),
        ("Bazel is not to be had here.", '"is available", "there is"'),
        ("It needs nothing but Python.", '"only"'),
        ("A file names it by its own place.", '"beside its own file"'),
        ("The memory of who reads it is freed.", 'the user or the program: "a program that …"'),
        ("What ends before it is done leaves a log.", '"if … ends"'),
        ("Builds go by the digest.", '"uses", "depends on", "compares"'),
        ("The others run all the same.", '"still"'),
        ("The process ends upon it.", 'the plain word: "on", "only", "if", "known", "among", "while"'),
        ("It is not the other way round.", "the second sentence in full"),
        ("It is said once.", '"a message says", "the bundle says", "prints"'),
        ("A module imports from the floors below.", '"level", or for a time "lower bound"'),
        ("The key has a twin in C++.", '"what must agree", "the same … in C++"'),
        ("All three front doors run it.", "the names: Bazel, CMake, the command line"),
        ("The stand-in for libnrt runs it.", '"simulator"'),
        ("That is found out later.", '"is found", "is noticed", "is known"'),
        ("A bias that the chain has not: CPU.", '"lacks", "does not have"'),
        ("The device runs no op but the embedding.", '"only", "no … except"'),
        ("The same as of every rule.", '"the same as in …", "since …"'),
        ("A person to whom it goes.", "name the person or the program"),
        ("The destructor sees to it.", '"ensures", or what it does'),
        ("The caller is told once.", '"receives", "is given", "is reported"'),
        ("The status tells the reason.", '"prints", "reports", "returns"'),
        ("The kernel wants rows.", '"requires", "reads", "requests"'),
        ("The backend sees the node.", '"reads", "finds", "receives"'),
        ("Three, of which two are new.", 'a sentence of its own: "3 of them are …"'),
        ("These are all: there are no others.", '"only these", "all of these"'),
    ],
)
def test_a_word_that_has_a_plainer_one_is_found_in_every_kind_of_file(words: str, advice: str) -> None:
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


@pytest.mark.parametrize(
    "words",
    [
        "There is no kernel, and there are no devices.",
        "This takes longer and is no slower; it is no longer so.",
        "The kernel is another one of the same op.",
        "Say `by way of` or `anew`.",
        "Nothing else is read.",
        "The queue has not ended, and there is no other op.",
        "The op is floor, and packages of Python that have it are not needed.",
        "llama.cpp decides where a weight goes by asking for an op; the user had a file, and finds out which ops run.",
    ],
)
def test_plain_words_are_not_found(words: str) -> None:
    Path("page.md").write_text(f"{words}\n")
    assert list(lint.unplain(["page.md"])) == []


def test_some_words_are_for_pages_alone() -> None:
    Path("page.md").write_text("Else it fails.\nThe CPU runs what has no kernel.\n")
    Path("module.py").write_text('"""Else it fails.\n\nRuns what has no kernel.\n"""\n')
    assert [one.partition("': ")[0] for one in lint.unplain(["module.py", "page.md"])] == [
        "page.md:1: 'Else",
        "page.md:2: 'what has no",
    ]
