"""Loads simulated NEFFs and runs them with XLA on tensors that lie in shared memory.

XLA reads an input in place if its address is aligned for XLA, and as a copy otherwise. XLA computes a result into its own memory;
this module then copies it to its tensor, so a tensor may be input and output at once. For the same reason, XLA does not get the
HLO's aliasing of results and inputs.

XLA executes a small kernel in some microseconds. So the first request of a kind prepares its execution, and later ones find it by
the request's bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import mmap
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from kernelgen.errors import KernelgenError
from kernelgen.hlo import proto
from kernelgen.hlo.cpu import client
from kernelgen.hlo.estimate import estimate
from kernelgen.hlo.execute import Executable, address, compile_for_cpu, numpy_dtype, put
from kernelgen.neff import container
from kernelgen.neff.identity import flag
from kernelgen.neff.memory import estimated_scratchpad_bytes
from kernelgen.simulator import bounds, cache, miscompiles, products, updates
from kernelgen.simulator.ranks import Collectives, collectives_of, merge
from kernelgen.simulator.unused import unused_parameters
from kernelgen.targets import TARGETS

MAX_EXECUTABLES = 1024
"""The most executables to keep. The least recently used one is dropped, and compiled again on its next use. Each takes about
640 KiB and ten of the 65,530 mappings that Linux allows a process."""

BINDINGS_PER_MODEL = 1024
"""The most prepared executions that a model keeps. With more, all of them are dropped."""

SMALL = 1 << 16
"""The largest result, in bytes, that is copied without releasing the interpreter's lock."""


class DeviceError(Exception):
    """An invalid request; the text is for the client's log."""


class OutOfBounds(Exception):
    """An execution had an index of a gather or scatter out of bounds; its results are unchanged."""


