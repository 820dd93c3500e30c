"""Checks of a NeuronCore through libnrt, in the order of a first hour on a device: each says what it found, or what is wrong.

Kernels are compared with what XLA computes from the same HLO on the CPU. Everything is done on the process's first core. A check
that fails keeps those that need it from being made, and no other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgen.device.libnrt import Libnrt, NrtModel, NrtTensor, StatusError
from kernelgen.hlo import proto
from kernelgen.targets import TARGETS

if TYPE_CHECKING:
    import numpy as np

_DOCUMENTED = ", ".join(target.name for target in TARGETS.values() if not target.experimental)

MANIFEST = f"""\
# What `kernelgen doctor --device` executes: a small kernel of each family.
format: 1
name: doctor
targets: [{_DOCUMENTED}]
kernels:
  - {{op: add, inputs: ["(256,4,1,1)/f32", "(256,4,1,1)/f32"], output: "(256,4,1,1)/f32"}}
  - {{op: mul_mat, inputs: ["(256,128,1,1)/f16", "(256,4,1,1)/f32"], output: "(128,4,1,1)/f32"}}
  - {{op: mul_mat, inputs: ["(256,128,1,1)/q8_0", "(256,4,1,1)/f32"], output: "(128,4,1,1)/f32"}}
  - {{op: rms_norm, inputs: ["(256,4,1,1)/f32"], output: "(256,4,1,1)/f32", params: {{eps: 1.0e-5}}}}
  - op: rope
    inputs: ["(64,4,4,1)/f32", "(4,1,1,1)/i32"]
    output: "(64,4,4,1)/f32"
    params: {{n_ctx_orig: 256, n_dims: 64}}
  - {{op: swiglu, inputs: ["(256,4,1,1)/f32", "(256,4,1,1)/f32"], output: "(256,4,1,1)/f32"}}
  - {{op: get_rows, inputs: ["(256,64,1,1)/f16", "(4,1,1,1)/i32"], output: "(256,4,1,1)/f32"}}
  - {{op: set_rows, inputs: ["(256,4,1,1)/f32", "(4,1,1,1)/i64", "(256,64,1,1)/f16"], output: "(256,64,1,1)/f16"}}
  - op: flash_attn_ext
    inputs:
      - "(64,4,4,1)/f32/(4,1024,256,4096)"
      - "(64,256,2,1)/f16/(2,256,128,65536)"
      - "(64,256,2,1)/f16/(2,256,128,65536)"
      - "(256,4,1,1)/f16"
    output: "(64,4,4,1)/f32"
    params: {{prec: 10, scale: 0.125}}
"""

TOLERANCE = 1e-5
"""Normalized mean squared error of a kernel's results at most: test-backend-ops allows 5e-4 for products."""

MAX_LAUNCH_US = 5000.0
"""Of a small kernel: others measured 10 to 300 µs a call (docs/first-run-on-hardware.md)."""

LAUNCHES = 200
COPY_BYTES = 64 << 20
ALIGNMENT = 512
ELEMENT = 4
"""Bytes of an element of the kernel that slices are tried with."""
IN_FLIGHT = 3
MAX_WAIT = 60
"""Seconds."""


class CheckError(Exception):
    """What a check found wrong, and what it expected."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What became of a check.

    Attributes:
        name: the check's.
        status: `ok`, `FAILED`, or `skipped` because one that it needs failed.
        text: what was found, what is wrong, or what it needs.
        proves: what it shows.
    """

    name: str
    status: str
    text: str
    proves: str


@dataclass(frozen=True, slots=True)
class CheckKernel:
    """A kernel as a bundle has it.

    Attributes:
        name: its id.
        neff: the program.
        hlo: what it computes.
        inputs: the NEFF's name of each parameter.
        outputs: of each result.
        aliases: the parameter whose memory a result is written to, by the result's number.
    """

    name: str
    neff: bytes
    hlo: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: Mapping[int, int]

    @property
    def op(self) -> str:
        """Its op."""
        return self.name.partition("-")[0]


