"""Common parts of the checks of a NeuronCore: a bundle's kernels, and their binding, execution and comparison on the first core."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgen.device.libnrt import Libnrt, NrtModel, NrtTensor, ScheduledExecution
from kernelgen.hlo import proto
from kernelgen.spec.kernel import GraphSpec, Spec

if TYPE_CHECKING:
    import numpy as np

MAX_WAIT = 60
"""Maximum seconds for queued executions."""

TOLERANCE = 1e-5
"""Maximum normalized mean squared error of a kernel's results: test-backend-ops allows 5e-4 for products."""


class CheckError(Exception):
    """A check failed; the message has the problem and the expectation."""


class MissingKernel(Exception):
    """The bundle lacks a kernel."""


class CheckWarning(Exception):
    """A figure differs from the expected one, but the device works."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of a check.

    Attributes:
        name: the check's name.
        status: `ok`, `warning` if something works but not as expected, `FAILED`, or `skipped` because a check that it needs
            failed.
        text: the result, the problem, or the missing requirement.
        proves: the property that it shows.
    """

    name: str
    status: str
    text: str
    proves: str


@dataclass(frozen=True, slots=True)
class CheckKernel:
    """A kernel of a bundle.

    Attributes:
        name: its id.
        neff: the program.
        hlo: its HLO.
        inputs: NEFF tensor name of each parameter.
        outputs: NEFF tensor name of each result.
        aliases: number of the parameter whose memory holds a result, by the result's number.
        spec: its spec.
        target: the target of its compile.
        lnc: physical cores per logical core of its compile.
    """

    name: str
    neff: bytes
    hlo: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: Mapping[int, int]
    spec: Spec
    target: str
    lnc: int

    @property
    def op(self) -> str:
        """Its op."""
        return self.name.partition("-")[0]


def read_kernels(bundle: Path) -> list[CheckKernel]:
    """Returns the kernels of a bundle in the form of a tree.

    Raises:
        OSError, ValueError, KeyError: it is not a tree.
    """
    index = json.loads((bundle / "index.json").read_text())
    found = []
    for k in index["kernels"]:
        neff, hlo = (bundle / k["neff"]).read_bytes(), (bundle / k["hlo"]).read_bytes()
        found.append(_kernel(k["id"], neff, hlo, Spec.from_json(k["spec"]), index["target"], index["lnc"]))
    return found


def _kernel(name: str, neff: bytes, hlo: bytes, spec: Spec, target: str, lnc: int) -> CheckKernel:
    module = proto.parse(hlo)
    entry = proto.entry(module)
    root = next(i for i in entry.instructions if i.id == entry.root_id)

    def attribute(instruction: Any, key: str) -> str:
        return next(str(a.value) for a in instruction.frontend_attributes.map if a.key == key)

    inputs = tuple(attribute(p, proto.INPUT_NAMES) for p in proto.parameters(entry))
    entries = module.input_output_alias.entries
    aliases = {(e.output_shape_index[0] if e.output_shape_index else 0): e.parameter_number for e in entries}
    return CheckKernel(
        name, neff, hlo, inputs, tuple(attribute(root, proto.OUTPUT_NAMES).split(",")), aliases, spec, target, lnc
    )


