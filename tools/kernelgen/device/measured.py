"""Checks of queues, memory and time. A figure far from the expected one is only a warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from kernelgen.device.bench import (
    MAX_WAIT,
    BoundKernel,
    CheckError,
    CheckKernel,
    CheckWarning,
    DeviceBench,
    MissingKernel,
    inputs_of,
)
from kernelgen.device.libnrt import NrtTensor, ScheduledExecution, StatusError
from kernelgen.device.manifest import COPIED, RUNS
from kernelgen.dispatch import chips
from kernelgen.hlo import estimate
from kernelgen.neff import memory as neff_memory
from kernelgen.neff import program
from kernelgen.targets import INSTRUCTION_BYTES

if TYPE_CHECKING:
    import numpy as np

FACTOR = 4.0
"""Maximum ratio of a figure to the expected one, in either direction."""

YOURS = "Kernels are chosen by what that takes: GGML_NEURON_COSTS has your figures."

QUEUED = 16
"""Queued launches that are timed together, and minimum number of large programs that a queue must hold."""

HOST_US = 50
"""Microseconds in which a Python host queues a launch: others measured 62 to 94. They hide shorter device times."""

MOST = 64
"""Maximum number of queued requests: libnrt accepts 63."""

REPEATS = 3
"""Number of runs. Only the fastest counts: others saw one NEFF take a fifth longer in one process than in another."""

PROGRAM = 250 << 10
"""Assumed bytes of a small program, from AWS."""

SETS = 64
"""Number of tensor sets of one program: a model's layers, each with its weights and cache."""

REBOUND = 2.0
"""Maximum ratio of a launch's time with `SETS` sets in turn to its time with one set."""

PROCESSES = 2
"""Number of processes besides this one."""

CORES_BUSY = 75
"""Seconds for which cores may stay occupied after a process ends: others saw a minute."""


def _judged(figures: str, found: list[tuple[float, float, str]]) -> str:
    """Returns the figures; raises them as a warning if one exceeds the table's by `FACTOR`, or falls below it by `FACTOR`.

    Args:
        figures: the figures as text.
        found: (figure, the table's figure, the problem if they differ too much).
    """
    wrong = [advice for figure, taken, advice in found if not taken / FACTOR <= figure <= taken * FACTOR]
    if wrong:
        raise CheckWarning(f"{figures}: more than {FACTOR:g} times off. {' '.join(wrong)}")
    return figures


def launch(bench: DeviceBench) -> str:
    """Times a launch that is waited for, and the time that a launch adds in the queue."""
    kernel = bench.of("add-256x4")
    chip = chips.of(kernel.target)
    taken_waited, taken_queued = chip.by("launch_us", "waited"), chip.by("launch_us", "queued")
    bound = bench.bind(kernel, inputs_of(kernel))
    bound.execute()  # the first execution takes longer
    waited = min(_timed(bench, bound.execute) for _ in range(QUEUED)) * 1e6
    text = f"waited for: {waited:.0f} µs (assumed: {taken_waited:g})"
    found = [(waited, taken_waited, YOURS)]
    if bench.nrt.has_queues():

        def several() -> None:
            bench.wait([bench.nrt.schedule(bound.model, *bound.sets) for _ in range(QUEUED)])

        queued = min(_timed(bench, several) for _ in range(REPEATS)) / QUEUED * 1e6
        text = f"queued: {queued:.0f} µs (assumed: {taken_queued:g}); {text}"
        found.append((queued, max(taken_queued, HOST_US), "GGML_NEURON_QUEUE_DEPTH may be too small to hide it."))
    return _judged(text, found)


def _timed(bench: DeviceBench, action: Callable[[], object]) -> float:
    begun = bench.clock()
    action()
    return bench.clock() - begun


def bindings(bench: DeviceBench) -> str:
    """Times launches of one program with `SETS` tensor sets in turn, and with one of them.

    The backend runs a layer's program with the tensors of each layer in turn. libnrt caches what it prepares for a set's addresses,
    and AWS does not document how many sets its cache holds.
    """
    kernel = _layer(bench)
    arrays = inputs_of(kernel)
    sets = [bench.bind(kernel, arrays) for _ in range(SETS)]
    # The first round takes longer: each set is new.
    rounds = [[_timed(bench, bound.execute) for bound in sets] for _ in range(1 + REPEATS)]
    in_turn = min(sum(times) for times in rounds[1:]) / SETS * 1e6
    alone = min(sum(_timed(bench, sets[0].execute) for _ in sets) for _ in range(REPEATS)) / SETS * 1e6
    for name in kernel.outputs:
        results = {bench.nrt.read(bound.outputs[name]) for bound in sets}
        if len(results) > 1:
            raise CheckError(
                f"{kernel.name}: {name} differs between {SETS} tensor sets of equal values: report it to AWS"
            )
    for bound in sets:
        for tensor in {id(t): t for t in (*bound.inputs.values(), *bound.outputs.values())}.values():
            bench.nrt.free(tensor)
    text = f"a launch of a layer: {in_turn:.0f} µs with {SETS} tensor sets in turn, {alone:.0f} µs with one"
    if in_turn > alone * REBOUND:
        raise CheckWarning(
            f"{text}: more than {REBOUND:g} times as long. Each layer of a token is such a launch: build models with --fuse=step"
        )
    return text


