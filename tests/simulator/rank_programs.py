"""Programs that several ranks compute together, and a process that runs them: `python rank_programs.py LIBNRT NEFF COMMAND…`.

The process prints what it found as JSON: of each rank, its result or the error that it got.
"""

from __future__ import annotations

import json
import sys
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

    def tensors(self, model: NrtModel, rank: int) -> tuple[Any, Any, NrtTensor]:
        """Returns sets of inputs, the first is 1000 times the rank and its position, and outputs; and the first output."""
        sets, last = [], None
        for sizes in (model.inputs, model.outputs):
            made = {name: self.nrt.allocate(size, rank) for name, size in sizes.items()}
            for name, tensor in made.items():
                self.nrt.write(tensor, values(rank, sizes[name] // 4).tobytes())
                last = tensor
            sets.append(self.nrt.tensor_set(made))
        assert last is not None
        return sets[0], sets[1], last

    def result(self, tensor: NrtTensor) -> list[float]:
        return [float(x) for x in np.frombuffer(self.nrt.read(tensor), np.float32)]


def values(rank: int, count: int) -> np.ndarray[Any, Any]:
    """Returns a rank's input."""
    return (1000 * rank + np.arange(count)).astype(np.float32)


def execute(ranks: Ranks, neff: bytes) -> list[Any]:
    models = ranks.load(neff)
    if any(isinstance(model, str) for model in models):
        return models
    tensors = [ranks.tensors(model, rank) for rank, model in enumerate(models)]
    done = ranks.each(lambda rank: ranks.nrt.execute(models[rank], *tensors[rank][:2]))
    return [error or ranks.result(t[2]) for error, t in zip(done, tensors, strict=True)]


COMMANDS: dict[str, Callable[[Ranks, bytes], list[Any]]] = {"execute": execute}

if __name__ == "__main__":
    library, neff, count, *commands = sys.argv[1:]
    made = Ranks(Path(library), int(count))
    print(json.dumps([COMMANDS[command](made, Path(neff).read_bytes()) for command in commands]))
    made.nrt.close()
