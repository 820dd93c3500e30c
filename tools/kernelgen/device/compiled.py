"""Checks of neuronx-cc's output: forms that release 2.27 was seen to compile wrong without a message, on trn1 and trn2.

The reference is NumPy, or XLA on the CPU. A mistake is one of the installed SDK; the message gives a workaround.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kernelgen.device.bench import CheckError, CheckKernel, CheckWarning, DeviceBench, MissingKernel, inputs_of, nmse
from kernelgen.device.libnrt import NrtTensor
from kernelgen.device.manifest import DIVISOR, PARTS
from kernelgen.spec.kernel import GraphSpec, Operand

if TYPE_CHECKING:
    import numpy as np

LAYER_TOLERANCE = 1e-4
"""Maximum normalized mean squared error of a layer, against its ops and the CPU: it has a long chain of products."""

SLOWER = 4.0
"""Maximum ratio of the time for one row to the time for two. Others measured 60, in a graph that computes the written rows."""

REPEATS = 5
"""Number of runs. Only the fastest counts, because the first is cold."""


def layer(bench: DeviceBench) -> str:
    """Compares a layer as one program with its ops as separate programs: some mistakes appear only in a graph."""
    import numpy as np

    from kernelgen.hlo import execute

    kernel = bench.group("mul_mat", "swiglu", "mul_mat", "add")
    spec = kernel.spec
    assert isinstance(spec, GraphSpec)
    arrays = inputs_of(kernel)
    bound = bench.bind(kernel, arrays)
    bound.execute()
    places = _op_by_op(bench, spec, arrays)
    worst_ops = worst_cpu = 0.0
    for name, expected in zip(kernel.outputs, execute.run(kernel.hlo, arrays), strict=True):
        by_ops = (
            ("s", int(name.removeprefix("input").split(".")[0]))
            if name.startswith("input")
            else ("n", spec.escaping[int(name.removeprefix("output"))])
        )
        whole, parts = (
            np.frombuffer(bench.nrt.read(t), expected.dtype).reshape(expected.shape)
            for t in (bound.outputs[name], places[by_ops])
        )
        worst_ops, worst_cpu = max(worst_ops, nmse(whole, parts)), max(worst_cpu, nmse(whole, expected))
        if not max(worst_ops, worst_cpu) <= LAYER_TOLERANCE:
            ops_right = nmse(parts, expected) <= LAYER_TOLERANCE
            raise CheckError(
                f"{kernel.name}: {name} has NMSE {nmse(whole, parts):.2g} from what its {len(spec.nodes)} ops compute, and "
                f"{nmse(whole, expected):.2g} from the CPU's; at most {LAYER_TOLERANCE:g}. "
                + (
                    "The ops are right by themselves, so this SDK compiles the graph wrong: build models with --fuse=none, "
                    "or another optlevel or model_type"
                    if ops_right
                    else "The ops are wrong, too: see their checks"
                )
            )
    return f"{len(spec.nodes)} ops in one program: NMSE {worst_ops:.2g} from the ops one by one, {worst_cpu:.2g} from the CPU"


def _op_by_op(
    bench: DeviceBench, spec: GraphSpec, arrays: Sequence[np.ndarray[Any, Any]]
) -> dict[tuple[str, int], NrtTensor]:
    """Executes a group's nodes as separate programs, and returns the memory of slots (`s`) and nodes (`n`) by number."""
    places: dict[tuple[str, int], NrtTensor] = {}
    for i, array in enumerate(arrays):
        places["s", i] = bench.nrt.allocate(array.nbytes)
        bench.nrt.write(places["s", i], array.tobytes())

    def part(operand: Operand, size: int) -> NrtTensor:
        whole = places["s" if operand.place.slot else "n", operand.place.index]
        offset = operand.place.offset
        return whole if (offset, size) == (0, whole.size) else bench.nrt.slice(whole, offset, size)

    by_name = {k.name: k for k in bench.kernels}
    for i, node in enumerate(spec.nodes):
        kernel = by_name.get(node.kernel.id)
        if kernel is None:
            raise MissingKernel(
                f"the bundle lacks the kernel {node.kernel.id} of a node: build the manifest of this version"
            )
        sizes = bench.models[kernel.name].inputs
        operands = [o for o in node.inputs if o is not None]
        inputs = {name: part(o, sizes[name]) for name, o in zip(kernel.inputs, operands, strict=True) if name in sizes}
        (output,) = kernel.outputs
        if 0 in kernel.aliases:
            result = inputs[kernel.inputs[kernel.aliases[0]]]
        else:
            result = places["n", i] = bench.nrt.allocate(bench.models[kernel.name].outputs[output])
        bench.bound(kernel, inputs, {output: result}).execute()
    return places