@dataclass(frozen=True)
class Arena:
    """Memory shared with the client.

    Attributes:
        data: all of it.
        address: its address in this process.
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
class ResultPlace:
    """The place of a result.

    Attributes:
        memory: the arena.
        where: its bytes in the arena.
        small: whether to copy it through Python's buffers, which is faster for small results.
        address: its address in this process.
        size: in bytes; of a part of a tensor (`updates`), the part's.
    """

    memory: mmap.mmap
    where: slice
    small: bool
    address: int
    size: int

    def put(self, buffer: Any) -> None:
        """Waits for a result and copies it there."""
        if self.small:
            self.memory[self.where] = buffer
            return
        # XLA may compute large programs on its own threads, even in a synchronous execution.
        buffer.block_until_ready()
        ctypes.memmove(self.address, address(buffer), self.size)

    def put_part(self, buffer: Any, first: int) -> None:
        """Copies a result to an offset in the place; the bytes before it are unchanged."""
        if self.small:
            begin = self.where.start + first
            self.memory[begin : begin + self.size] = buffer
            return
        buffer.block_until_ready()
        ctypes.memmove(self.address + first, address(buffer), self.size)


@dataclass(frozen=True, slots=True)
class Binding:
    """A model with the places of its inputs and outputs in memory.

    Attributes:
        program: the model's program.
        arguments: XLA's array for each input that XLA reads in place; None for an input that is copied for each execution.
        copies: whether an argument is None.
        views: the inputs as NumPy arrays.
        results: the place of each output.
    """

    program: Program
    arguments: list[Any]
    copies: bool
    views: list[np.ndarray[Any, Any]]
    results: list[ResultPlace]

    def launch(self, executable: Executable, uses: Iterator[int]) -> Callable[[], None]:
        """Returns a function that executes it. All lookups that are the same each time are done before.

        The function raises:
            OutOfBounds: an index of a gather or scatter is out of bounds.

        Args:
            executable: its program, compiled by XLA.
            uses: the counter for `Program.used`.
        """
        program, arguments, results = self.program, self.arguments, self.results
        if self.copies or len(results) != 1 or not results[0].small or program.indirect or program.parts:

            def launch() -> None:
                program.used = next(uses)
                self._run(executable)

            return launch

        # The path of most kernels, which are small. These lines take a third of the time of a launch.
        begin, handlers = executable.loaded.execute_sharded, executable.handlers
        memory, where = results[0].memory, results[0].where

        def launch_small() -> None:
            program.used = next(uses)
            (memory[where],) = begin(arguments).consume_with_handlers(handlers)

        return launch_small

    def _run(self, executable: Executable) -> None:
        arguments = self.arguments
        if self.copies:
            pairs = zip(arguments, self.views, strict=True)
            arguments = [put(view) if argument is None else argument for argument, view in pairs]
        # Compute all results first: a result may share memory with an input of the same execution.
        buffers = executable.begin(arguments)
        if len(buffers) > 1:
            for buffer in buffers:
                buffer.block_until_ready()
        if self.program.indirect:
            which = int.from_bytes(memoryview(buffers.pop()).tobytes(), sys.byteorder)
            if which > 0:
                raise OutOfBounds(f"an index of {self.program.indirect[which - 1]} is out of bounds")
        for number, first in self.program.firsts(buffers.pop()) if self.program.parts else ():
            self.results[number].put_part(buffers[number], first)
        for number, (buffer, place) in enumerate(zip(buffers, self.results, strict=True)):
            if number not in self.program.parts:
                place.put(buffer)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Program:
    """HLO, and its executable while it is in use.

    Attributes:
        hlo: the HLO module.
        ranks: how many ranks compute it together, each with its own inputs and results.
        executable: the compiled module; None if it was dropped.
        indirect: its gathers and scatters, if the last result reports an index out of bounds.
        parts: the results that are a part of their tensor; the result behind the client's has the parts' offsets.
        used: increases with each use.
        turn: the lock of the thread that compiles it.
    """

    hlo: bytes
    ranks: int = 1
    executable: Executable | None = None
    indirect: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    used: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)

    def firsts(self, result: Any) -> Iterator[tuple[int, int]]:
        """Yields the number of each part and its offset in its tensor in bytes, from the result with the offsets."""
        return zip(self.parts, struct.unpack(f"={len(self.parts)}q", memoryview(result)), strict=True)


@dataclass(slots=True)
class LoadedNeff:
    """A loaded NEFF.

    Attributes:
        program: its program.
        inputs: (NumPy dtype, shape, bytes) of each input of a rank.
        dropped: the numbers of the inputs that the client omits, because no result depends on them.
        outputs: (NumPy dtype, bytes, bytes that the program returns) of each output of a rank.
        requests: the requests that were prepared for it.
    """

    program: Program
    inputs: list[tuple[Any, tuple[int, ...], int]]
    dropped: frozenset[int]
    outputs: list[tuple[Any, int, int]]
    requests: list[bytes] = field(default_factory=list)


class CoreResources(NamedTuple):
    """The resources of a core that a model needs, estimated from its HLO.

    Attributes:
        scratchpad: bytes besides its inputs and outputs.
        code: bytes of its instructions and of its rings for spills, of all physical cores.
        descriptors: of DMA, of each physical core.
        core_version: the version of its NeuronCore; 0 if unknown.
        collectives: the number of its collectives.
    """

    scratchpad: int
    code: int
    descriptors: int
    core_version: int
    collectives: int


class SimulatedDevice:
    """The helper's state: arenas, models, and XLA for the CPU. Thread-safe.

    Args:
        arenas: by number.
        strict: omit inputs on which no result depends from a model's tensors, as a compiler may, and refuse indices out of
            bounds.

    Attributes:
        launches: functions that execute a request again, by request.
    """

    def __init__(self, arenas: Sequence[Arena], strict: bool = False) -> None:
        self._arenas = arenas
        self._strict = strict
        self._models: dict[int, LoadedNeff] = {}
        self._bindings: dict[bytes, Binding] = {}
        self.launches: dict[bytes, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._number = 0
        self._programs = _Programs(strict, self._forget_launches)
        client()  # fails early on a machine without jaxlib

    def load(
        self, arena: int, offset: int, size: int, count: int = 0
    ) -> tuple[int, tuple[container.NeffTensor, ...], CoreResources]:
        """Loads a model. Returns its number, its tensors without dropped ones (inputs first), and the resources that it needs.

        Args:
            arena: the arena of the NEFF.
            offset: the offset of the NEFF in the arena, in bytes.
            size: bytes of the NEFF.
            count: ranks that load and execute it together; 0: a single rank, without collectives.

        Raises:
            KernelgenError: it is not an undamaged simulated NEFF, or its collectives do not allow this number of ranks.
            DeviceError: XLA does not compile it.
        """
        data = self._arenas[arena].data[offset : offset + size]
        contents = container.read_simulated(data, source="nrt_load")
        collectives = collectives_of(contents.hlo)
        _check_collectives(collectives, count)
        program = self._programs.of(contents.hlo, count if collectives.names else 1)
        executable = self._programs.compiled(program)
        inputs = [t for t in contents.tensors if t.usage == "in"]
        outputs = [t for t in contents.tensors if t.usage == "out"]
        # All ranks have the types of the first one.
        types = [numpy_dtype(dtype) for _, dtype, _ in executable.parameters[: len(inputs)]]
        results = [numpy_dtype(dtype) for dtype, _ in executable.results[: len(outputs)]]
        found = len(executable.parameters), len(executable.results) - bool(program.indirect) - bool(program.parts)
        if found != (len(inputs) * program.ranks, len(outputs) * program.ranks):
            raise DeviceError(
                f"the HLO has {found[0]} parameters and {found[1]} results, and the NEFF describes others"
            )
        model = LoadedNeff(
            program,
            inputs=[(dtype, t.shape, t.size) for dtype, t in zip(types, inputs, strict=True)],
            dropped=unused_parameters(contents.hlo) if self._strict else frozenset(),
            outputs=[
                (dtype, t.size, math.prod(shape) * dtype.itemsize)
                for dtype, (_, shape), t in zip(results, executable.results, outputs, strict=False)
            ],
        )
        needs = _needs(contents, len(collectives.names))
        told = tuple(t for i, t in enumerate(inputs) if i not in model.dropped) + tuple(outputs)
        with self._lock:
            self._number += 1
            self._models[self._number] = model
            return self._number, told, needs

    def unload(self, number: int) -> None:
        """Unloads a model. An execution in progress completes first.

        Raises:
            DeviceError: no model has that number.
        """
        with self._lock:
            model = self._models.pop(number, None)
            if model is None:
                raise DeviceError(f"no model {number}")
            self._forget(model)

    def _forget(self, model: LoadedNeff) -> None:
        # Launches run without the lock, so one may still run. It holds references to its objects.
        for request in model.requests:
            self._bindings.pop(request, None)
            self.launches.pop(request, None)
        model.requests.clear()

    def execute(self, request: bytes, read: Callable[[bytes], tuple[int, Sequence[tuple[int, int]]]]) -> None:
        """Runs a model.

        Args:
            request: the model and the places of its inputs and outputs, in any unique form.
            read: decodes it: the model's number; (arena, offset) of each input, then of each output; of each rank, one after the
                other. Not called if the same request was executed before.

        Raises:
            DeviceError: the model or a place does not exist.
            OutOfBounds: an index is out of bounds.
        """
        launch = self.launches.get(request)
        if launch is None:
            launch = self._prepare(request, read)
        launch()

    def _prepare(
        self, request: bytes, read: Callable[[bytes], tuple[int, Sequence[tuple[int, int]]]]
    ) -> Callable[[], None]:
        binding = self._bindings.get(request)
        if binding is None:
            binding = self._bind(request, *read(request))
        launch = binding.launch(self._programs.compiled(binding.program), self._programs.uses)
        self.launches[request] = launch
        # Another thread may have dropped the executable before the launch was in the table.
        if binding.program.executable is None:  # dropped by another thread
            self.launches.pop(request, None)
        return launch

    def _forget_launches(self, program: Program) -> None:
        for request, binding in list(self._bindings.items()):
            if binding.program is program:
                self.launches.pop(request, None)

    def _bind(self, request: bytes, number: int, places: Sequence[tuple[int, int]]) -> Binding:
        model = self._models.get(number)
        if model is None:
            raise DeviceError(f"no model {number}")
        count = len(model.inputs) - len(model.dropped)
        ranks = model.program.ranks
        if len(places) != ranks * (count + len(model.outputs)):
            raise DeviceError(
                f"{len(places)} tensors for {ranks} ranks of a model of {count} inputs and {len(model.outputs)} outputs"
            )
        arguments, views, results = [], [], []
        given = iter(places)
        for _ in range(ranks):
            for i, (dtype, shape, size) in enumerate(model.inputs):
                if i in model.dropped:
                    # NaNs, in case a kernel reads them.
                    views.append(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))
                    arguments.append(put(views[-1]))
                    continue
                place = next(given)
                begin = self._address(place, size)
                data = self._arenas[place[0]].data
                view = np.frombuffer(data, dtype, size // dtype.itemsize, place[1]).reshape(shape)
                array = put(view)
                arguments.append(array if address(array) == begin else None)
                views.append(view)
            for dtype, whole, size in model.outputs:
                arena, offset = next(given)
                begin = self._address((arena, offset), whole)
                # Python's buffers do not support the types of ml_dtypes.
                small = size <= SMALL and dtype.isbuiltin == 1
                results.append(ResultPlace(self._arenas[arena].data, slice(offset, offset + size), small, begin, size))
        binding = Binding(model.program, arguments, any(array is None for array in arguments), views, results)
        with self._lock:
            if number in self._models:
                if len(model.requests) >= BINDINGS_PER_MODEL:
                    self._forget(model)
                model.requests.append(request)
                self._bindings[request] = binding
        return binding

    def _address(self, place: tuple[int, int], size: int) -> int:
        number, offset = place
        if number >= len(self._arenas) or offset + size > len(self._arenas[number].data):
            raise DeviceError(f"{size} bytes at {offset} are not in arena {number}")
        return self._arenas[number].address + offset


class _Programs:
    """Programs by the digest of their HLO. Each is compiled once for all models and threads while it is in use.

    Args:
        strict: compile checks of indices.
        forget: a function that this class calls with each program whose executable it drops.

    Attributes:
        uses: counts the uses of all.
    """

    def __init__(self, strict: bool, forget: Callable[[Program], None]) -> None:
        self._strict = strict
        self._mistakes = miscompiles.asked_for()
        self._forget = forget
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[bytes, Program] = WeakValueDictionary()
        self._kept: set[Program] = set()
        self.uses = itertools.count(1)

    def of(self, hlo: bytes, ranks: int) -> Program:
        """Returns the program for an HLO module on this number of ranks."""
        digest = hashlib.sha256(hlo).digest() + bytes([ranks])
        with self._lock:
            program = self._known.get(digest)
            if program is None:
                self._known[digest] = program = Program(hlo, ranks)
            return program

    def compiled(self, program: Program) -> Executable:
        """Returns the compiled HLO.

        Raises:
            DeviceError: XLA does not compile it.
        """
        program.used = next(self.uses)
        executable = program.executable
        return self._compile(program) if executable is None else executable

    def _compile(self, program: Program) -> Executable:
        # A lock per program: other programs can be compiled at the same time.
        with program.turn:
            executable = program.executable  # another thread has compiled it
            if executable is None:
                hlo = miscompiles.rewrite(program.hlo, self._mistakes) if self._mistakes else program.hlo
                executable, program.indirect, program.parts = _compile(hlo, program.ranks, self._strict)
                program.executable = executable
                with self._lock:
                    self._kept.add(program)
                    while len(self._kept) > MAX_EXECUTABLES:
                        oldest = min(self._kept, key=lambda p: p.used)
                        self._kept.remove(oldest)
                        oldest.executable = None
                        self._forget(oldest)
        return executable


def _check_collectives(collectives: Collectives, count: int) -> None:
    """Raises an error if a program's collectives do not allow this number of ranks; 0: `nrt_load`."""
    if collectives.names and not count:
        raise DeviceError(
            f"{collectives.names[0]} is a collective: a program of several ranks is one NEFF, which every rank loads with "
            "nrt_load_collectives before any executes it"
        )
    if collectives.names and (mistake := collectives.mistake(count)):
        raise KernelgenError(mistake)


