"""tools/website: the input of the site's generator, which is not among the tests' packages."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("website", ROOT / "tools/website/build.py")
assert _spec and _spec.loader
website = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(website)


def test_every_page_is_in_the_menu_once(tmp_path: Path) -> None:
    website.write(tmp_path)
    menu = json.dumps(json.loads((tmp_path / "mkdocs.yml").read_text())["nav"])
    listed = re.findall(r'"([^"]+\.md)"', menu)
    written = {str(path.relative_to(tmp_path / "docs")) for path in (tmp_path / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(written)
    assert {
        "index.md",
        "guides/run-a-model.md",
        "api/kernelgen.plan.md",
        "api/neuron_kernels.md",
        "api/defs.bzl.md",
    } <= written


def test_a_link_to_a_file_beside_the_pages_becomes_its_name_and_one_that_leads_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(website, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "chips.json").write_text("{}")
    page = tmp_path / "docs" / "page.md"
    page.write_text("[a](README.md#b) [c](https://example.org) [the table](../chips.json) [chips.json](../chips.json)")
    assert website.page(page) == "[a](index.md#b) [c](https://example.org) the table (`chips.json`) `chips.json`"
    (tmp_path / "docs" / "guides").mkdir()
    (tmp_path / "docs" / "guides" / "chat.md").write_text("# A first chat\n\nText.\n")
    page.write_text("[guides/chat.md](guides/chat.md) [chat.md](guides/chat.md#b) [a chat](guides/chat.md)")
    title = "[A first chat](guides/chat.md"
    assert website.page(page) == f"{title}) {title}#b) [a chat](guides/chat.md)"
    page.write_text("[the table](../chip.json)")
    with pytest.raises(SystemExit, match=r"docs/page.md: the link to ../chip.json leads nowhere"):
        website.page(page)


def test_every_function_of_a_header_has_an_entry_with_its_comment() -> None:
    path = ROOT / "backend/bundle/include/neuron_kernels.h"
    text = website.header(path)
    functions = re.findall(r"^NEURON_KERNELS_API [^(]*?(\w+)\(", path.read_text(), re.MULTILINE)
    assert len(functions) > 15
    assert [name for name in functions if f"\n## {name}\n" not in text] == []
    assert "\n## neuron_kernels_table\n\nA bundle as plain arrays" in text


def test_rules_have_their_attributes_and_macros_their_arguments(tmp_path: Path) -> None:
    text = website.starlark(ROOT / "rules/private/rules/neuron_neff.bzl")
    assert "\n## neuron_neff\n\n*rule*\n\nCompiles one kernel's HLO.\n" in text
    assert "| `target` | string | `required` | neuronx-cc's `--target`. |" in text
    assert "\n## neuron_neff()\n" in text and "| `**kwargs` | the rule's other attributes. |" in text
    (tmp_path / "a.bzl").write_text("def _f():\n    pass\n")
    assert website.starlark(tmp_path / "a.bzl") == ""


def test_words_of_pages_are_counted_at_a_commit_and_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(website, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# One two\n\n    code\n\n```\nmore code\n```\n\nthree\n")
    (tmp_path / "docs/old.md").write_text("a b c d e\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "pages")
    (tmp_path / "docs/old.md").rename(tmp_path / "docs/new.md")
    assert website.word_table("HEAD").splitlines() == [
        "| page | words at HEAD | words now |",
        "|---|--:|--:|",
        "| README.md | 4 | 4 |",
        "| docs/new.md |  | 5 |",
        "| docs/old.md | 5 |  |",
        "| **pages** | 2 | 2 |",
        "| **all words** | 9 | 9 |",
        "| **words of the longest** | 5 | 5 |",
    ]
    with pytest.raises(SystemExit, match=r"--words v9: fatal: .*; name a commit, such as HEAD~10"):
        website.word_table("v9")
