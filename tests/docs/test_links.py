"""Links between pages of the documentation have existing targets."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_OTHERS = {"docs/neuron-notes.md", "docs/ops.md"}  # pages of kiln (docs/results/as-measured.md) and of llama.cpp
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings in the form of code hosts."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def broken(page: Path) -> list[str]:
    """Returns the links of a page to pages or headings that do not exist."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if re.match(r"[a-z]+:", target) or file.suffix != ".md":
            continue
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


def test_links_lead_somewhere() -> None:
    assert {page: links for page in PAGES if (links := broken(page))} == {}


def test_pages_that_sources_name_are_there() -> None:
    folders = ("backend", "benchmarks", "examples", "kernels", "rules", "tests", "tools")
    suffixes = (".py", ".cpp", ".cc", ".h", ".inc", ".bzl", ".bazel", ".cmake", ".txt", ".yaml", ".yml", ".md")
    files = [
        file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in suffixes and file.is_file()
    ]
    files += [file for file in ROOT.iterdir() if file.is_file() and not file.is_symlink()]
    named = {
        (str(file.relative_to(ROOT)), page)
        for file in files
        for page in re.findall(
            r"(?<![\w/])docs/(?:[\w-]+/)*[\w-]+\.md\b", file.read_text(encoding="utf-8", errors="ignore")
        )
    }
    assert len(named) > 50
    missing = [one for one in sorted(named) if one[1] not in OF_OTHERS and not (ROOT / one[1]).is_file()]
    assert [(file, page) for file, page in missing if not file.startswith("tests/docs/")] == []


def test_the_index_has_every_page() -> None:
    listed = set(re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs/README.md").read_text()))
    docs = ROOT / "docs"
    assert listed == {str(p.relative_to(docs)) for p in PAGES if p.is_relative_to(docs)} - {"README.md"}


def test_guides_are_short() -> None:
    texts = {page.name: page.read_text() for page in (ROOT / "docs" / "guides").iterdir()}
    prose = {name: re.sub(r"^(?: {4}|```).*$", "", text, flags=re.MULTILINE) for name, text in texts.items()}
    assert [name for name, text in prose.items() if len(text.split()) > 600] == []