def _needs(contents: container.Simulated, collectives: int) -> CoreResources:
    flags = contents.info.get("flags", ())
    target = TARGETS.get(flag(flags, "--target") or "")
    name = target.name if target else next(iter(TARGETS))
    lnc, model_type = flag(flags, "--lnc"), flag(flags, "--model-type") or "generic"
    made = estimate(contents.hlo, name, int(lnc) if lnc else None, model_type=model_type)
    return CoreResources(
        estimated_scratchpad_bytes(contents.hlo),
        made.code_bytes + made.ring_bytes,
        made.dma_descriptors,
        target.neuron_core if target else 0,
        collectives,
    )


def _compile(hlo: bytes, count: int, strict: bool) -> tuple[Executable, tuple[str, ...], tuple[int, ...]]:
    module = proto.parse(hlo)
    in_place = updates.aliases(module) if count == 1 else {}
    # Otherwise XLA would overwrite inputs that share memory with results, and they belong to the client.
    module.ClearField("input_output_alias")
    try:
        plain = proto.serialize(module)
        plain = merge(plain, count) if count > 1 else plain
        updating = updates.rewrite(plain, in_place)
        checked = bounds.check(updating.hlo) if strict else bounds.BoundsCheckedHlo(updating.hlo, ())
        executable = cache.compiled(products.rewrite(checked.hlo), compile_for_cpu)
    except (ValueError, KeyError) as error:
        raise DeviceError(str(error)) from error
    for layout in executable.loaded.get_output_layouts():
        order = str(layout).strip("{}").partition(":")[0]
        if order != ",".join(map(str, reversed(range(order.count(",") + 1 if order else 0)))):
            raise DeviceError(f"XLA lays a result out as {layout}, which is not how the client reads it")
    return executable, checked.names, updating.parts