def read_kernels(bundle: Path) -> list[CheckKernel]:
    """Returns the kernels of a bundle in the form of a tree."""
    return [
        _kernel(path.stem, path.read_bytes(), (bundle / "generic" / "hlo" / f"{path.stem}.hlo.pb").read_bytes())
        for path in sorted(bundle.glob("*/neff/*.neff"))
    ]


def _kernel(name: str, neff: bytes, hlo: bytes) -> CheckKernel:
    module = proto.parse(hlo)
    entry = proto.entry(module)
    root = next(i for i in entry.instructions if i.id == entry.root_id)

    def attribute(instruction: Any, key: str) -> str:
        return next(str(a.value) for a in instruction.frontend_attributes.map if a.key == key)

    inputs = tuple(attribute(p, proto.INPUT_NAMES) for p in proto.parameters(entry))
    entries = module.input_output_alias.entries
    aliases = {(e.output_shape_index[0] if e.output_shape_index else 0): e.parameter_number for e in entries}
    return CheckKernel(name, neff, hlo, inputs, tuple(attribute(root, proto.OUTPUT_NAMES).split(",")), aliases)


class Bench:
    """What the checks share.

    Args:
        libnrt: the library's file.
        kernels: what is executed; one of them adds, and one writes in place.
    """

    def __init__(self, libnrt: Path, kernels: list[CheckKernel]) -> None:
        self.path, self.kernels = libnrt, kernels
        self.nrt: Libnrt
        self.models: dict[str, NrtModel] = {}

    def run_all(self) -> Iterator[CheckResult]:
        """Yields the result of each check, in order."""
        checks: list[tuple[str, str, Callable[[], str], str]] = [
            ("library", "libnrt can be loaded and has the functions", self._open, ""),
            ("init", "the process gets NeuronCores", self._init, "library"),
            ("load", "NEFFs of every family are accepted, and keep their tensors' names", self._load, "init"),
            *((f"execute {k.name}", "results are those of the CPU", self._executing(k), "load") for k in self.kernels),
            ("synchronous", "results are there when nrt_execute returns", self._synchronous, "load"),
            ("in place", "a result is written to the memory of an input that it shares", self._in_place, "load"),
            ("slices", "kernels work on parts of a buffer", lambda: self._slices(ALIGNMENT), "load"),
            ("odd slices", "and on parts that begin at any element", lambda: self._slices(ELEMENT), "load"),
            (
                "asynchronous",
                "executions are queued, done in order, and their statuses told",
                self._asynchronous,
                "load",
            ),
            ("copies", "copies on the device, and between it and the host", self._copies, "init"),
            ("latency", "what a launch costs", self._latency, "load"),
        ]
        done: dict[str, str] = {}
        for name, proves, check, needs in checks:
            if needs and done[needs] != "ok":
                result = CheckResult(name, "skipped", f"needs: {needs}", proves)
            else:
                try:
                    result = CheckResult(name, "ok", check(), proves)
                except (CheckError, StatusError, OSError, AttributeError) as error:
                    result = CheckResult(name, "FAILED", str(error), proves)
            done[name] = result.status
            yield result
        if done.get("init") == "ok":
            self.nrt.close()

    def _open(self) -> str:
        self.nrt = Libnrt(self.path)
        return f"{self.path}, version {self.nrt.version()}"

    def _init(self) -> str:
        begun = time.perf_counter()
        cores = self.nrt.init()
        return f"{cores} cores, in {time.perf_counter() - begun:.1f} s"

    def _load(self) -> str:
        begun = time.perf_counter()
        for kernel in self.kernels:
            model = self.nrt.load(kernel.neff)
            odd = (model.inputs.keys() - set(kernel.inputs)) | (model.outputs.keys() ^ set(kernel.outputs))
            if odd:
                raise CheckError(f"{kernel.name}: its tensors are not those of its HLO: {', '.join(sorted(odd))}")
            self.models[kernel.name] = model
        dropped = sum(len(k.inputs) - len(self.models[k.name].inputs) for k in self.kernels)
        return f"{len(self.kernels)} programs in {time.perf_counter() - begun:.1f} s; {dropped} unused inputs were left out"

    def _bind(self, kernel: CheckKernel, arrays: list[np.ndarray[Any, Any]]) -> _Bound:
        inputs = {}
        for name, array in zip(kernel.inputs, arrays, strict=True):
            inputs[name] = self.nrt.allocate(array.nbytes)
            self.nrt.write(inputs[name], array.tobytes())
        outputs = {}
        for i, name in enumerate(kernel.outputs):
            shared = kernel.aliases.get(i)
            size = self.models[kernel.name].outputs[name]
            outputs[name] = self.nrt.allocate(size) if shared is None else inputs[kernel.inputs[shared]]
        return self._bound(kernel, inputs, outputs)

    def _bound(self, kernel: CheckKernel, inputs: dict[str, NrtTensor], outputs: dict[str, NrtTensor]) -> _Bound:
        model = self.models[kernel.name]
        used = {name: tensor for name, tensor in inputs.items() if name in model.inputs}
        sets = self.nrt.tensor_set(used), self.nrt.tensor_set(outputs)
        return _Bound(inputs, outputs, lambda: self.nrt.execute(model, *sets), model, sets)

    def _executing(self, kernel: CheckKernel) -> Callable[[], str]:
        def check() -> str:
            arrays = inputs_of(kernel)
            bound = self._bind(kernel, arrays)
            bound.execute()
            return f"NMSE {self._compare(kernel, arrays, bound):.2g}"

        return check

    def _compare(self, kernel: CheckKernel, arrays: list[np.ndarray[Any, Any]], bound: _Bound) -> float:
        """Returns the largest error of a result.

        Raises:
            CheckError: it is too large.
        """
        import numpy as np

        from kernelgen.hlo import execute

        worst = 0.0
        for name, expected in zip(kernel.outputs, execute.run(kernel.hlo, arrays), strict=True):
            actual = np.frombuffer(self.nrt.read(bound.outputs[name]), expected.dtype).reshape(expected.shape)
            a, e = actual.astype(np.float64), expected.astype(np.float64)
            error = float(np.square(a - e).sum() / max(float(np.square(e).sum()), 1e-30))
            if not error <= TOLERANCE:
                raise CheckError(
                    f"{kernel.name}: {name} differs from the CPU's: NMSE {error:.2g}, at most {TOLERANCE:g}"
                )
            worst = max(worst, error)
        return worst

    def _of(self, op: str) -> CheckKernel:
        return next(k for k in self.kernels if k.op == op)

    def _synchronous(self) -> str:
        kernel = self._of("add")
        arrays = inputs_of(kernel)
        bound = self._bind(kernel, arrays)
        for i in range(20):
            arrays[0] = arrays[0] + 1
            self.nrt.write(bound.inputs[kernel.inputs[0]], arrays[0].tobytes())
            bound.execute()
            try:
                self._compare(kernel, arrays, bound)
            except CheckError as error:
                raise CheckError(
                    f"execution {i + 1} of 20: the result was not there when it was read: {error}"
                ) from None
        return "20 results, each read as soon as nrt_execute returned"

    def _in_place(self) -> str:
        kernel = self._of("set_rows")
        arrays = inputs_of(kernel)
        bound = self._bind(kernel, arrays)
        (shared,) = kernel.aliases.values()
        before = self.nrt.read(bound.inputs[kernel.inputs[shared]])
        bound.execute()
        if self.nrt.read(bound.inputs[kernel.inputs[shared]]) == before:
            raise CheckError(f"{kernel.name}: the memory that input and result share is as it was before")
        return f"NMSE {self._compare(kernel, arrays, bound):.2g}"

    def _slices(self, alignment: int) -> str:
        kernel = self._of("add")
        arrays = inputs_of(kernel)
        size = arrays[0].nbytes
        step = -(-size // alignment) * alignment + alignment
        whole = self.nrt.allocate(4 * step)
        parts = [self.nrt.slice(whole, alignment + i * step, size) for i in range(3)]
        inputs = dict(zip(kernel.inputs, parts, strict=False))
        for name, array in zip(kernel.inputs, arrays, strict=True):
            self.nrt.write(inputs[name], array.tobytes())
        data = self.nrt.read(whole)
        for i, array in enumerate(arrays):
            at = alignment + i * step
            if data[at : at + size] != array.tobytes():
                raise CheckError(f"what is written to a slice at {at} is not there in the buffer")
        bound = self._bound(kernel, inputs, {kernel.outputs[0]: parts[2]})
        bound.execute()
        return f"three of {size} bytes at multiples of {alignment}; NMSE {self._compare(kernel, arrays, bound):.2g}"

    def _asynchronous(self) -> str:
        if not self.nrt.has_queues():
            return "the runtime has no nrta_* as SDK 2.29 has them: nrt_execute is used"
        kernel = self._of("set_rows")  # in place: each execution needs what the one before left
        arrays = inputs_of(kernel)
        bound = self._bind(kernel, arrays)
        queued = [self.nrt.schedule(bound.model, *bound.sets) for _ in range(IN_FLIGHT)]
        until = time.monotonic() + MAX_WAIT
        while not self.nrt.is_completed(queued[-1]):
            if time.monotonic() > until:
                raise CheckError(f"{IN_FLIGHT} executions that were queued are not done after {MAX_WAIT} s")
        for i, one in enumerate(queued):
            if not self.nrt.is_completed(one):
                raise CheckError(f"execution {i + 1} of {IN_FLIGHT} is not done, and the last one is")
        return f"{IN_FLIGHT} executions in flight; NMSE {self._compare(kernel, arrays, bound):.2g}"

    def _copies(self) -> str:
        data = bytes(range(256)) * (COPY_BYTES // 256)
        first, second = self.nrt.allocate(COPY_BYTES), self.nrt.allocate(COPY_BYTES)

        def rate(action: Callable[[], object]) -> float:
            begun = time.perf_counter()
            action()
            return COPY_BYTES / (time.perf_counter() - begun) / 1e9

        write = rate(lambda: self.nrt.write(first, data))
        copy = rate(lambda: self.nrt.copy(first, second))
        read = rate(lambda: self.nrt.read(second))
        if self.nrt.read(second) != data:
            raise CheckError(f"{COPY_BYTES} bytes that were written, copied on the device and read again are others")
        self.nrt.free(first)
        self.nrt.free(second)
        return f"{COPY_BYTES >> 20} MiB: to the device {write:.2f} GB/s, on it {copy:.2f} GB/s, from it {read:.2f} GB/s"

    def _latency(self) -> str:
        kernel = self._of("add")
        bound = self._bind(kernel, inputs_of(kernel))
        bound.execute()  # the first one takes longer
        times = []
        for _ in range(LAUNCHES):
            begun = time.perf_counter()
            bound.execute()
            times.append((time.perf_counter() - begun) * 1e6)
        median = statistics.median(times)
        text = f"{median:.0f} µs a launch (median of {LAUNCHES}; {min(times):.0f} to {max(times):.0f})"
        if median > MAX_LAUNCH_US:
            raise CheckError(f"{text}; expected at most {MAX_LAUNCH_US:.0f}: a token takes hundreds of launches")
        return text


@dataclass(frozen=True, slots=True)
class _Bound:
    """A kernel with its tensors."""

    inputs: dict[str, NrtTensor]
    outputs: dict[str, NrtTensor]
    execute: Callable[[], None]
    model: NrtModel
    sets: tuple[Any, Any]


def inputs_of(kernel: CheckKernel) -> list[np.ndarray[Any, Any]]:
    """Returns values for a kernel's inputs, the same each time: floats normal, positions and row numbers ascending, blocks of
    quantized weights with scales that are numbers.
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
            # I64 arrives as pairs of words, the lower one first.
            numbers = np.zeros(shape, kind)
            words = numbers.reshape(-1, 2)[:, 0] if len(shape) == 5 else numbers.reshape(-1)
            words[:] = np.arange(len(words))
            found.append(numbers)
        else:
            found.append(random.standard_normal(shape, dtype=np.float32).astype(kind))
    return found
