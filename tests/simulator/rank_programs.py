"""Programs that several ranks compute together, and a process that runs them: `python rank_programs.py LIBNRT NEFF COMMAND…`.

The process prints what it found as JSON: of each rank, its result or the error that it got.
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
    """Returns a program that adds the ranks' inputs, doubled, and adds 1; its result is `size` floats."""
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
    """Returns the `HloModuleProto` of a program whose parameter is `%p` and whose result is `%q`."""
    from jaxlib import _jax

    types = f"tensor<{size}xf32>", f"tensor<{result or size}xf32>"
    text = f"module @m {{ func.func public @main(%p: {types[0]}) -> {types[1]} {{ {body} return %q : {types[1]} }} }}"
    made = _jax.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=False)
    return bytes(made.as_serialized_hlo_module_proto())


class Ranks:
    """The ranks of a process, a thread for each.

    Args:
        library: libnrt's file.
        count: how many.
    """

    def __init__(self, library: Path, count: int) -> None:
        self.nrt = Libnrt(library)
        self.nrt.init()
        self.count = count
        self._threads = ThreadPoolExecutor(count)

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """Returns what a function returns, or the status that stopped it, on each rank at the same time."""

        def run(rank: int) -> Any:
            try:
                return function(rank)
            except StatusError as error:
                return str(error)

        return list(self._threads.map(run, range(self.count)))

    def load(self, neff: bytes) -> list[Any]:
        return self.each(lambda rank: self.nrt.load_rank(neff, rank, rank, self.count))

    def tensors(self, model: NrtModel, rank: int) -> tuple[Any, Any, NrtTensor, NrtTensor]:
        """Returns sets of the input and the output, the output, and the input; both have `values`."""
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
    """A program that every rank has loaded, with tensors of its own.

    Args:
        ranks: those that run it.
        neff: what is loaded.
        allocate: whether the tensors are made, too.
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
        """Returns each rank's result, or the error that it got in place of one."""
        return [error or self.ranks.result(t[2]) for error, t in zip(errors, self.tensors, strict=True)]


def execute(ranks: Ranks, neff: bytes) -> Any:
    """All ranks execute once."""
    program = Program(ranks, neff)
    return program.results(ranks.each(program.execute)) if program.loaded else program.models


def again(ranks: Ranks, neff: bytes) -> Any:
    """All ranks execute three times, on the same tensors; what each execution came to."""
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
    """All ranks but the last execute, then all of them, then all of them another program."""
    program = Program(ranks, neff)
    other = Program(ranks, neff)
    first = ranks.each(lambda rank: program.execute(rank) if rank < ranks.count - 1 else None)
    return [first, ranks.each(program.execute), ranks.each(other.execute), ranks.load(neff)]


def alone(ranks: Ranks, neff: bytes) -> Any:
    """The first rank loads by itself, as it does where one thread loads for one rank after the other."""
    return attempt(lambda: ranks.nrt.load_rank(neff, 0, 0, ranks.count))


def different(ranks: Ranks, neff: bytes) -> Any:
    """The last rank loads another NEFF, which computes the same; then all load the same one."""
    header = bytearray(neff)
    header[40 + len("kernelgen-simulator ")] ^= 1  # in the build's name
    first = ranks.each(
        lambda rank: ranks.nrt.load_rank(bytes(header) if rank == ranks.count - 1 else neff, rank, rank, ranks.count)
    )
    return [first, execute(ranks, neff)]


def same_core(ranks: Ranks, neff: bytes) -> Any:
    """Two ranks are on one core."""
    return ranks.each(lambda rank: ranks.nrt.load_rank(neff, rank // 2, rank, ranks.count))


def plain(ranks: Ranks, neff: bytes) -> Any:
    """The program is loaded as one without collectives."""
    return attempt(lambda: ranks.nrt.load(neff))


def too_many(ranks: Ranks, neff: bytes) -> Any:
    """The ranks are more than the cores, there is none, and a rank's number is too large."""
    numbers = ((0, 129), (0, 200), (0, 0), (ranks.count, ranks.count))
    return [
        attempt(lambda rank=rank, count=count: ranks.nrt.load_rank(neff, 0, rank, count)) for rank, count in numbers
    ]


def other_count(ranks: Ranks, neff: bytes) -> Any:
    """Half of the ranks load the program by themselves."""
    half = ranks.count // 2
    return [attempt(lambda rank=rank: ranks.nrt.load_rank(neff, rank, rank, half)) for rank in range(half)]


def communicator(ranks: Ranks, neff: bytes) -> Any:
    """Half of the ranks build a communicator, then say that it is larger, and load a program of all ranks."""
    half = ranks.count // 2
    built = ranks.each(lambda rank: ranks.nrt.build_global_comm(rank, rank, half) if rank < half else None)
    larger = ranks.each(lambda rank: ranks.nrt.build_global_comm(rank, rank, ranks.count))
    return [built, larger, attempt(lambda: ranks.nrt.load_rank(neff, 0, 0, ranks.count))]


def barrier(ranks: Ranks, _: bytes) -> Any:
    """All ranks come to a barrier, then all but the last."""
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
    """Nanoseconds that an execution takes on each rank: waited for, and in a queue."""
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
    """The library is closed while a rank waits for the others, and another one has a request in its queue."""
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
    """A rank unloads the program while the others wait for it; all free what they have, and the process goes on."""
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
    """What each rank got, and the first element of its result, whatever it got."""
    program = Program(ranks, neff)
    if not program.loaded:
        return program.models
    found = ranks.each(program.execute)
    firsts = ranks.each(lambda rank: ranks.result(program.tensors[rank][2])[0])
    return [found, firsts]


def steps(ranks: Ranks, neff: bytes) -> Any:
    """What each rank gets of four executions, with other inputs each time, waited for and in queues; then all is freed."""
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
    os.environ.pop("LD_PRELOAD", None)  # a sanitizer's library, which the helper has no use for
    library, file, count, *commands = sys.argv[1:]
    made = Ranks(Path(library), int(count))
    found = [COMMANDS[command](made, Path(file).read_bytes()) for command in commands]
    print(json.dumps(found, default=lambda _: "loaded"))
    made.nrt.close()
