"""`kernelgen report`: the page, the files of numbers, and the differences from an earlier report."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from model_calls import call

from kernelgen import cli
from kernelgen.bundle import reader
from kernelgen.cache import EntryHead
from kernelgen.cache.folder import Folder
from kernelgen.dispatch import chips
from kernelgen.forecast.time import Time
from kernelgen.neff.identity import NeffKey
from kernelgen.report import plots
from kernelgen.report.numbers import PARTS, peak, published
from kernelgen.report.page import page
from kernelgen.report.page import text as page_text

ROOT = Path(__file__).parents[2]
MANIFEST = str(ROOT / "manifests" / "basic.yaml")


class Page(HTMLParser):
    """The parts of a page that tests check: ids, links within it, files that it would load, and whether elements are closed."""

    VOID = frozenset("meta link img br hr input".split())

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.rows = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "a":
            self.links.append(str(values["href"]))
        self.loads += [str(values[name]) for name in ("src", "srcset", "data") if values.get(name)]
        self.loads += [str(values["href"])] if tag in ("link", "image", "use") and values.get("href") else []
        self.rows += tag == "tr"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert cli.run(["report", MANIFEST, "--target", "trn1", "-o", str(folder / "a.html")]) == 0
    return folder


def numbers(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "a.json").read_text())
    return found


def test_the_page_is_whole_and_asks_for_nothing(written: Path) -> None:
    text = (written / "a.html").read_text()
    found = Page(text)
    assert found.open == [] and found.loads == []
    assert "modelled, not measured" in text
    assert len(found.ids) == len(set(found.ids))
    beside = {link for link in found.links if not link.startswith("#")}
    assert beside == {f"a.kernels/{kernel['id']}.html" for kernel in numbers(written)["kernels"]}
    assert all((written / link).exists() for link in beside)
    assert {link.removeprefix("#") for link in found.links} - beside <= set(found.ids)
    assert len(text) < 1_000_000 * max(len(numbers(written)["kernels"]) / 200, 0.2)


def test_each_kernels_page_has_its_tensors_and_its_hlo(written: Path) -> None:
    pages = {path.stem: path.read_text() for path in (written / "a.kernels").iterdir()}
    assert set(pages) == {kernel["id"] for kernel in numbers(written)["kernels"]}
    for id, text in pages.items():
        found = Page(text)
        assert found.open == [] and found.loads == [] and found.links == [f"../a.html#{id}"]
        assert "HloModule" in text and "<td>output" in text and ".py:" in text


def test_links_encode_the_names_of_files(tmp_path: Path) -> None:
    entry = '{op: relu, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}'
    (tmp_path / "m.yaml").write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels: [{entry}]\n")
    report = tmp_path / "a#b?.html"
    assert cli.run(["report", str(tmp_path / "m.yaml"), "-o", str(report)]) == 0
    (kernel,) = (tmp_path / "a#b?.kernels").iterdir()
    (link,) = (link for link in Page(report.read_text()).links if not link.startswith("#"))
    assert unquote(urlsplit(link).path) == f"a#b?.kernels/{kernel.name}"
    (link,) = Page(kernel.read_text()).links
    assert unquote(urlsplit(link).path) == "../a#b?.html" and urlsplit(link).fragment == kernel.stem


def test_a_trees_hlo_is_read_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["build", MANIFEST, "--target", "trn1", "--compiler", "simulator", "-o", str(tmp_path)]) == 0
    monkeypatch.setenv("NEURON_KERNELGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("kernelgen.lowering.emission.emit", None)
    tree = tmp_path / "basic_trn1"
    (stored,) = reader.read(tree)
    slow = stored.kernels[0]
    key = NeffKey(slow.hlo_sha256, stored.origin.compiler, stored.origin.flags)
    Folder(tmp_path / "cache" / "neff").write(EntryHead.make(key, slow.id, b"", 77), b"")
    assert cli.run(["report", str(tree), "-o", str(tmp_path / "a.html")]) == 0
    assert {kernel["id"]: kernel["compile_s"] for kernel in numbers(tmp_path)["kernels"]}[slow.id] == 77
    text = (tmp_path / "a.kernels" / f"{slow.id}.html").read_text()
    assert "<td>77 s</td>" in text and f"neuronx-cc compile {slow.id}.hlo.pb --framework XLA --target trn1" in text
    Folder(tmp_path / "cache" / "neff").path(key.name).write_bytes(b"damaged")
    assert cli.run(["report", str(tree), "-o", str(tmp_path / "a.html")]) == 0
    hlo = tree / (slow.files or ("",))[0]
    hlo.unlink()
    hlo.write_bytes(b"other")
    assert cli.run(["report", str(tree), "-o", str(tmp_path / "b.html")]) == 2
    assert f"{hlo} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "b.html").exists()


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.kernels").mkdir()
    (tmp_path / "a.kernels" / "notes.txt").write_text("mine")
    assert cli.run(["report", MANIFEST, "-o", str(tmp_path / "a.html")]) == 2
    assert "and has notes.txt: choose another name with -o" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.kernels"]
    assert cli.run(["report", MANIFEST, "--no-kernel-pages", "-o", str(tmp_path / "a.html")]) == 0
    assert "tensors and HLO" not in (tmp_path / "a.html").read_text()


def test_json_and_csv_have_the_same_numbers(written: Path) -> None:
    kernels = numbers(written)["kernels"]
    with (written / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [kernel["id"] for kernel in kernels] and len(rows) == 10
    for row, kernel in zip(rows, kernels, strict=True):
        assert (float(row["us"]), int(float(row["bytes"]))) == (kernel["us"], kernel["bytes"])
        flops = {name.removeprefix("flops_"): int(n) for name, n in row.items() if name.startswith("flops_")}
        assert {dtype: n for dtype, n in flops.items() if n} == kernel["flops"]


def test_no_kernel_is_quicker_than_its_lower_bound(written: Path) -> None:
    kernels = numbers(written)["kernels"]
    assert any(kernel["flops"] for kernel in kernels)
    for kernel in kernels:
        assert 0 < kernel["lower_bound_us"] <= kernel["us"]
        assert 0 <= kernel["padding"] < 1
        assert sum(kernel["parts_us"].values()) == pytest.approx(kernel["us"])
    assert sum(kernel["share"] for kernel in kernels) == pytest.approx(1)


def test_the_same_kernels_give_the_same_bytes(written: Path, tmp_path: Path) -> None:
    assert cli.run(["report", MANIFEST, "--target", "trn1", "-o", str(tmp_path / "a.html")]) == 0
    for name in ("a.html", "a.json", "a.csv"):
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()


def test_measured_times_have_a_column(written: Path, tmp_path: Path) -> None:
    first = numbers(written)["kernels"][0]["id"]
    (tmp_path / "m.csv").write_text(f"kernel,us\n{first},12.5\n")
    words = ["--target", "trn1", "--measured", str(tmp_path / "m.csv"), "-o", str(tmp_path / "b.html")]
    assert cli.run(["report", MANIFEST, *words]) == 0
    (row,) = (row for row in json.loads((tmp_path / "b.json").read_text())["kernels"] if row["id"] == first)
    assert row["measured_us"] == 12.5
    assert "measured, µs" in (tmp_path / "b.html").read_text()
    assert "measured, µs" not in (written / "a.html").read_text()


def test_a_name_that_is_not_a_pages_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", MANIFEST, "-o", str(tmp_path / "a.json")]) == 2
    assert "expected a name that ends in .html" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_calls_of_a_model_have_bars_and_plots(written: Path) -> None:
    covered = {"covered": 1, "ops": 2, "rows": [], "missing": [{"op": "<b>", "id": "x", "why": "none & <none>"}]}
    kernels = [kernel | {"per_token": n, "per_prompt": 0} for n, kernel in enumerate(numbers(written)["kernels"])]
    with_calls = numbers(written) | {
        "kernels": kernels,
        "calls": [call(1024, 1, 10.0, without_kernel=2)],
        "by_cache": [call(n_kv, 1, ms, without_kernel=2) for n_kv, ms in ((256, 8.0), (1024, 10.0))],
        "by_cores": [call(1024, n, 10.0 / n, without_kernel=2) for n in (1, 2, 4)],
        "coverage": [covered],
    }
    text = page(with_calls)
    found = Page(text)
    assert found.open == [] and text.count("<svg") == 4
    assert ">2 of 16 GiB: 1.5 of weights, 0.5 of cache;" in text
    assert "2 nodes have no kernel" in text and "do not fit into the memory of a core" in text
    assert "none &amp; &lt;none&gt;" in text and "<b>" not in text
    for words in PARTS.values():
        assert words in text
    launched, _, other = text.partition("1 kernels for other numbers of tokens or cells")
    assert f'<tr id="{kernels[1]["id"]}"' in launched and f'<tr id="{kernels[0]["id"]}"' in other


def test_numbers_have_at_most_three_digits() -> None:
    shown = [page_text(value) for value in (8_030_261_248.0, 2726.7, 999.6, 68.41, 0.00176, 0.0)]
    assert shown == ["8,030,000,000", "2,730", "1,000", "68.4", "0.00176", "0"]


def test_each_column_is_explained_above_the_table(written: Path) -> None:
    text = (written / "a.html").read_text()
    headings = {heading.partition(", f")[0] for heading in re.findall('<button type="button">(.*?)</button>', text)}
    assert "padding, %" in headings and headings == set(re.findall("<dt>(.*?)</dt>: <dd>.{10}", text))


def test_each_part_of_a_launch_has_words_and_a_color() -> None:
    names = [field.name for field in dataclasses.fields(Time)]
    longest = [Time(**{name: float(name in ("launch", one)) for name in names}) for one in names]
    assert {part for time in longest for part in time.parts} | {"host"} == set(PARTS)
    assert len({plots.color(part) for part in PARTS}) == len(PARTS)


def test_plots_say_in_words_what_they_show() -> None:
    assert plots.line([(1, 2.0)], "x", "y", "one point") is None
    drawn = plots.line([(256, 90.0), (4096, 30.0)], "cells", "tokens", 'A "plot"')
    assert drawn is not None and 'role="img" aria-label="A &#34;plot&#34;"' in drawn
    assert "256 cells: 90 tokens" in drawn and ">100<" in drawn
    assert plots.roofline([], 200.0, {"bf16": 80.0}) is None


def test_peaks_are_below_what_aws_promises_and_published_figures_have_sources() -> None:
    assert 70e6 < peak(chips.of("trn1"), "bf16") < 95e6
    assert peak(chips.of("trn2"), "f32") < peak(chips.of("trn2"), "bf16") / 3
    assert published("trn1") and published("trn2") and published("trn3") == []
    for one in (*published("trn1"), *published("trn2")):
        assert one["source"] and one["ms"] > 0
        # a link names a commit, so that the figure stays where the link leads
        assert one["url"] is None or re.match(r"https://github\.com/[^/]+/[^/]+/blob/[0-9a-f]{40}/.", one["url"])
