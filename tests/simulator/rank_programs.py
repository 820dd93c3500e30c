"""Programs that several ranks compute together, and a process that runs them: `python rank_programs.py LIBNRT NEFF
COMMAND…`.

The process prints JSON: for each rank its result, or the error that it got.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kernelgen.device.libnrt import Libnrt, NrtModel, NrtTensor, StatusError

ADD = """({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %c : tensor<f32>
  })"""


def all_reduce(groups: str, size: int = 64) -> str:
    """Returns a program that doubles the ranks' inputs, adds them up and adds 1; its result is `size` floats."""
    ranks = [group.split(",") for group in groups.split(";")]
    dense = "[" + ",".join("[" + ",".join(group) + "]" for group in ranks) + "]"
    return f"""
      %two = stablehlo.constant dense<2.0> : tensor<{size}xf32>
      %one = stablehlo.constant dense<1.0> : tensor<{size}xf32>
      %x = stablehlo.multiply %p, %two : tensor<{size}xf32>
      %sum = "stablehlo.all_reduce"(%x) {ADD} {{
        replica_groups = dense<{dense}> : tensor<{len(ranks)}x{len(ranks[0])}xi64>,
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>
      }} : (tensor<{size}xf32>) -> tensor<{size}xf32>
      %q = stablehlo.add %sum, %one : tensor<{size}xf32>
    """


def hlo_of(body: str, size: int = 64, result: int | None = None) -> bytes:
    """Returns the `HloModuleProto` of a program with the parameter `%p` and the result `%q`."""
    from jaxlib import _jax

    types = f"tensor<{size}xf32>", f"tensor<{result or size}xf32>"
    text = f"module @m {{ func.func public @main(%p: {types[0]}) -> {types[1]} {{ {body} return %q : {types[1]} }} }}"
    made = _jax.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=False)
    return bytes(made.as_serialized_hlo_module_proto())


