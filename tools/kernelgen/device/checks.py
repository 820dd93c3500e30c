"""Checks of a NeuronCore through libnrt, in the order for a new device: each reports its result or the problem.

The reference for kernels is XLA's result for the same HLO on the CPU. All checks except sums over cores run on the process's first
core. A failed check skips only the checks that need it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from kernelgen.device import collectives, compiled, measured
from kernelgen.device.bench import (
    CheckError,
    CheckKernel,
    CheckResult,
    CheckWarning,
    DeviceBench,
    MissingKernel,
    inputs_of,
    read_kernels,
)
from kernelgen.device.libnrt import Libnrt, StatusError
from kernelgen.device.manifest import KERNELS, MANIFEST
from kernelgen.spec.kernel import GraphSpec
from kernelgen.targets import TARGETS

__all__ = ["KERNELS", "MANIFEST", "Bench", "CheckResult", "read_kernels"]

MAX_LAUNCH_US = 5000.0
"""Maximum launch time of a small kernel, in µs: others measured 10 to 300 µs a call (docs/reference/device-checks.md)."""

LAUNCHES = 200
COPY_BYTES = 64 << 20
ALIGNMENT = 512
ELEMENT = 4
"""Bytes per element of the kernel that the check of slices uses."""
IN_FLIGHT = 3


class Bench(DeviceBench):
    """All checks."""

    def run_all(self) -> Iterator[CheckResult]:
        """Yields the result of each check, in order."""
        # Groups and probes of miscompiles have their own checks.
        ops = [k for k in self.kernels if not (isinstance(k.spec, GraphSpec) or k.op.startswith("probe_"))]
        checks: list[tuple[str, str, Callable[[], str], str]] = [
            ("library", "libnrt can be loaded and has the functions", self._open, ""),
            ("init", "the process gets NeuronCores", self._init, "library"),
            ("load", "NEFFs of every family are accepted, and keep their tensors' names", self._load, "init"),
            *((f"execute {k.name}", "results equal those of the CPU", self._executing(k), "load") for k in ops),
            ("synchronous", "results are complete when nrt_execute returns", self._synchronous, "load"),
            ("in place", "a result is written to the memory of an input that it shares", self._in_place, "load"),
            ("slices", "kernels work on parts of a buffer", lambda: self._slices(ALIGNMENT), "load"),
            ("odd slices", "kernels work on parts that begin at any element", lambda: self._slices(ELEMENT), "load"),
            (
                "asynchronous",
                "executions are queued, run in order, and report their statuses",
                self._asynchronous,
                "load",
            ),
            ("copies", "copies on the device, and between it and the host", self._copies, "init"),
            ("latency", "the time of a launch", self._latency, "load"),
            ("layer", "a program of a whole layer computes what its ops do", lambda: compiled.layer(self), "load"),
            ("rows", "one row is read and written as two are", lambda: compiled.rows(self), "load"),
            ("division", "integers are divided exactly", lambda: compiled.division(self), "load"),
            ("rounding", "a conversion to bfloat16 and back rounds", lambda: compiled.rounding(self), "load"),
            ("split", "an axis is split into unequal parts", lambda: compiled.split(self), "load"),
            (
                "launch",
                "the time of a queued launch, and of one that is waited for",
                lambda: measured.launch(self),
                "asynchronous",
            ),
            ("bindings", "one program with many tensor sets in turn", lambda: measured.bindings(self), "load"),
            ("queue", "many large programs in the queue are all done", lambda: measured.queue(self), "asynchronous"),
            ("writes", "host writes during executions arrive", lambda: measured.writes(self), "asynchronous"),
            ("memory", "the device memory that a program takes", lambda: measured.memory(self), "load"),
            ("DMA", "the rate of copies by the length of their runs", lambda: measured.dma(self), "load"),
            ("collectives", "two cores add up their tensors", lambda: collectives.summed(self), "asynchronous"),
            ("process", "the same programs in other processes", lambda: measured.process(self), "load"),
        ]
        done: dict[str, str] = {}
        for name, proves, check, needs in checks:
            if done.get(needs) in ("FAILED", "skipped"):
                result = CheckResult(name, "skipped", f"needs: {needs}", proves)
            else:
                try:
                    result = CheckResult(name, "ok", check(), proves)
                except MissingKernel as missing:
                    result = CheckResult(name, "skipped", str(missing), proves)
                except CheckWarning as warning:
                    result = CheckResult(name, "warning", str(warning), proves)
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
        self.cores = self.nrt.init()
        lnc, source = self.nrt.lnc(TARGETS[self.kernels[0].target])
        return f"{self.cores} cores of LNC {lnc} ({source}), in {time.perf_counter() - begun:.1f} s"

    def _load(self) -> str:
        begun = time.perf_counter()
        for kernel in self.kernels:
            before = self.nrt.memory_used()
            model = self.nrt.load(kernel.neff)
            self.taken[kernel.name] = self.nrt.memory_used() - before
            odd = (model.inputs.keys() - set(kernel.inputs)) | (set(kernel.outputs) - model.outputs.keys())
            if odd:
                raise CheckError(f"{kernel.name}: its tensors are not those of its HLO: {', '.join(sorted(odd))}")
            self.models[kernel.name] = model
        dropped = sum(len(k.inputs) - len(self.models[k.name].inputs) for k in self.kernels)
        return f"{len(self.kernels)} programs in {time.perf_counter() - begun:.1f} s; {dropped} unused inputs were left out"

    def _executing(self, kernel: CheckKernel) -> Callable[[], str]:
        def check() -> str:
            arrays = inputs_of(kernel)
            bound = self.bind(kernel, arrays)
            bound.execute()
            return f"NMSE {self.compare(kernel, arrays, bound):.2g}"

        return check

    def _synchronous(self) -> str:
        kernel = self.of("add-256x4")
        arrays = inputs_of(kernel)
        bound = self.bind(kernel, arrays)
        for i in range(20):
            arrays[0] = arrays[0] + 1
            self.nrt.write(bound.inputs[kernel.inputs[0]], arrays[0].tobytes())
            bound.execute()
            try:
                self.compare(kernel, arrays, bound)
            except CheckError as error:
                raise CheckError(
                    f"execution {i + 1} of 20: the result was not there when it was read: {error}"
                ) from None
        return "20 results, each read as soon as nrt_execute returned"

    def _in_place(self) -> str:
        kernel = self.of("set_rows-256x64")
        arrays = inputs_of(kernel)
        bound = self.bind(kernel, arrays)
        (shared,) = kernel.aliases.values()
        before = self.nrt.read(bound.inputs[kernel.inputs[shared]])
        bound.execute()
        if self.nrt.read(bound.inputs[kernel.inputs[shared]]) == before:
            raise CheckError(f"{kernel.name}: the memory that input and result share is as it was before")
        return f"NMSE {self.compare(kernel, arrays, bound):.2g}"

    def _slices(self, alignment: int) -> str:
        kernel = self.of("add-256x4")
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
        bound = self.bound(kernel, inputs, {kernel.outputs[0]: parts[2]})
        bound.execute()
        return f"three of {size} bytes at multiples of {alignment}; NMSE {self.compare(kernel, arrays, bound):.2g}"

    def _asynchronous(self) -> str:
        if not self.nrt.has_queues():
            return "the runtime has no nrta_* as SDK 2.29 has them: nrt_execute is used"
        kernel = self.of("set_rows-256x64")  # in place: each execution needs the previous one's result
        arrays = inputs_of(kernel)
        bound = self.bind(kernel, arrays)
        queued = [self.nrt.schedule(bound.model, *bound.sets) for _ in range(IN_FLIGHT)]
        self.wait(queued)
        return f"{IN_FLIGHT} executions in flight; NMSE {self.compare(kernel, arrays, bound):.2g}"

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
            raise CheckError(
                f"{COPY_BYTES} bytes: what is read back differs from what was written and copied on the device"
            )
        if self.nrt.has_queues():
            data = data[::-1]
            self.wait([self.nrt.schedule_write(first, data), self.nrt.schedule_copy(first, second)])
            if self.nrt.read(second) != data:
                raise CheckError(
                    f"{COPY_BYTES} bytes, written and copied by requests of one queue, differ: report it to AWS"
                )
        self.nrt.free(first)
        self.nrt.free(second)
        return f"{COPY_BYTES >> 20} MiB: to the device {write:.2f} GB/s, on it {copy:.2f} GB/s, from it {read:.2f} GB/s"

    def _latency(self) -> str:
        kernel = self.of("add-256x4")
        bound = self.bind(kernel, inputs_of(kernel))
        bound.execute()  # the first execution takes longer
        times = []
        for _ in range(LAUNCHES):
            begun = self.clock()
            bound.execute()
            times.append((self.clock() - begun) * 1e6)
        median = statistics.median(times)
        text = f"{median:.0f} µs a launch (median of {LAUNCHES}; {min(times):.0f} to {max(times):.0f})"
        if median > MAX_LAUNCH_US:
            raise CheckError(f"{text}; expected at most {MAX_LAUNCH_US:.0f}: a token takes hundreds of launches")
        return text
