"""Compares kernelgen's estimates of programs with neuronx-cc's programs, for the modules of a folder that have a NEFF.

    python3 tools/corpus/estimates.py FOLDER [--all]

The last bit of a module's SHA-256 divides the modules into two halves. The constants of `kernelgen/hlo/estimate.py`
were fitted on those with 0; those with 1 judge the estimates. An estimate is right if it is within a factor of 1.5.
`--all` prints a line for each module.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import survey

from kernelgen.hlo.estimate import ENGINES, Estimate, estimate
from kernelgen.neff import description
from kernelgen.neff.program import NeffProgram, program

FACTOR = 1.5
HALVES = "fitted", "judged"
LARGE = 1000
"""The number of instructions or descriptors from which a program counts as large."""


def pairs(corpus: survey.Corpus) -> Iterator[tuple[survey.Module, NeffProgram, Estimate]]:
    """Yields each compiled module with its program and the estimate."""
    for module in corpus.modules.values():
        for path, data in module.neffs[:1]:
            said = description.describe(data, source=str(path))
            if not said.header.simulated:
                made = program(data, source=str(path))
                yield module, made, estimate(module.data, said.targets[0], len(said.cores))


def share(ratios: Sequence[float]) -> str:
    right = sum(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
    return f"{right} of {len(ratios)}" + (f", {100 * right // len(ratios)} %" if ratios else "")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="print each module")
    arguments = parser.parse_args(argv)
    if not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is not a folder")
    ratios: dict[tuple[str, str], list[float]] = {}
    for module, made, guess in pairs(survey.gather(arguments.folder)):
        half = HALVES[hashlib.sha256(module.data).digest()[-1] & 1]
        ratio = guess.total / made.total
        ratios.setdefault(("instructions", half), []).append(ratio)
        if made.total >= LARGE:
            ratios.setdefault((f"instructions of programs from {LARGE} on", half), []).append(ratio)
        if made.descriptors >= LARGE:
            descriptors = guess.dma_descriptors / made.descriptors
            ratios.setdefault((f"descriptors of programs from {LARGE} on", half), []).append(descriptors)
        if arguments.all:
            engines = " ".join(f"{e} {made.instructions.get(e, 0)}/{guess.instructions[e]}" for e in ENGINES)
            print(
                f"{made.total} {guess.total} {ratio:.2f} {engines} dma {made.descriptors}/{guess.dma_descriptors} {module.path}"
            )
    for (what, half), found in sorted(ratios.items()):
        print(f"{what}, {half}: {share(found)} within a factor of {FACTOR}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