class Ranks:
    """The ranks of a process, each with a thread.

    Args:
        library: libnrt's file.
        count: the number of ranks.
    """

    def __init__(self, library: Path, count: int) -> None:
        self.nrt = Libnrt(library)
        self.nrt.init()
        self.count = count
        self._threads = ThreadPoolExecutor(count)

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """Runs a function on all ranks at the same time; returns its results, or the status that ended a rank's call."""

        def run(rank: int) -> Any:
            try:
                return function(rank)
            except StatusError as error:
                return str(error)

        return list(self._threads.map(run, range(self.count)))

    def load(self, neff: bytes) -> list[Any]:
        return self.each(lambda rank: self.nrt.load_rank(neff, rank, rank, self.count))

    def tensors(self, model: NrtModel, rank: int) -> tuple[Any, Any, NrtTensor, NrtTensor]:
        """Returns the sets of the input and of the output, the output, and the input; both tensors hold `values`."""
        (made,), (result,) = (
            [self.nrt.allocate(size, rank) for size in sizes.values()] for sizes in (model.inputs, model.outputs)
        )
        for tensor in (made, result):
            self.nrt.write(tensor, values(rank, tensor.size // 4).tobytes())
        sets = [
            self.nrt.tensor_set(dict.fromkeys(sizes, t)) for sizes, t in ((model.inputs, made), (model.outputs, result))
        ]
        return sets[0], sets[1], result, made

    def result(self, tensor: NrtTensor) -> list[float]:
        return [float(x) for x in np.frombuffer(self.nrt.read(tensor), np.float32)]


def values(rank: int, count: int) -> np.ndarray[Any, Any]:
    """Returns a rank's input."""
    return (1000 * rank + np.arange(count)).astype(np.float32)


class Program:
    """A program that every rank has loaded, with its own tensors.

    Args:
        ranks: the ranks that run it.
        neff: the NEFF to load.
        allocate: whether to allocate the tensors too.
    """

    def __init__(self, ranks: Ranks, neff: bytes, *, allocate: bool = True) -> None:
        self.ranks = ranks
        self.models = ranks.load(neff)
        self.loaded = not any(isinstance(model, str) for model in self.models)
        allocate = allocate and self.loaded
        self.tensors = [ranks.tensors(model, rank) for rank, model in enumerate(self.models)] if allocate else []

    def execute(self, rank: int) -> None:
        self.ranks.nrt.execute(self.models[rank], *self.tensors[rank][:2])

    def results(self, errors: list[Any]) -> list[Any]:
        """Returns each rank's result, or its error instead."""
        return [error or self.ranks.result(t[2]) for error, t in zip(errors, self.tensors, strict=True)]


def execute(ranks: Ranks, neff: bytes) -> Any:
    """All ranks execute once."""
    program = Program(ranks, neff)
    return program.results(ranks.each(program.execute)) if program.loaded else program.models


def again(ranks: Ranks, neff: bytes) -> Any:
    """All ranks execute three times on the same tensors; returns the outcome of each execution."""
    program = Program(ranks, neff)
    return [ranks.each(program.execute) for _ in range(3)] if program.loaded else program.models


def queue(ranks: Ranks, neff: bytes) -> Any:
    """One thread queues three executions on each rank, the first rank's first."""
    program = Program(ranks, neff)
    queued = [
        [ranks.nrt.schedule(program.models[rank], *program.tensors[rank][:2]) for _ in range(3)]
        for rank in range(ranks.count)
    ]

    def wait(rank: int) -> None:
        for one in queued[rank]:
            while not ranks.nrt.is_completed(one):
                time.sleep(0.001)

    return program.results(ranks.each(wait))


def missing(ranks: Ranks, neff: bytes) -> Any:
    """All ranks except the last execute, then all ranks, then all ranks another program."""
    program = Program(ranks, neff)
    other = Program(ranks, neff)
    first = ranks.each(lambda rank: program.execute(rank) if rank < ranks.count - 1 else None)
    return [first, ranks.each(program.execute), ranks.each(other.execute), ranks.load(neff)]


def alone(ranks: Ranks, neff: bytes) -> Any:
    """Only the first rank loads, as when one thread loads for one rank after another."""
    return attempt(lambda: ranks.nrt.load_rank(neff, 0, 0, ranks.count))


def different(ranks: Ranks, neff: bytes) -> Any:
    """The last rank loads another NEFF with the same computation; then all ranks load the same NEFF."""
    header = bytearray(neff)
    header[40 + len("kernelgen-simulator ")] ^= 1  # in the name of the build
    first = ranks.each(
        lambda rank: ranks.nrt.load_rank(bytes(header) if rank == ranks.count - 1 else neff, rank, rank, ranks.count)
    )
    return [first, execute(ranks, neff)]


def same_core(ranks: Ranks, neff: bytes) -> Any:
    """Pairs of ranks share a core."""
    return ranks.each(lambda rank: ranks.nrt.load_rank(neff, rank // 2, rank, ranks.count))


def plain(ranks: Ranks, neff: bytes) -> Any:
    """The program is loaded like one without collectives."""
    return attempt(lambda: ranks.nrt.load(neff))


def too_many(ranks: Ranks, neff: bytes) -> Any:
    """Loads with more ranks than cores, with no ranks, and with a rank's number that is too large."""
    numbers = ((0, 129), (0, 200), (0, 0), (ranks.count, ranks.count))
    return [
        attempt(lambda rank=rank, count=count: ranks.nrt.load_rank(neff, 0, rank, count)) for rank, count in numbers
    ]


def other_count(ranks: Ranks, neff: bytes) -> Any:
    """Half of the ranks load the program without the others."""
    half = ranks.count // 2
    return [attempt(lambda rank=rank: ranks.nrt.load_rank(neff, rank, rank, half)) for rank in range(half)]


def communicator(ranks: Ranks, neff: bytes) -> Any:
    """Half of the ranks build a communicator; then all ranks build a larger one, and one loads a program of all ranks."""
    half = ranks.count // 2
    built = ranks.each(lambda rank: ranks.nrt.build_global_comm(rank, rank, half) if rank < half else None)
    larger = ranks.each(lambda rank: ranks.nrt.build_global_comm(rank, rank, ranks.count))
    return [built, larger, attempt(lambda: ranks.nrt.load_rank(neff, 0, 0, ranks.count))]


def barrier(ranks: Ranks, _: bytes) -> Any:
    """All ranks reach a barrier, then all except the last."""
    arrived: list[int] = []

    def come(rank: int) -> int:
        time.sleep(0.05 * rank)
        arrived.append(rank)
        ranks.nrt.barrier(rank, rank, ranks.count)
        return len(arrived)

    last = ranks.count - 1
    return [
        ranks.each(come),
        ranks.each(lambda rank: ranks.nrt.barrier(rank, rank, ranks.count) if rank < last else None),
    ]


def clocks(ranks: Ranks, neff: bytes) -> Any:
    """Returns the nanoseconds of an execution on each rank: waited for, and queued."""
    program = Program(ranks, neff)
    found = [[ranks.nrt.simulated_ns(rank) for rank in range(ranks.count)]]
    for run in (program.execute, lambda rank: scheduled(ranks, program, rank)):
        ranks.each(run)
        found.append([ranks.nrt.simulated_ns(rank) for rank in range(ranks.count)])
    return [list(np.subtract(b, a).tolist()) for a, b in itertools.pairwise(found)]


def scheduled(ranks: Ranks, program: Program, rank: int) -> None:
    one = ranks.nrt.schedule(program.models[rank], *program.tensors[rank][:2])
    while not ranks.nrt.is_completed(one):
        time.sleep(0.001)


def closing(ranks: Ranks, neff: bytes) -> Any:
    """The library is closed while one rank waits for the others and another rank has a queued request."""
    program = Program(ranks, neff)
    waiting = threading.Thread(target=lambda: found.append(attempt(lambda: program.execute(0))))
    found: list[str] = []
    ranks.nrt.schedule(program.models[1], *program.tensors[1][:2])
    waiting.start()
    time.sleep(0.2)
    ranks.nrt.close()
    waiting.join()
    return found


def unloaded(ranks: Ranks, neff: bytes) -> Any:
    """A rank unloads the program while the others wait for it; all free their tensors, and the process continues."""
    program = Program(ranks, neff)

    def run(rank: int) -> None:
        if rank == 0:
            ranks.nrt.unload(program.models[0])
        else:
            program.execute(rank)

    found = ranks.each(run)
    for rank in range(1, ranks.count):
        ranks.nrt.unload(program.models[rank])
    for tensors in program.tensors:
        ranks.nrt.free(tensors[2])
    return found


def outputs(ranks: Ranks, neff: bytes) -> Any:
    """Returns each rank's outcome, and the first element of its result for any outcome."""
    program = Program(ranks, neff)
    if not program.loaded:
        return program.models
    found = ranks.each(program.execute)
    firsts = ranks.each(lambda rank: ranks.result(program.tensors[rank][2])[0])
    return [found, firsts]


def steps(ranks: Ranks, neff: bytes) -> Any:
    """Returns each rank's results of four executions with different inputs, waited for and queued; then frees everything."""
    program = Program(ranks, neff, allocate=False)
    program.tensors = ranks.each(lambda rank: ranks.tensors(program.models[rank], rank)) if program.loaded else []
    if not program.loaded or any(isinstance(tensors, str) for tensors in program.tensors):
        failed = program.tensors or program.models
        return [[one if isinstance(one, str) else "loaded" for one in failed]]

    def step(rank: int, number: int) -> float:
        result, given = program.tensors[rank][2:]
        ranks.nrt.write(given, (values(rank, given.size // 4) + number).tobytes())
        if number % 2:
            scheduled(ranks, program, rank)
        else:
            program.execute(rank)
        return ranks.result(result)[0]

    found = [ranks.each(lambda rank, number=number: step(rank, number)) for number in range(4)]
    ranks.each(lambda rank: ranks.nrt.unload(program.models[rank]))
    for tensors in program.tensors:
        for tensor in tensors[2:]:
            ranks.nrt.free(tensor)
    return found


def attempt(function: Callable[[], Any]) -> str:
    try:
        function()
    except StatusError as error:
        return str(error)
    return "done"


COMMANDS: dict[str, Callable[[Ranks, bytes], Any]] = {
    function.__name__: function
    for function in (
        again,
        alone,
        barrier,
        clocks,
        closing,
        communicator,
        different,
        execute,
        missing,
        other_count,
        outputs,
        plain,
        queue,
        same_core,
        steps,
        too_many,
        unloaded,
    )
}

if __name__ == "__main__":
    os.environ.pop("LD_PRELOAD", None)  # a sanitizer's library, which the helper does not use
    library, file, count, *commands = sys.argv[1:]
    made = Ranks(Path(library), int(count))
    found = [COMMANDS[command](made, Path(file).read_bytes()) for command in commands]
    print(json.dumps(found, default=lambda _: "loaded"))
    made.nrt.close()
