"""The check of sums over NeuronCores: one program on two cores, loaded and executed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from kernelgen.device.bench import BoundKernel, CheckError, DeviceBench, MissingKernel, inputs_of
from kernelgen.device.libnrt import StatusError

RANKS = 2

T = TypeVar("T")


def _of_all(calls: Iterable[Future[T]]) -> list[T]:
    """Returns the results of all ranks' calls, in the order of the ranks.

    Raises:
        StatusError: calls failed. It names each of them: if one rank fails, the others do too, with their own status.
    """
    calls = list(calls)
    failed = [
        f"core {rank}: {error}" for rank, call in enumerate(calls) if isinstance(error := call.exception(), StatusError)
    ]
    if failed:
        raise StatusError("; ".join(failed))
    return [call.result() for call in calls]


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

    with ThreadPoolExecutor(RANKS) as pool:  # each rank waits for the others to load the program, and in nrt_execute
        ranks = _of_all(pool.submit(bind, rank) for rank in range(RANKS))
        ways: dict[str, Callable[[], object]] = {
            "nrt_execute": lambda: _of_all(pool.submit(rank.execute) for rank in ranks)
        }
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
    return f"{RANKS} cores, by {' and by '.join(ways)}"