def rows(bench: DeviceBench) -> str:
    """Reads and writes one row, and two, by index. In the known mistake one row read as 0, and writing it took 60 times as long."""
    import numpy as np

    forms = {}
    for n, size in ((1, "512-f32"), (2, "512x2-f32")):
        kernel = bench.of(f"get_rows-{size}")
        table, numbers = inputs_of(kernel)
        numbers.reshape(-1)[:] = [7, 900][:n]
        _expect(
            bench, kernel, [table, numbers], table[0, 0, [7, 900][:n]].astype(np.float32), f"{_rows(n)} read by number"
        )
    for n in (1, 2):
        kernel = bench.group("mul", "set_rows", rows=n)
        x, scale, numbers, table = inputs_of(kernel)
        numbers.reshape(-1, 2)[:, 0] = [7, 900][:n]
        expected = table.copy()
        expected[0, 0, [7, 900][:n]] = (x * scale)[0, 0]
        forms[n] = _expect(
            bench, kernel, [x, scale, numbers, table], expected, f"{_rows(n)} computed and written by number"
        )
    text = f"one row written in {forms[1] * 1e6:.0f} µs, two in {forms[2] * 1e6:.0f} µs"
    if forms[1] > SLOWER * forms[2]:
        raise CheckWarning(
            f"{text}: one row takes more than {SLOWER:g} times as long. Build for at least two tokens a call (n_tokens: [2, ...]); "
            "the second one writes to a spare row"
        )
    return text


def _rows(n: int) -> str:
    return "one row" if n == 1 else f"{n} rows"


def _expect(
    bench: DeviceBench,
    kernel: CheckKernel,
    arrays: Sequence[np.ndarray[Any, Any]],
    expected: np.ndarray[Any, Any],
    what: str,
    tolerance: float = 1e-6,
    advice: str = "Build for two tokens a call at least, and drop the second",
) -> float:
    """Executes a kernel several times, and returns the time of the fastest run in seconds.

    Raises:
        CheckError: its result is not the expected one.
    """
    import numpy as np

    bound = bench.bind(kernel, arrays)
    times = []
    for _ in range(REPEATS):
        begun = bench.clock()
        bound.execute()
        times.append(bench.clock() - begun)
    (name,) = kernel.outputs
    found = np.frombuffer(bench.nrt.read(bound.outputs[name]), expected.dtype).reshape(-1)
    expected = expected.reshape(-1)
    error = nmse(found, expected)
    if not error <= tolerance:
        wrong = np.flatnonzero(found.astype(np.float64) != expected.astype(np.float64))
        at = int(wrong[0])
        raise CheckError(
            f"{kernel.name}: {what}: {len(wrong)} of {expected.size} elements are wrong, the first {found[at]} in place of "
            f"{expected[at]} (NMSE {error:.2g}). {advice}"
        )
    return min(times)


def division(bench: DeviceBench) -> str:
    """Divides integers by a constant other than a power of two.

    A compiler that divides by a float32 reciprocal gives quotients that are off by one.
    """
    import numpy as np

    kernel = bench.of("probe_divide")
    (like,) = inputs_of(kernel)
    # Multiples of the divisor, and their neighbours.
    x = (np.arange(like.size, dtype=like.dtype) // 3 + 1) * DIVISOR + np.arange(like.size, dtype=like.dtype) % 3 - 1
    advice = (
        "This SDK divides through a float32 reciprocal: emitters must divide by powers of two, or compare with multiples "
        "(kernelgen's own do; the lint warns of others: integer-division)"
    )
    _expect(bench, kernel, [x.reshape(like.shape)], x // DIVISOR, f"integers divided by {DIVISOR}", 0, advice)
    return f"{x.size} integers around multiples of {DIVISOR}"


def rounding(bench: DeviceBench) -> str:
    """Rounds to bfloat16 between elementwise ops: in the known mistake the compiler removed the pair of conversions."""
    import ml_dtypes
    import numpy as np

    kernel = bench.of("probe_round")
    (x,) = inputs_of(kernel)
    expected = (x + np.float32(1)).astype(ml_dtypes.bfloat16).astype(np.float32) * np.float32(3)
    advice = (
        "This SDK folds float32 to bfloat16 and back away: results have more digits than the HLO asks for, which "
        "tests against the CPU see; where rounding is meant, an emitter must round by arithmetic"
    )
    _expect(bench, kernel, [x], expected, "float32 rounded to bfloat16", 1e-9, advice)
    return f"{x.size} elements"


def split(bench: DeviceBench) -> str:
    """Splits the last axis into unequal parts: PyTorch's bridge generated wrong code for it, while slices were right."""
    import numpy as np

    kernel = bench.of("probe_split")
    (x,) = inputs_of(kernel)
    bounds = np.cumsum((0, *PARTS)) * (x.shape[-1] // sum(PARTS))
    pieces = [x[..., a:b] * np.float32(i + 2) for i, (a, b) in enumerate(pairwise(bounds))]
    advice = "This SDK splits an axis wrong: emitters must cut it into equal parts, and join some of them"
    _expect(bench, kernel, [x], np.concatenate(pieces[::-1], -1), "the last axis in unequal parts", 1e-9, advice)
    return f"parts of {', '.join(str(b - a) for a, b in pairwise(bounds))} elements"
