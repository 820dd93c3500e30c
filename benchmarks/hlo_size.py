"""Prints the size of each op's HLO: bytes, constants, instructions, computations and loops.

    ./bazelw run //benchmarks:hlo_size -- [OP…]

It takes the example of every op (tests/kernels/reference) in the first types for which the op is registered, or with
--every-type in all of them. It prints the bytes of the canonical module, the bytes of its constants, and the numbers of
its instructions, computations and loops.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))

from harness import LIBRARY, combinations, emit, example_kernel

from kernelgen.hlo import describe, proto


@dataclass(frozen=True)
class Size:
    """The size of one op.

    Attributes:
        op: its name, with the types of its inputs if each combination is measured.
        bytes: the bytes of the module.
        constants: the bytes of its literals.
        instructions: the instructions of all computations.
        computations: the number of computations.
        loops: the number of while loops.
    """

    op: str
    bytes: int
    constants: int
    instructions: int
    computations: int
    loops: int


def measure(op: str, types: tuple[str, ...], name: str) -> Size:
    """Returns the size of an op's example with inputs of these types."""
    module = emit(example_kernel(op, types))
    description = describe.describe(module)
    opcodes = dict(description.opcodes)
    message = proto.parse(module)
    literals = [i.literal for c in message.computations for i in c.instructions if i.opcode == "constant"]
    return Size(
        name,
        len(module),
        sum(literal.ByteSize() for literal in literals),
        sum(opcodes.values()),
        description.computations,
        opcodes.get("while", 0),
    )


def table(sizes: Iterable[Size]) -> str:
    rows = [("op", "bytes", "constants", "instructions", "computations", "loops"), *map(astuple, sizes)]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{row[0]:<{width}}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="the ops to measure; every op by default")
    parser.add_argument("--sort", choices=("op", "bytes", "instructions"), default="bytes", help="default: %(default)s")
    parser.add_argument(
        "--every-type", action="store_true", help="measure every combination of types in which an op is tested"
    )
    args = parser.parse_args()
    known = LIBRARY.scan()
    if unknown := [op for op in args.ops if op not in known]:
        parser.error(f"no emitter computes {', '.join(unknown)}")
    sizes = []
    for op in args.ops or known:
        found = combinations(op)
        for types in found if args.every_type else found[:1]:
            sizes.append(measure(op, types, " ".join([op, *types]) if args.every_type else op))
    print(table(sorted(sizes, key=lambda s: (s.op if args.sort == "op" else -getattr(s, args.sort), s.op))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
