"""Builds and runs groups of cases, one after another: `backend_ops.py` starts as many of these processes as there are CPUs.

A group has a folder: `kernels/` with its pack, and `result.json`, which also has the digests of what both depend on. A
pack is reused if no entry, emitter or part of kernelgen has changed since. A result is reused if the pack, the
programs, the simulator and the cases are the same. Digests decide, not the files' times.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import cases
import harness
import worker_pool
from kernel_builder import BuiltGroup, KernelBuilder
from work_folder import COMPILED, digest, locked, programs_digest

from kernelgen import fileio

TIMEOUT = 3600.0
"""The timeout for the cases of a group, in seconds."""

MOST_CRASHES = 8
"""How often a group is restarted after a case that ended the program."""


@dataclass
class GroupResult:
    """The outcome of a group.

    Attributes:
        built: the outcome of its nodes.
        outcome: the outcome of its cases.
        seconds: the duration of both.
        reused: whether the outcome is from an earlier run.
    """

    built: BuiltGroup
    outcome: cases.TestResults
    seconds: float
    reused: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> GroupResult:
        outcome = value["outcome"]
        results = [cases.Result(**result) for result in outcome["results"]]
        return GroupResult(
            BuiltGroup(**value["built"]),
            cases.TestResults(results, outcome["failures"], outcome["ran"]),
            value["seconds"],
            value["reused"],
        )


class CaseRunner:
    """Builds and runs groups.

    Args:
        programs: the programs to run.
        work: the folder with the groups' folders.
        threads: the number of threads that a program may use.
        languages: the languages that may compute the kernels, as in `KernelBuilder`.
    """

    def __init__(self, programs: harness.Programs, work: Path, threads: int, languages: Sequence[str] = ()) -> None:
        self.programs = programs
        self.work = work
        self.threads = threads
        self.builder = KernelBuilder(languages)
        self.depends = programs_digest(programs)

    def do(self, group: cases.Group, progress: harness.Progress) -> GroupResult:
        """Returns the outcome of a group, from an earlier run if nothing that it depends on has changed."""
        begun = time.monotonic()
        folder = self.work / group.name
        with locked(folder):
            entries = sorted({node for node, reason in group.nodes if reason is None})
            built, pack = self.builder.build(entries, folder, progress)
            key = digest(self.builder.source, self.depends, pack, built.refused, built.failed, group.to_json())
            result = folder / "result.json"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                before = json.loads(result.read_text())
                if before["key"] == key:
                    done = GroupResult.from_json(before["done"])
                    done.reused = True
                    return done
            outcome = self.run(group, folder / "kernels", progress)
            self._explain(group, built, outcome)
            done = GroupResult(built, outcome, round(time.monotonic() - begun, 1))
            fileio.write_bytes(result, json.dumps({"key": key, "done": done.to_json()}).encode())
            return done

    def run(self, group: cases.Group, kernels: Path, progress: harness.Progress) -> cases.TestResults:
        """Runs the cases; after a case that ends the program, it continues with the next case."""
        if not list(kernels.glob("*.gguf")):
            kernels = harness.odd_kernel(self.work / "no-kernels")
        environment = self.programs.environment(kernels=kernels, log=True) | {
            "NEURON_SIMULATOR_CACHE": str(self.work.parent / COMPILED),
            "NEURON_SIMULATOR_THREADS": str(self.threads),
            "OMP_THREAD_LIMIT": str(self.threads),
        }
        outcome = cases.TestResults()
        waiting = dict(group.cases)
        for _ in range(MOST_CRASHES):
            done = group.size - sum(waiting.values())

            def count(rows: int, before: int = done) -> None:
                progress("running", before + rows)

            ended = cases.run(
                self.programs,
                "test",
                environment,
                chosen=list(waiting),
                timeout=TIMEOUT,
                each=count,
            )
            for row in ended.rows:
                if not waiting.get(row.case):
                    continue  # the program has this case more than once, and it ran before the crash
                waiting[row.case] -= 1
                if not waiting[row.case]:
                    del waiting[row.case]
                note = (row.note or row.error) if row.supported else ""
                outcome.results.append(cases.Result(row.case, row.status, row.seconds, note))
            nodes = harness.ran(ended.log)
            outcome.ran += nodes["device"].total()
            if fallen_back := nodes["cpu"]:
                said = [line for line in ended.log.splitlines() if "nrt_" in line]
                outcome.failures.append(
                    f"{group.name}: the backend ran ops on the CPU: {dict(fallen_back)}; {'; '.join(said[:5])}"
                )
            if not waiting:
                if ended.status not in (0, 1):
                    outcome.failures.append(f"{group.name}: exit status {ended.status} at the end: {_tail(ended)}")
                elif ended.status == 1 and not outcome.of(cases.FAILED):
                    outcome.failures.append(f"{group.name}: exit status 1 with no failed case: {_tail(ended)}")
                return outcome
            # The program runs the cases in its own order, which is also the groups' order.
            culprit = next(case for case in group.cases if case in waiting)
            how = "took too long" if ended.status is None else f"ended the program, exit status {ended.status}"
            for _ in range(waiting.pop(culprit)):
                outcome.results.append(cases.Result(culprit, cases.FAILED, 0.0, f"{how}: {_tail(ended)}"))
            if not waiting:
                return outcome
        for case, count in waiting.items():
            outcome.results += [
                cases.Result(case, cases.FAILED, 0.0, "not run: too many others ended the program")
            ] * count
        return outcome

    @staticmethod
    def _explain(group: cases.Group, built: BuiltGroup, outcome: cases.TestResults) -> None:
        """Notes at each unsupported case which of its nodes has no kernel, and why."""
        for result in outcome.of(cases.UNSUPPORTED):
            reasons: dict[str, None] = {}
            for number in group.asks[result.case]:
                node, reason = group.nodes[number]
                op = re.match(r'\{op: "(\w+)"', node)
                reason = reason or built.refused.get(node)
                if reason:
                    reasons[f"{op[1].upper() if op else node}: {harness.generalize(reason)}"] = None
            result.note = "; ".join(reasons) or "a kernel was not built"


def _tail(ended: cases.ProgramExit) -> str:
    return "\n".join(ended.log.splitlines()[-12:])[-2000:]


def _ops(setup: dict[str, Any]) -> Callable[[Any, harness.Progress], Any]:
    runner = CaseRunner(harness.Programs.find(), Path(setup["work"]), setup["threads"], setup["languages"])
    return lambda request, progress: runner.do(cases.Group.from_json(request), progress).to_json()


if __name__ == "__main__":
    worker_pool.serve(_ops)