class DeviceBench:
    """The library, the kernels, and the loaded programs.

    Args:
        libnrt: the library's file.
        bundle: the tree with the kernels.

    Attributes:
        kernels: the kernels for one core.
        sum: the kernel for several cores; each of them loads it.
        cores: number of cores of the process.
        models: the loaded programs, by the kernel's name.
        taken: bytes of the core's memory that loading took.
    """

    def __init__(self, libnrt: Path, bundle: Path) -> None:
        self.path, self.bundle = libnrt, bundle
        found = read_kernels(bundle)
        self.kernels = [kernel for kernel in found if kernel.op != "all_reduce"]
        self.sum = next((kernel for kernel in found if kernel.op == "all_reduce"), None)
        self.cores = 0
        self.nrt: Libnrt
        self.models: dict[str, NrtModel] = {}
        self.taken: dict[str, int] = {}

    def of(self, what: str) -> CheckKernel:
        """Returns the first kernel whose id starts with a text: an op, or an op and the shape of its result.

        Raises:
            MissingKernel: there is none.
        """
        return self._first(lambda k: k.name.startswith(f"{what}-"), what)

    def group(self, *ops: str, rows: int | None = None) -> CheckKernel:
        """Returns the first group whose last nodes have these ops, and whose first node's result has `rows` rows, if given.

        Raises:
            MissingKernel: there is none.
        """
        return self._first(
            lambda k: (
                isinstance(k.spec, GraphSpec)
                and tuple(n.op for n in k.spec.nodes[-len(ops) :]) == ops
                and rows in (None, k.spec.nodes[0].output.ne[1])
            ),
            f"group that ends with {', '.join(ops)}",
        )

    def _first(self, fits: Callable[[CheckKernel], bool], what: str) -> CheckKernel:
        found = next((k for k in self.kernels if fits(k)), None)
        if found is None:
            raise MissingKernel(
                f"the bundle lacks the kernel {what}: build the manifest of this version (docs/reference/device-checks.md)"
            )
        return found

    def clock(self) -> float:
        """Returns seconds: of the machine's clock, or on the simulator the modelled device time of executions."""
        modelled = self.nrt.simulated_ns()
        return time.perf_counter() if modelled is None else modelled / 1e9

    def bind(self, kernel: CheckKernel, arrays: Sequence[np.ndarray[Any, Any]]) -> BoundKernel:
        """Returns a loaded kernel with new tensors; its inputs hold the given arrays."""
        inputs = {}
        for name, array in zip(kernel.inputs, arrays, strict=True):
            inputs[name] = self.nrt.allocate(array.nbytes)
            self.nrt.write(inputs[name], array.tobytes())
        outputs = {}
        for i, name in enumerate(kernel.outputs):
            shared = kernel.aliases.get(i)
            size = self.models[kernel.name].outputs[name]
            outputs[name] = self.nrt.allocate(size) if shared is None else inputs[kernel.inputs[shared]]
        return self.bound(kernel, inputs, outputs)

    def bound(
        self, kernel: CheckKernel, inputs: Mapping[str, NrtTensor], outputs: Mapping[str, NrtTensor]
    ) -> BoundKernel:
        """Returns a loaded kernel with the given tensors, and with new ones for outputs of the compiler's own."""
        model = self.models[kernel.name]
        used = {name: tensor for name, tensor in inputs.items() if name in model.inputs}
        spare = {name: self.nrt.allocate(size) for name, size in model.outputs.items() if name not in outputs}
        sets = self.nrt.tensor_set(used), self.nrt.tensor_set({**outputs, **spare})
        return BoundKernel(dict(inputs), dict(outputs), lambda: self.nrt.execute(model, *sets), model, sets)

    def wait(self, queued: Sequence[ScheduledExecution]) -> None:
        """Waits until queued executions are done, in order.

        Raises:
            CheckError: they take longer than `MAX_WAIT`, or the last one is done before an earlier one.
        """
        until = time.monotonic() + MAX_WAIT
        while not self.nrt.is_completed(queued[-1]):
            if time.monotonic() > until:
                raise CheckError(f"{len(queued)} executions that were queued are not done after {MAX_WAIT} s")
        for i, one in enumerate(queued):
            if not self.nrt.is_completed(one):
                raise CheckError(f"execution {i + 1} of {len(queued)} is not done, and the last one is")

    def compare(self, kernel: CheckKernel, arrays: Sequence[np.ndarray[Any, Any]], bound: BoundKernel) -> float:
        """Returns the largest error of a result.

        Raises:
            CheckError: it is too large.
        """
        import numpy as np

        from kernelgen.hlo import execute

        worst = 0.0
        for name, expected in zip(kernel.outputs, execute.run(kernel.hlo, arrays), strict=True):
            actual = np.frombuffer(self.nrt.read(bound.outputs[name]), expected.dtype).reshape(expected.shape)
            error = nmse(actual, expected)
            if not error <= TOLERANCE:
                raise CheckError(
                    f"{kernel.name}: {name} differs from the CPU's: NMSE {error:.2g}, at most {TOLERANCE:g}"
                )
            worst = max(worst, error)
        return worst


def nmse(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Returns the normalized mean squared error."""
    import numpy as np

    a, e = actual.astype(np.float64), expected.astype(np.float64)
    return float(np.square(a - e).sum() / max(float(np.square(e).sum()), 1e-30))


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """A kernel with its tensors."""

    inputs: dict[str, NrtTensor]
    outputs: dict[str, NrtTensor]
    execute: Callable[[], None]
    model: NrtModel
    sets: tuple[Any, Any]


def inputs_of(kernel: CheckKernel) -> list[np.ndarray[Any, Any]]:
    """Returns values for a kernel's inputs, the same each time: normal floats (smaller for a group's matrices, so that its values
    stay near 1), ascending positions and row numbers, and blocks of quantized weights with finite scales.
    """
    import ml_dtypes
    import numpy as np

    from kernelgen.hlo import execute

    random = np.random.default_rng(1)
    found = []
    for _, dtype, shape in execute.parameters(kernel.hlo):
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        if dtype == "uint8":
            # Bytes below 60: as halves of a float16 they are finite and positive.
            found.append(random.integers(0, 60, shape, dtype=np.uint8))
        elif kind.kind in "iu":
            # I64 arrives as pairs of words, low word first.
            numbers = np.zeros(shape, kind)
            words = numbers.reshape(-1, 2)[:, 0] if len(shape) == 5 else numbers.reshape(-1)
            words[:] = np.arange(len(words))
            found.append(numbers)
        else:
            values = random.standard_normal(shape, dtype=np.float32)
            if isinstance(kernel.spec, GraphSpec) and shape[-2] > 1:
                values /= np.float32(np.sqrt(shape[-1]))
            found.append(values.astype(kind))
    return found
