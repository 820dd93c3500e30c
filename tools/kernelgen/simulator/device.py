"""Loads simulated NEFFs and runs them with XLA on tensors that lie in shared memory.

An input is given to XLA where it lies, when its address suits XLA, else as a copy. A result is computed into XLA's own memory
and then copied to its tensor, so a tensor may be input and output at once; for the same reason, the HLO's aliasing of results and
inputs is not left to XLA.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernelgen import neff
from kernelgen.hlo import proto
from kernelgen.hlo.cpu import client
from kernelgen.hlo.execute import Executable, compile_for_cpu, numpy_dtype, put
from kernelgen.simulator import cache, products
from kernelgen.simulator.unused import unused_parameters

MAX_EXECUTABLES = 1024
"""Compiled HLO that is kept at most; what was not used for longest is compiled again when it is needed. Each takes about 640 KiB
and ten of the 65,530 mappings that Linux gives a process."""

BINDINGS_PER_MODEL = 1024
"""Prepared executions that a model keeps at most; a client that goes on binding other memory starts over."""


class DeviceError(Exception):
    """A request that cannot be done; its text is for the client's log."""


@dataclass(frozen=True)
class Arena:
    """Memory that is shared with the client.

    Attributes:
        data: all of it.
        address: where it lies in this process.
    """

    data: mmap.mmap
    address: int

    @classmethod
    def map(cls, fd: int, size: int) -> Arena:
        """Returns the arena behind a descriptor.

        Raises:
            OSError, ValueError: it cannot be mapped.
        """
        data = mmap.mmap(fd, size)
        return cls(data, ctypes.addressof(ctypes.c_char.from_buffer(data)))


@dataclass(frozen=True, slots=True)
class Binding:
    """A model's inputs and outputs in certain places of memory.

    Attributes:
        arguments: XLA's array for each input that it reads in place; None for one that must be copied each time.
        copies: whether there is a None among them.
        views: the inputs as NumPy arrays.
        results: address and bytes of each output.
    """

    arguments: list[Any]
    copies: bool
    views: list[np.ndarray[Any, Any]]
    results: list[tuple[int, int]]


@dataclass(slots=True)
class Model:
    """A loaded NEFF.

    Attributes:
        hlo: what it computes.
        digest: the HLO's SHA-256.
        inputs: (NumPy dtype, shape, bytes) of each.
        dropped: the numbers of those that a client does not give, because no result depends on them.
        outputs: bytes of each.
        bindings: what was prepared, by the request that asked for it.
    """

    hlo: bytes
    digest: bytes
    inputs: list[tuple[Any, tuple[int, ...], int]]
    dropped: frozenset[int]
    outputs: list[int]
    bindings: dict[bytes, Binding] = field(default_factory=dict)