def queue(bench: DeviceBench) -> str:
    """Queues a layer repeatedly, each followed by an addition that shows whether both ran, until the queue is full."""
    import numpy as np

    if not bench.nrt.has_queues():
        return "the runtime has no nrta_* as SDK 2.29 has them: nrt_execute is used"
    heavy = _layer(bench)
    arrays = inputs_of(heavy)
    large = bench.bind(heavy, arrays)
    adding = bench.of("add-256x4")
    steps, start, step = _chain(bench, adding)
    queued: list[ScheduledExecution] = []
    full = ""
    for i in range(MOST):
        bound = steps[i // 2 % 2] if i % 2 else large
        try:
            queued.append(bench.nrt.schedule(bound.model, *bound.sets))
        except StatusError as error:
            if "QUEUE_FULL" not in str(error):
                raise
            full = "then the queue was full"
            break
    bench.wait(queued)
    done = len(queued) // 2
    layers = len(queued) - done
    if len(queued) < QUEUED:
        raise CheckError(
            f"the queue was full with {layers} programs of a layer and {done} small ones in it, and {QUEUED} are expected: "
            "set GGML_NEURON_QUEUE_DEPTH to fewer"
        )
    last = steps[(done - 1) % 2].outputs[adding.outputs[0]]
    found = np.frombuffer(bench.nrt.read(last), np.float32).reshape(start.shape)
    if not np.array_equal(found, start + done * step):
        times = round(float(((found - start) / step).mean()))
        raise CheckError(
            f"of {len(queued)} requests in the queue not all were done, though each was reported as done: of {done} additions, "
            f"each to the sum of the one before, the last left the sum of {times}. "
            "Set GGML_NEURON_QUEUE_DEPTH=1, and report it to AWS"
        )
    alone = bench.bind(heavy, arrays)
    alone.execute()
    for name in heavy.outputs:
        if bench.nrt.read(alone.outputs[name]) != bench.nrt.read(large.outputs[name]):
            raise CheckError(
                f"{heavy.name}: {name} differs between {layers} queued launches and a launch that is waited for"
            )
    return f"{layers} programs of a layer and {done} small ones, all done in order{f'; {full}' if full else ''}"


def _chain(
    bench: DeviceBench, adding: CheckKernel
) -> tuple[list[BoundKernel], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns an addition bound twice, each to the other's sum, with the first sum and the addend."""
    import numpy as np

    (like, _) = inputs_of(adding)
    start, step = np.arange(like.size, dtype=np.float32).reshape(like.shape), np.ones_like(like)
    tensors: list[NrtTensor] = []
    for array in (start, step, start):
        tensors.append(bench.nrt.allocate(array.nbytes))
        bench.nrt.write(tensors[-1], array.tobytes())
    (one, two), (result,) = adding.inputs, adding.outputs
    x, amount, y = tensors
    there = bench.bound(adding, {one: x, two: amount}, {result: y})
    return [there, bench.bound(adding, {one: y, two: amount}, {result: x})], start, step


def writes(bench: DeviceBench) -> str:
    """Writes an input while executions on other memory are queued, as the backend does.

    The backend waits for executions that use the same bytes, since the device does not. Others saw writes overtake the
    results of earlier executions.
    """
    import numpy as np

    if not bench.nrt.has_queues():
        return "the runtime has no nrta_* as SDK 2.29 has them: nothing is in the queue when the host writes"
    large = _layer(bench)
    beside = bench.bind(large, inputs_of(large))
    kernel = bench.of("add-256x4")
    arrays = inputs_of(kernel)
    bound = bench.bind(kernel, arrays)
    for i in range(QUEUED):
        queued = [bench.nrt.schedule(beside.model, *beside.sets) for _ in range(4)]
        bench.nrt.write(bound.inputs[kernel.inputs[0]], (arrays[0] + np.float32(i)).tobytes())
        bench.wait([*queued, bench.nrt.schedule(bound.model, *bound.sets)])
        found = np.frombuffer(bench.nrt.read(bound.outputs[kernel.outputs[0]]), np.float32).reshape(arrays[0].shape)
        if not np.allclose(found, arrays[0] + np.float32(i) + arrays[1], rtol=1e-5, atol=1e-5):
            raise CheckError(
                f"write {i + 1} of {QUEUED}, made while executions on other memory were in the queue, was not there for the "
                "execution that was queued after it: set GGML_NEURON_QUEUE_DEPTH=1, with which nothing is in the queue then, "
                "and report it to AWS"
            )
    return f"{QUEUED} writes beside executions on other memory"


def memory(bench: DeviceBench) -> str:
    """Compares the core memory that loading took with the programs' estimate."""
    if len(bench.kernels) < 2:
        raise MissingKernel(
            "the bundle has one program: pages of the scratchpad, which come with the first, can't be distinguished"
        )
    if not any(bench.taken.values()):
        return "the library does not tell how much memory is used"
    # Loading some programs also allocates pages of the scratchpad, which all share.
    taken = [bench.taken[k.name] % neff_memory.PAGE for k in bench.kernels]
    others = taken[1:]
    first = bench.taken[bench.kernels[0].name]
    shared = max(neff_memory.scratchpad_bytes(k.neff, source=k.name) for k in bench.kernels)
    largest = max(range(1, len(taken)), key=lambda i: taken[i])
    kernel = bench.kernels[largest]
    expected = _program_bytes(kernel)
    text = (
        f"{first / 2**20:.1f} MiB with the first program, {sum(others) / len(others) / 1024:.0f} KiB for each of {len(others)} "
        f"others; {kernel.name} took {taken[largest] / 1024:.0f} KiB (assumed: {expected / 1024:.0f}); "
        f"the NEFFs have scratchpads of {shared / 1024:.0f} KiB at most"
    )
    advice = "The backend keeps too little memory for programs: offer llama.cpp less (-ngl), and report it."
    # A figure below the table's does no harm.
    return _judged(text, [(max(taken[largest], expected), expected, advice)])


def _program_bytes(kernel: CheckKernel) -> int:
    """Returns the estimated bytes of a program: of its instructions, and of its rings for spills."""
    made = program.program(kernel.neff, source=kernel.name)
    size = made.total * INSTRUCTION_BYTES * kernel.lnc + made.spills * estimate.RING_BYTES
    if not made.instructions:  # a simulated NEFF has no instructions
        guess = estimate.estimate(kernel.hlo, kernel.target, kernel.lnc)
        size = guess.code_bytes + guess.ring_bytes
    return max(size, PROGRAM)


def dma(bench: DeviceBench) -> str:
    """Times copies of 8 MiB that read runs of various lengths."""
    rates: dict[int, float] = {}
    for run in RUNS:
        kernel = bench.of(f"probe_copy-{run // 2}x{COPIED // run}")
        bound = bench.bind(kernel, inputs_of(kernel))
        bound.execute()
        seconds = min(_timed(bench, bound.execute) for _ in range(REPEATS))
        # Subtract the launch time, as measured by others.
        rates[run] = COPIED / max(seconds - chips.of(kernel.target).by("launch_us", "waited") / 1e6, seconds / 20) / 1e9
        for tensor in (*bound.inputs.values(), *bound.outputs.values()):
            bench.nrt.free(tensor)
    taken = chips.of(bench.of("probe_copy").target).number("gb_per_s")
    text = "; ".join(f"runs of {run} bytes {rate:.0f} GB/s" for run, rate in rates.items())
    return _judged(f"{text} (long ones assumed: {taken:g})", [(rates[RUNS[-1]], taken, YOURS)])


def process(bench: DeviceBench) -> str:
    """Executes the same programs in other processes, one after another, after this one has released its cores."""
    here = fingerprint(bench)
    bench.nrt.close()
    times = [here["us"]]
    for i in range(PROCESSES):
        words = [sys.executable, "-m", "kernelgen.device.again", str(bench.path)]
        try:
            done = subprocess.run(
                [*words, str(bench.bundle)],
                capture_output=True,
                text=True,
                check=False,
                timeout=MAX_WAIT + CORES_BUSY,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        except subprocess.TimeoutExpired:
            raise CheckError(
                f"process {i + 2} did not end within {MAX_WAIT + CORES_BUSY} s, and was stopped: see whether another process has "
                "the core (neuron-ls), and load the driver again"
            ) from None
        if done.returncode:
            raise CheckError(
                f"process {i + 2} could not do what this one did: {(done.stderr.strip() or 'it said nothing').splitlines()[-1]}"
            )
        there = json.loads(done.stdout)
        times.append(there["us"])
        for name, digest in here["results"].items():
            if there["results"][name] != digest:
                raise CheckError(
                    f"{name}: process {i + 2} computed other results than this one with the same program and inputs: do not trust "
                    "what a second process computes before the driver is loaded again, and report it to AWS"
                )
    return f"the same results in {PROCESSES + 1} processes, a layer in {min(times):.0f} to {max(times):.0f} µs"


def again(bench: DeviceBench) -> list[CheckKernel]:
    """Returns the kernels that other processes execute."""
    return [_layer(bench), bench.of("add-256x4")]


def _layer(bench: DeviceBench) -> CheckKernel:
    return bench.group("mul_mat", "swiglu", "mul_mat", "add")


def fingerprint(bench: DeviceBench) -> dict[str, Any]:
    """Executes some kernels, and returns the digest of each result, and the time of the first in microseconds."""
    results, us = {}, 0.0
    for kernel in again(bench):
        bound = bench.bind(kernel, inputs_of(kernel))
        times = [_timed(bench, bound.execute) for _ in range(REPEATS)]
        us = us or min(times) * 1e6
        results[kernel.name] = sha256(b"".join(bench.nrt.read(bound.outputs[n]) for n in kernel.outputs)).hexdigest()
    return {"results": results, "us": us}
