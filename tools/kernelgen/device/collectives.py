"""The check of sums over NeuronCores: one program on two cores, loaded and executed together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from kernelgen.device.bench import BoundKernel, CheckError, DeviceBench, MissingKernel, inputs_of
from kernelgen.device.libnrt import Libnrt, StatusError
from kernelgen.targets import TARGETS

RANKS = 2
LOAD_LIMIT, FAILED_LIMIT = 600.0, 5.0
"""Seconds that ranks may wait for each other: all of them, and the others after one has failed."""

T = TypeVar("T")


def _on_all(nrt: Libnrt, function: Callable[[int], T]) -> list[T]:
    """Calls a function on a thread for each rank and returns its results in the order of the ranks.

    Raises:
        StatusError: calls failed, or did not return: if one rank fails, libnrt may let the others wait forever. It names each of
            them.
    """
    results: dict[int, T] = {}
    errors: dict[int, StatusError] = {}
    changed = threading.Condition()

    def run(rank: int) -> None:
        try:
            result = function(rank)
        except StatusError as error:
            with changed:
                errors[rank] = error
                changed.notify()
        else:
            with changed:
                results[rank] = result
                changed.notify()

    for rank in range(RANKS):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    with changed:
        changed.wait_for(lambda: errors or len(results) == RANKS, LOAD_LIMIT)
        changed.wait_for(lambda: len(errors) + len(results) == RANKS, FAILED_LIMIT if errors else 0)
        if len(errors) + len(results) < RANKS:
            nrt.abandon()
        if len(results) < RANKS:
            failed = [rank for rank in range(RANKS) if rank not in results]
            raise StatusError(
                "; ".join(f"core {rank}: {errors.get(rank, 'its call has not returned')}" for rank in failed)
            )
        return [results[rank] for rank in range(RANKS)]


def summed(bench: DeviceBench) -> str:
    """Executes the program of `all_reduce` three times on the first two cores.

    Raises:
        CheckError: a core's results are not the sum.
        MissingKernel: the process has only one core, or the bundle has no such program.
    """
    import numpy as np

    if bench.cores < RANKS:
        raise MissingKernel(f"it is for {RANKS} cores, and the process has {bench.cores}")
    if bench.sum is None:
        raise MissingKernel("the bundle lacks the kernel all_reduce: build the manifest of this version")
    kernel, nrt = bench.sum, bench.nrt
    (first,) = inputs_of(kernel)
    summands = [first, first[::-1] * np.float32(2)]
    expected = summands[0] + summands[1]

    def bind(rank: int) -> BoundKernel:
        model = nrt.load_rank(kernel.neff, rank, rank, RANKS)
        tensors = {name: nrt.allocate(size, rank) for name, size in (model.inputs | model.outputs).items()}
        for number, parameter in kernel.aliases.items():
            tensors[kernel.outputs[number]] = tensors[kernel.inputs[parameter]]
        sets = [nrt.tensor_set({name: tensors[name] for name in names}) for names in (model.inputs, model.outputs)]
        return BoundKernel(tensors, tensors, lambda: nrt.execute(model, *sets), model, (sets[0], sets[1]))

    def queue() -> None:
        for one in [nrt.schedule(rank.model, *rank.sets) for rank in ranks]:  # each core has its own queue
            bench.wait([one])

    first_core = int(os.environ.get("NEURON_RT_VISIBLE_CORES", "").partition(",")[0].partition("-")[0] or 0)
    target = TARGETS[kernel.target]
    if why := target.rank_error(RANKS, first_core):
        raise CheckError(f"NEURON_RT_VISIBLE_CORES={os.environ['NEURON_RT_VISIBLE_CORES']}: {why}")
    ranks = _on_all(nrt, bind)  # each rank waits for the others to load the program, and in nrt_execute
    ways: dict[str, Callable[[], object]] = {"nrt_execute": lambda: _on_all(nrt, lambda rank: ranks[rank].execute())}
    if nrt.has_queues():
        ways["nrta_execute_schedule"] = queue
    for name, execute in ways.items():
        for rank, summand in enumerate(summands):
            nrt.write(ranks[rank].inputs[kernel.inputs[0]], summand.tobytes())
        execute()
        for rank, one in enumerate(ranks):
            actual = np.frombuffer(nrt.read(one.outputs[kernel.outputs[0]]), np.float32).reshape(expected.shape)
            if wrong := int((actual != expected).sum()):
                raise CheckError(f"core {rank}, {name}: {wrong} of {expected.size} elements are not the sum")
    counts = ", ".join(str(ranks) for ranks in target.ranks if ranks <= bench.cores)
    return (
        f"{RANKS} cores, by {' and by '.join(ways)}; of this process's {bench.cores} cores one program runs on {counts}"
    )
