"""Writes docs/results/ops.md and ops-cases.md: the cases of test-backend-ops that the simulated device and other backends support.

    ./bazelw run //tools/llama_cpp:ops_page -- --run FOLDER            after a whole run, which left its CSVs in FOLDER
    ./bazelw run //tools/llama_cpp:ops_page -- --others FOLDER         reads the support of other backends from llama.cpp's docs/ops
    ./bazelw run //tools/llama_cpp:ops_page                            writes the pages from the existing summaries

The pages are written from summaries in docs/results/ops, which are in version control; the run's own CSVs are too large
for that.

    neuron.csv     by op: cases, and their outcomes
    left-out.csv   by op and reason: cases without support
    hlo.csv        by op: kernels, and bytes of their HLO
    backends.csv   by op: whether each other backend supports all, some or none of its cases
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import cases

Table = list[dict[str, str]]

SYMBOLS = {"full": "✅", "partial": "🟡", "none": "❌", "no cases": "–"}

RESULTS = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).parents[2])) / "docs" / "results"

NAMES = ("neuron", "left-out", "hlo", "backends")

_INTRO = """\
# Ops

This page lists the ops of ggml that have kernels, for the cases of llama.cpp's `test-backend-ops`. The device is a NeuronCore that the
[simulator](../reference/simulator.md) computes on the CPU. [A command](../reference/backend-ops-tests.md#a-run-of-all-cases) writes the page from a run of all cases.

The table has the form of llama.cpp's own `docs/ops.md`. The columns of other backends come from the CSVs in that folder of the same source
tree, which their maintainers last wrote when the program had fewer cases. The table counts cases of the mode `support`, which leaves
out cases of several ops that some backends compute as one.

- ✅ all cases of the op
- 🟡 some
- ❌ none
- – the program has no cases of it
"""


def summarize(run: Path) -> dict[str, str]:
    """Returns neuron.csv, left-out.csv and hlo.csv of a whole run.

    Args:
        run: the folder with its support.csv, results.csv and kernels.csv.
    """
    requested: Counter[str] = Counter()
    supported: Counter[str] = Counter()
    for row in read((run / "support.csv").read_text()):
        requested[row["op_name"]] += 1
        supported[row["op_name"]] += row["supported"] == "1"
    counts: dict[str, cases.CaseCount] = {}
    left_out: Counter[tuple[str, str]] = Counter()
    for row in read((run / "results.csv").read_text()):
        count = counts.setdefault(row["op"], cases.CaseCount())
        count.cases += 1
        if row["status"] == cases.UNSUPPORTED:
            left_out[row["op"], row["reason"]] += 1
        else:
            count.supported += 1
            setattr(count, row["status"], getattr(count, row["status"]) + 1)
    sizes: dict[str, list[int]] = {}
    for row in read((run / "kernels.csv").read_text()):
        sizes.setdefault(row["kernel"].partition("-")[0], []).append(int(row["hlo_bytes"]))
    return {
        "neuron": write(
            ["op", "cases", "supported", "tested_cases", "tested_supported", "uncompared", "passed", "failed"],
            [
                (op, requested[op], supported[op], c.cases, c.supported, c.uncompared, c.passed, c.failed)
                for op, c in sorted(counts.items())
            ],
        ),
        "left-out": write(
            ["op", "reason", "cases"],
            [
                (op, reason, n)
                for (op, reason), n in sorted(left_out.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
            ],
        ),
        "hlo": write(
            ["op", "kernels", "median_bytes", "largest_bytes"],
            [(op, len(of), round(statistics.median(of)), max(of)) for op, of in sorted(sizes.items())],
        ),
    }


def summarize_others(folder: Path) -> str:
    """Returns backends.csv from llama.cpp's docs/ops/*.csv, read as its scripts/create_ops_docs.py reads them.

    Raises:
        FileNotFoundError: there are no such files.
    """
    support: dict[str, dict[str, list[bool]]] = {}
    for file in sorted(folder.glob("*.csv")):
        for row in read(file.read_text()):
            if row["test_mode"] == "support":
                backend = support.setdefault(row["backend_reg_name"] or row["backend_name"], {})
                backend.setdefault(row["op_name"], []).append(row["error_message"] == "yes")
    if not support:
        raise FileNotFoundError(f"{folder} has no CSV of test-backend-ops support")
    backends = sorted(support)
    ops = sorted({op for of in support.values() for op in of})
    return write(
        ["op", *backends],
        [(op, *(_status(sum(of := support[b].get(op, [])), len(of)) for b in backends)) for op in ops],
    )


def _status(supported: int, total: int) -> str:
    return "none" if not supported else "full" if supported == total else "partial"


def pages(tables: Mapping[str, Table]) -> dict[str, str]:
    """Returns the pages by their names.

    Args:
        tables: the rows of each summary, by its name.
    """
    return {"ops.md": page(tables), "ops-cases.md": cases_page(tables)}


def _total(tables: Mapping[str, Table]) -> dict[str, int]:
    """Returns the sums of the columns of neuron.csv."""
    return {key: sum(int(row[key]) for row in tables["neuron"]) for key in tables["neuron"][0] if key != "op"}


def page(tables: Mapping[str, Table]) -> str:
    """Returns the page of ops, with other backends.

    Args:
        tables: the rows of each summary, by its name.
    """
    neuron = {row["op"]: row for row in tables["neuron"]}
    others = {row["op"]: row for row in tables["backends"]}
    backends = [name for name in (tables["backends"] or [{}])[0] if name != "op"]
    total = _total(tables)
    lines = [
        _INTRO,
        f"The device supports {total['supported']:,} of {total['cases']:,} cases of this mode, and {total['tested_supported']:,} of "
        f"{total['tested_cases']:,} of the mode `test`, which has the cases of several ops too: {total['passed']:,} passed, "
        f"{total['failed']:,} failed, and {total['uncompared']:,} did not run because llama.cpp's CPU backend cannot compute them. "
        "[Cases](ops-cases.md) has them op by op, what is left out and why, and the size of the kernels.",
        "",
        f"| Operation | NEURON | {' | '.join(backends)} |",
        "|---|" + "---|" * (len(backends) + 1),
    ]
    for op in sorted({op for op, row in neuron.items() if int(row["cases"])} | others.keys()):
        own = neuron.get(op)
        status = _status(int(own["supported"]), int(own["cases"])) if own else "no cases"
        cells = [status, *(others[op][b] if op in others else "none" for b in backends)]
        lines.append(f"| {op} | " + " | ".join(SYMBOLS[cell] for cell in cells) + " |")
    return "\n".join([*lines, ""])


def cases_page(tables: Mapping[str, Table]) -> str:
    """Returns the page of cases: the passed cases of each op, the unsupported cases with reasons, and the size of the kernels.

    Args:
        tables: the rows of each summary, by its name.
    """
    neuron, total = {row["op"]: row for row in tables["neuron"]}, _total(tables)
    lines = [
        "# Cases of ops",
        "",
        "This page lists the cases of llama.cpp's `test-backend-ops` behind the table of [ops](ops.md). That page has the command that writes both.",
        "",
        "## Cases",
        "",
        "The cases of the mode `test`. A name that is not an op means several ops that some backends compute as one.",
        "",
        "| Operation | cases | supported | not comparable | passed | failed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    keys = ("tested_cases", "tested_supported", "uncompared", "passed", "failed")
    lines += [f"| {op} | " + " | ".join(row[key] for key in keys) + " |" for op, row in sorted(neuron.items())]
    lines.append("| **all** | " + " | ".join(str(total[key]) for key in keys) + " |")
    lines += ["", "## Cases left out, and why", ""]
    if tables["left-out"]:
        lines += ["| Operation | cases | reason |", "|---|---:|---|"]
        lines += [f"| {row['op']} | {row['cases']} | {_cell(row['reason'])} |" for row in tables["left-out"]]
    else:
        lines.append("None.")
    lines += [
        "",
        "## Size of the kernels",
        "",
        "Bytes of HLO of the kernels that these cases need.",
        "",
        "| Op | kernels | median | largest |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['op']} | {row['kernels']} | {row['median_bytes']} | {row['largest_bytes']} |" for row in tables["hlo"]
    ]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    """Escapes a text for a cell of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*")


def read(text: str) -> Table:
    """Returns the rows of a CSV with a header."""
    return list(csv.DictReader(io.StringIO(text, newline="")))


def write(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a CSV with a header as text."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def load(folder: Path) -> dict[str, Table]:
    """Returns the summaries in a folder.

    Raises:
        FileNotFoundError: a summary is missing.
    """
    return {name: read((folder / f"{name}.csv").read_text()) for name in NAMES}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="the folder with the CSVs of a whole run of backend_ops"
    )
    parser.add_argument(
        "--others", type=Path, metavar="FOLDER", help="llama.cpp's folder docs/ops, with the other backends' support"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="the folder of the pages, with a folder ops/"
    )
    args = parser.parse_args()
    summaries = summarize(args.run) if args.run else {}
    if args.others:
        summaries["backends"] = summarize_others(args.others)
    (args.results / "ops").mkdir(exist_ok=True)
    for name, text in summaries.items():
        (args.results / "ops" / f"{name}.csv").write_text(text)
    for name, text in pages(load(args.results / "ops")).items():
        (args.results / name).write_text(text)
        print(args.results / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
