"""Builds the documentation as a static site: docs/, and an API reference of Python modules, C headers and Bazel rules.

    ./bazelw run //tools/website                 writes build/site; open build/site/index.html
    ./bazelw run //tools/website -- -o FOLDER
    ./bazelw run //tools/website -- --check      only prints errors, as the linters do
    ./bazelw run //tools/website -- --words v1   prints the number of words of each page at a commit, and now

A broken link is an error. Once the generator is installed, neither building nor reading the site needs a network.
requirements.txt in this folder pins the generator (MkDocs). Its environment is in kernelgen's cache folder.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).resolve().parents[2]))
HEADERS = ("backend/bundle/include/neuron_kernels.h", "backend/ggml-neuron/ggml-neuron.h")
RULES = ("rules/defs.bzl", "rules/extensions.bzl", "rules/repositories.bzl", "rules/private/rules/*.bzl")
PACKAGES = ("tools/kernelgen", "tools/nki_interpreter")

_GUARD = re.compile(r"#(?:if|endif|pragma|include|else|    )|extern \"C\"|}$|\Z")
STYLE = """\
/* A name in a table breaks at spaces and hyphens alone: Material would break it between any two letters. */
.md-typeset table code { word-break: normal; overflow-wrap: normal; }
"""
_LINK = re.compile(r"\[([^\]]*)\]\(((?![a-z]+:|#)[^)\s#]+)(#[^)\s]*)?\)")


def environment() -> Path:
    """Returns the Python with the generator; installs it on first use.

    Raises:
        SystemExit: it can't be installed; the message has pip's last lines.
    """
    script = ROOT / "rules/private/repositories/python_env.py"
    lock = Path(__file__).with_name("requirements.txt")
    done = subprocess.run([sys.executable, script, "--lock", lock], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return Path(json.loads(done.stdout)["path"]) / "bin" / "python"


def page(path: Path) -> str:
    """Returns a page of docs/ for the site: README.md is its index. A link whose text is a page's file name gets the page's title.

    A link to a file outside docs/ becomes its name.
    """

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        file = Path(os.path.normpath(path.parent / target))
        if file.is_relative_to(ROOT / "docs"):
            if file.name == text.rpartition("/")[2] and file.is_file():
                text = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            return f"[{text}]({re.sub(r'README[.]md$', 'index.md', target)}{anchor})"
        if not file.exists():
            raise SystemExit(f"{path.relative_to(ROOT)}: the link to {target} leads nowhere")
        name = f"`{file.relative_to(ROOT)}`"
        return name if text.strip("`") in (file.name, name.strip("`")) else f"{text} ({name})"

    return _LINK.sub(link, path.read_text(encoding="utf-8"))


def declared(code: Sequence[str]) -> str:
    """Returns the name that lines of C declare first, or ""."""
    text = " ".join(code)
    found = re.match(r"(?:typedef )?(?:#define|struct|enum) (\w+)", text) or re.search(r"(\w+)\(", text)
    return found[1] if found else ""


def header(path: Path) -> str:
    """Returns a page about a C header: each declaration below its comment."""
    text = [f"# {path.name}", "", f"`{path.relative_to(ROOT)}`", ""]
    for part in path.read_text(encoding="utf-8").split("\n\n"):
        lines = part.splitlines()
        comment = [line[2:].removeprefix(" ") for line in lines if line.startswith("//")]
        code = [line for line in lines if not line.startswith("//") and not _GUARD.match(line)]
        if name := declared(code):
            text += [f"## {name}", "", *comment, "", "```c", *code, "```", ""]
        elif len(comment) == 3 and not comment[0]:
            text += [f"**{comment[1].capitalize()}**", ""]
        elif not code:
            text += [*comment, ""]
    return "\n".join(text)


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _attributes(node: ast.expr) -> Iterator[str]:
    """Yields the rows of a table of attributes, from a dictionary of `attr.…(…)`; nothing for other expressions."""
    if not isinstance(node, ast.Dict):
        return
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(value, ast.Call) and not _text(key).startswith("_"):
            given = {one.arg: one.value for one in value.keywords}
            default = (
                "required" if "mandatory" in given else ast.unparse(given["default"]) if "default" in given else ""
            )
            kind = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
            cells = (
                f"`{_text(key)}`",
                kind,
                f"`{default}`" if default else "",
                " ".join(_text(given.get("doc")).split()),
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def starlark(path: Path) -> str:
    """Returns the rules, macros, extensions and providers of a Starlark file, which Python can parse; empty if it has none.

    A private rule belongs to a macro of the same name; the macro's entry lists its attributes.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    text: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            made = ast.unparse(node.value.func)
            given = {one.arg: one.value for one in node.value.keywords}
            if (
                made not in ("rule", "repository_rule", "module_extension", "tag_class", "provider")
                or "doc" not in given
            ):
                continue
            text += [
                f"## {node.targets[0].id.lstrip('_')}",
                "",
                f"*{made.replace('_', ' ')}*",
                "",
                _text(given["doc"]),
                "",
            ]
            if rows := list(_attributes(given.get("attrs", node.value))):
                text += ["| attribute | type | default | meaning |", "|---|---|---|---|", *rows, ""]
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (doc := ast.get_docstring(node)):
            about, _, arguments = doc.partition("\nArgs:\n")
            text += [f"## {node.name}()", "", "*macro*", "", about.strip(), ""]
            found = re.findall(r"^    ([*\w]+): (.*(?:\n      +.*)*)", arguments, re.MULTILINE)
            if found:
                text += ["| argument | meaning |", "|---|---|"]
                text += [
                    f"| `{name}` | {' '.join(meaning.split()).replace('|', chr(92) + '|')} |" for name, meaning in found
                ]
                text += [""]
    return "\n".join([f"# {path.name}", "", f"`{path.relative_to(ROOT)}`", "", *text]) if text else ""