class Device:
    """What the helper has: arenas, models, and XLA's CPU. Methods may be called by several threads at once.

    Args:
        arenas: by number.
        strict: leave inputs that no result depends on out of a model's tensors, as a compiler may.
    """

    def __init__(self, arenas: Sequence[Arena], strict: bool = False) -> None:
        self._arenas = arenas
        self._strict = strict
        self._models: dict[int, Model] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._executables = _Executables()
        client()  # a machine without jaxlib is told so before it has a model

    def load(self, arena: int, offset: int, size: int) -> tuple[int, tuple[neff.Tensor, ...]]:
        """Returns a new model's number and its tensors, inputs first, without those that are dropped.

        Args:
            arena: where the NEFF lies.
            offset: the same, in bytes.
            size: bytes of the NEFF.

        Raises:
            KernelgenError: it is not an undamaged simulated NEFF.
            DeviceError: XLA does not compile it.
        """
        data = self._arenas[arena].data[offset : offset + size]
        contents = neff.read_simulated(data, source="nrt_load")
        digest = hashlib.sha256(contents.hlo).digest()
        executable = self._executables.get(digest, contents.hlo)
        types = [numpy_dtype(dtype) for _, dtype, _ in executable.parameters]
        inputs = [t for t in contents.tensors if t.usage == "in"]
        outputs = [t for t in contents.tensors if t.usage == "out"]
        model = Model(
            hlo=contents.hlo,
            digest=digest,
            inputs=[(dtype, t.shape, t.size) for dtype, t in zip(types, inputs, strict=True)],
            dropped=unused_parameters(contents.hlo) if self._strict else frozenset(),
            outputs=[t.size for t in outputs],
        )
        told = tuple(t for i, t in enumerate(inputs) if i not in model.dropped) + tuple(outputs)
        with self._lock:
            self._number += 1
            self._models[self._number] = model
            return self._number, told

    def unload(self, number: int) -> None:
        """Forgets a model; one that is being executed goes when that is done.

        Raises:
            DeviceError: there is no such model.
        """
        with self._lock:
            if self._models.pop(number, None) is None:
                raise DeviceError(f"no model {number}")

    def execute(self, number: int, places: bytes, read: Callable[[bytes], Sequence[tuple[int, int]]]) -> None:
        """Runs a model.

        Args:
            number: the model's.
            places: where its inputs and outputs are, in any form that tells places apart.
            read: reads `places`: (arena, offset) of each input, then of each output. Not called when the model was executed
                with the same before.

        Raises:
            DeviceError: no such model, or places that are none.
        """
        model = self._models.get(number)
        if model is None:
            raise DeviceError(f"no model {number}")
        binding = model.bindings.get(places)
        if binding is None:
            binding = self._bind(model, read(places))
            if len(model.bindings) >= BINDINGS_PER_MODEL:
                model.bindings.clear()
            model.bindings[places] = binding
        arguments = binding.arguments
        if binding.copies:
            pairs = zip(arguments, binding.views, strict=True)
            arguments = [put(view) if argument is None else argument for argument, view in pairs]
        executable = self._executables.get(model.digest, model.hlo)
        # All of them are computed first: a result may lie where an input of the same execution does.
        buffers = executable.execute(arguments)
        for buffer, (address, size) in zip(buffers, binding.results, strict=True):
            ctypes.memmove(address, buffer.unsafe_buffer_pointer(), size)

    def _bind(self, model: Model, places: Sequence[tuple[int, int]]) -> Binding:
        count = len(model.inputs) - len(model.dropped)
        if len(places) != count + len(model.outputs):
            raise DeviceError(f"{len(places)} tensors for a model of {count} inputs and {len(model.outputs)} outputs")
        arguments, views, results = [], [], []
        given = iter(places[:count])
        for number, (dtype, shape, size) in enumerate(model.inputs):
            if number in model.dropped:
                views.append(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))  # not numbers, if somebody looks
                arguments.append(put(views[-1]))
                continue
            place = next(given)
            address = self._address(place, size)
            view = np.frombuffer(self._arenas[place[0]].data, dtype, size // dtype.itemsize, place[1]).reshape(shape)
            array = put(view)
            arguments.append(array if array.unsafe_buffer_pointer() == address else None)
            views.append(view)
        for size, place in zip(model.outputs, places[count:], strict=True):
            results.append((self._address(place, size), size))
        copies = any(array is None for array in arguments)
        return Binding(arguments, copies, views, results)

    def _address(self, place: tuple[int, int], size: int) -> int:
        number, offset = place
        if number >= len(self._arenas) or offset + size > len(self._arenas[number].data):
            raise DeviceError(f"{size} bytes at {offset} are not in arena {number}")
        return self._arenas[number].address + offset


class _Executables:
    """Compiled HLO by its digest: compiled once, however many models and threads want it, while it is in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[bytes, threading.Lock] = {}
        self._compiled: OrderedDict[bytes, Executable] = OrderedDict()

    def get(self, digest: bytes, hlo: bytes) -> Executable:
        """Returns the compiled HLO.

        Raises:
            DeviceError: XLA does not compile it.
        """
        with self._lock:
            executable = self._compiled.get(digest)
            if executable is not None:
                self._compiled.move_to_end(digest)
                return executable
            turn = self._turns.setdefault(digest, threading.Lock())
        with turn:
            executable = self._compiled.get(digest)  # another thread had the turn before
            if executable is None:
                executable = _compile(hlo)
            with self._lock:
                self._compiled[digest] = executable
                self._turns.pop(digest, None)
                while len(self._compiled) > MAX_EXECUTABLES:
                    self._compiled.popitem(last=False)
            return executable


def _compile(hlo: bytes) -> Executable:
    module = proto.parse(hlo)
    # XLA would consume the inputs that results share memory with, and they are the client's.
    module.ClearField("input_output_alias")
    try:
        executable = cache.compiled(products.rewrite(proto.serialize(module)), compile_for_cpu)
    except (ValueError, KeyError) as error:
        raise DeviceError(str(error)) from error
    for layout in executable.loaded.get_output_layouts():
        order = str(layout).strip("{}").partition(":")[0]
        if order != ",".join(map(str, reversed(range(order.count(",") + 1 if order else 0)))):
            raise DeviceError(f"XLA lays a result out as {layout}, which is not how the client reads it")
    return executable