def modules(package: Path) -> dict[str, str]:
    """Returns a page for each module and package directly below a package, with all modules in it."""
    pages = {}
    for path in sorted(package.iterdir()):
        if path.name.startswith("_") or not (path.suffix == ".py" or (path / "__init__.py").exists()):
            continue
        name = f"{package.name}.{path.stem}"
        pages[name] = (
            f"# {name}\n\n::: {name}\n    options:\n      show_submodules: true\n      show_root_heading: false\n"
        )
    return pages


def navigation(api: Mapping[str, Mapping[str, str]]) -> list[object]:
    """Returns the site's menu: the tables of docs/README.md, each below its heading, then the API."""
    menu: list[object] = [{"Start": "index.md"}]
    for title, table in re.findall(
        r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/README.md").read_text(), re.MULTILINE | re.DOTALL
    ):
        files = re.findall(r"^\| \[[^\]]*\]\((\S+\.md)\)", table, re.MULTILINE)
        menu.append({title: files})
    menu.append({"API": [{title: list(pages)} for title, pages in api.items()]})
    return menu


def write(folder: Path) -> None:
    """Writes the site's sources and its settings, mkdocs.yml, into a folder."""
    docs = folder / "docs"
    for path in (ROOT / "docs").rglob("*"):
        to = docs / path.relative_to(ROOT / "docs")
        if path.suffix == ".md":
            to = to.with_name("index.md") if path == ROOT / "docs/README.md" else to
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(page(path), encoding="utf-8")
        elif path.suffix == ".svg":
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    api = {
        "Python": {f"api/{name}.md": text for package in PACKAGES for name, text in modules(ROOT / package).items()},
        "C": {f"api/{Path(name).stem}.md": header(ROOT / name) for name in HEADERS},
        "Bazel": {
            f"api/{path.stem}.bzl.md": text
            for pattern in RULES
            for path in sorted(ROOT.glob(pattern))
            if (text := starlark(path))
        },
    }
    (docs / "assets").mkdir()
    (docs / "assets/tables.css").write_text(STYLE, encoding="utf-8")
    (docs / "api").mkdir()
    for pages in api.values():
        for name, text in pages.items():
            (docs / name).write_text(text, encoding="utf-8")
    python = {
        "paths": [str(ROOT / "tools")],
        "options": {"docstring_style": "google", "show_source": False, "heading_level": 2},
    }
    settings = {
        "site_name": "neuron-kernelgen",
        "docs_dir": str(docs),
        "extra_css": ["assets/tables.css"],
        "use_directory_urls": False,  # so that the site opens from a folder
        "strict": True,
        "theme": {
            "name": "material",
            "font": False,  # no request leaves the page
            "features": [
                "navigation.sections",
                "navigation.top",
                "navigation.indexes",
                "content.code.copy",
                "search.highlight",
            ],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "indigo"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "indigo"},
            ],
        },
        "plugins": ["search", "offline", {"mkdocstrings": {"handlers": {"python": python}}}],
        "markdown_extensions": [
            "tables",
            "sane_lists",
            "admonition",
            "pymdownx.superfences",
            {"toc": {"permalink": True}},
        ],
        "validation": {
            "links": {"anchors": "warn", "not_found": "warn", "unrecognized_links": "warn"},
            "nav": {"omitted_files": "warn"},
        },
        "nav": navigation(api),
    }
    (folder / "mkdocs.yml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML


def words(text: str) -> int:
    """Returns the number of words of a page, without its blocks of code."""
    return len(re.sub(r"^```.*?^ *```$|^ {4}.*?$", "", text, flags=re.MULTILINE | re.DOTALL).split())


def word_table(commit: str) -> str:
    """Returns a table of the words of README.md and of each page at a commit and now.

    Raises:
        SystemExit: the repository does not have the commit.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"--words {commit}: {done.stderr.strip()}; name a commit, such as HEAD~10")
        return done.stdout

    names = git("ls-tree", "-r", "--name-only", commit, "README.md", "docs").splitlines()
    before = {name: words(git("show", f"{commit}:{name}")) for name in names if name.endswith(".md")}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    now = {str(path.relative_to(ROOT)): words(path.read_text(encoding="utf-8")) for path in pages}
    rows = [f"| {name} | {before.get(name, '')} | {now.get(name, '')} |" for name in sorted({*before, *now})]
    rows.append(f"| **pages** | {len(before)} | {len(now)} |")
    rows.append(f"| **all words** | {sum(before.values())} | {sum(now.values())} |")
    rows.append(f"| **words of the longest** | {max(before.values())} | {max(now.values())} |")
    return "\n".join([f"| page | words at {commit} | words now |", "|---|--:|--:|", *rows])


def finish(site: Path) -> None:
    """Makes pages load the script for the search in a folder from a local copy, not from the network."""
    Path(site, "assets/worker.js").write_bytes(Path(__file__).with_name("worker.js").read_bytes())
    for path in site.rglob("*.html"):
        here = "../" * (len(path.relative_to(site).parts) - 1)
        path.write_text(path.read_text().replace("https://unpkg.com/iframe-worker/shim", f"{here}assets/worker.js"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "-o", "--output", type=Path, default=ROOT / "build/site", metavar="FOLDER", help="The folder of the site."
    )
    parser.add_argument("--check", action="store_true", help="Keep nothing; exit with 1 if a link is broken.")
    parser.add_argument(
        "--words", metavar="COMMIT", help="Print the number of words of each page at a commit, and now."
    )
    parser.add_argument("--python", type=Path, help="A Python that has the generator, instead of the pinned one.")
    args = parser.parse_args()
    if args.words:
        print(word_table(args.words))
        return 0
    output = (Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")) / args.output).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch))
        site = Path(scratch, "site") if args.check else output
        python = args.python or environment()
        command = [python, "-m", "mkdocs", "build", "--config-file", Path(scratch, "mkdocs.yml"), "--site-dir", site]
        variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True, check=False)
    # With --quiet, the generator would not count warnings, which report broken links.
    wrong = [line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))]
    if done.returncode:
        print("\n".join(wrong) or done.stderr)
    if done.returncode == 0 and not args.check:
        finish(output)
        print(output / "index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
