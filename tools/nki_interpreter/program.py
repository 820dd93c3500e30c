"""A recorded kernel: memory, instructions and loops, in the order in which the kernel's Python code ran.

Recording runs the kernel once per program of its grid, with concrete indices and without data. Later `roll` rolls loops with
similar iterations, and `lower` lowers the result.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from nki_interpreter.devices import DEVICES
from nki_interpreter.errors import NkiError, kernel_location

if TYPE_CHECKING:
    from nki_interpreter.tensors import NkiTensor


ON_CHIP = frozenset(("sbuf", "psum"))


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """A kind of memory: sbuf, psum, hbm, private_hbm or shared_hbm. A tensor's address in it has no effect on values."""

    kind: str

    def __repr__(self) -> str:
        return self.kind

    def __str__(self) -> str:
        return self.kind

    def alloc(self, *args: Any, **kwargs: Any) -> Buffer:
        return self

    def mod_alloc(self, *args: Any, **kwargs: Any) -> Buffer:
        return self

    def auto_alloc(self, *args: Any, **kwargs: Any) -> Buffer:
        return self

    @property
    def is_hbm(self) -> bool:
        return self.kind not in ON_CHIP


MOST_STEPS = 4_000_000
"""The most instructions and iterations of a kernel; recording this many takes minutes and gigabytes."""

PRODUCTS = frozenset(("matmul", "accumulate"))
"""Instructions that read the PSUM elements to which they add."""


class Origin(IntEnum):
    """The writer of values in PSUM: a product can only be added to values of the tensor engine."""

    NOTHING = 0
    ZEROS = 1
    OTHER = 2
    TENSOR_ENGINE = 3


REGISTERS = Buffer("sbuf")
"""The engines' registers: instructions use them like SBUF tiles, but they take no space in SBUF."""

SBUF, PSUM, HBM, PRIVATE_HBM, SHARED_HBM = map(Buffer, ("sbuf", "psum", "hbm", "private_hbm", "shared_hbm"))


@dataclass(eq=False, slots=True)
class NkiMemory:
    """A piece of memory.

    Attributes:
        shape: the number of elements per axis, row-major.
        dtype: the dtype that the kernel declared.
        value_dtype: the values' dtype: float32 for results that the older generation leaves unrounded, else `dtype`.
        initial: None for memory that was never written (NaN where `value_dtype` is a float), or the values it begins with.
        parameter: the number of the kernel's tensor argument, if the memory is one.
        written: for PSUM, which elements were written: False for none, True for all, else an array; None for other memory.
        origin: the writer of PSUM's values, one `Origin` or an array of them; None for other memory.
        finished: for PSUM, whether the accumulated products were read since.
        sums: the offsets and dimensions that products wrote since then.
        place: the kernel's file and line that made it.
        partition: the partition axis; the axes before it are block dimensions.
        address: the first byte in a partition, if the kernel placed the memory; None if the compiler places it.
        first, last: the numbers of the first and last instruction that used it; (-1, -1) before any did.
    """

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    value_dtype: np.dtype[Any]
    buffer: Buffer
    name: str = ""
    initial: np.ndarray[Any, Any] | None = None
    parameter: int | None = None
    written: np.ndarray[Any, Any] | bool | None = None
    origin: np.ndarray[Any, Any] | int | None = None
    mutable: bool = True
    stored: bool = False
    finished: bool = False
    sums: set[Any] | None = None
    place: tuple[str, int] = ("", 0)
    partition: int = 0
    address: int | None = None
    first: int = -1
    last: int = -1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_per_partition(self) -> int:
        """The bytes of one tile in each partition; memory with block dimensions has several tiles."""
        return math.prod(self.shape[self.partition + 1 :]) * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class Instruction:
    """One step of a program.

    Attributes:
        op: the name of its lowering (`lower.LOWERINGS`).
        reads, writes: the tensors it reads and writes.
        attributes: the other values that determine its result.
        integers: numbers that may differ from one iteration of a loop to the next by a constant.
        file, line: where the kernel called it.
    """

    op: str
    reads: tuple[NkiTensor, ...]
    writes: tuple[NkiTensor, ...]
    attributes: Any = ()
    integers: tuple[Any, ...] = ()
    file: str = ""
    line: int = 0


@dataclass(eq=False, slots=True)
class Block:
    items: list[Any] = field(default_factory=list)
    """Instructions, loops and exchanges in order; after `roll` rolled loops as well."""
    begin: int = 0
    end: int = 0
    """The numbers of the block's first instruction and of the first instruction after the block."""


class NkiLoopIndex(int):
    """The index of a loop's iteration, with the iteration's number `turn`, from 0. Two loops never share an index object."""

    turn: int


@dataclass(eq=False, slots=True)
class Loop:
    """A loop as it ran: one block per iteration."""

    kind: str
    iterations: list[Block] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Exchange:
    """A point at which the programs of a grid wait for each other, and may exchange data.

    Attributes:
        kind: "barrier" or "sendrecv".
        source, destination: the sent tensor, and the tensor for the received data.
        send_to, receive_from: program numbers.
    """

    kind: str
    source: NkiTensor | None = None
    destination: NkiTensor | None = None
    send_to: int = 0
    receive_from: int = 0


class Recorder:
    """Records one kernel.

    Args:
        older: whether the kernel imports `neuronxcc.nki`.
        targets: the targets whose limits are checked; all targets if none are given.
        grid: the number of programs per axis.
    """

    def __init__(self, *, older: bool = False, targets: tuple[str, ...] = (), grid: tuple[int, ...] = ()) -> None:
        self.older = older
        self.targets_given = bool(targets)
        self.targets = targets or tuple(DEVICES)
        self.grid = grid
        self.program: tuple[int, ...] = ()
        self.storages: list[NkiMemory] = []
        self.root = Block()
        self.block = self.root
        self.notes: list[str] = []
        self.registers: dict[str, Any] = {}
        self._shared: list[NkiMemory] = []
        self._shared_next = 0
        self._constants: dict[tuple[Any, ...], NkiMemory] = {}
        self.seed = 0
        self.allowed: set[Any] = set()
        """A cache of successful checks: a kernel repeats the same accesses many times."""
        self.run: Callable[[Block, NkiTensor], np.ndarray[Any, Any]] | None = None
        """A function that returns a tensor's values after a block ran; None if the arguments' values are unknown."""
        self.before: list[Block] = []
        """The blocks of the grid's programs so far; the recorder is recording the last one."""
        self.exchanged = False
        """Whether a program waits for another: the recorded order is then not the order of execution."""
        self._count = 0
        self.reduced: dict[tuple[Any, ...], Any] = {}
        self.indices: list[NkiLoopIndex] = []
        """The indices of the loops around the current instruction, outermost first."""

    def storage(
        self,
        shape: Iterable[int],
        dtype: np.dtype[Any],
        buffer: Buffer,
        *,
        value_dtype: np.dtype[Any] | None = None,
        name: str = "",
        initial: np.ndarray[Any, Any] | None = None,
        parameter: int | None = None,
        mutable: bool = True,
    ) -> NkiMemory:
        """Returns new memory. All programs of a grid share memory in shared_hbm, matched by the order of its creation."""
        shape = tuple(map(int, shape))
        if buffer is SHARED_HBM and parameter is None and math.prod(self.grid) > 1:
            place = self._shared_next
            self._shared_next += 1
            if place < len(self._shared):
                known = self._shared[place]
                if known.shape != shape or known.dtype != dtype:
                    raise NkiError(
                        "err_shared_hbm_differs",
                        f"the {place + 1}. tensor in shared_hbm is {shape} {dtype} here and {known.shape} {known.dtype} "
                        "in another program of the grid; all programs create the same ones in the same order",
                    )
                return known
        made = NkiMemory(
            len(self.storages), shape, dtype, value_dtype or dtype, buffer, name, initial, parameter, mutable=mutable
        )
        if parameter is None and initial is None:
            made.place = kernel_location()
        if buffer is PSUM:
            made.origin, made.written = Origin.NOTHING, False
        self.storages.append(made)
        if buffer is SHARED_HBM and parameter is None:
            self._shared.append(made)
        return made

    def constant(self, values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> NkiMemory:
        """Returns memory that holds constants; equal constants share it."""
        key = (values.shape, str(dtype), values.tobytes())
        if key not in self._constants:
            self._constants[key] = self.storage(values.shape, dtype, HBM, initial=values, mutable=False)
        return self._constants[key]

    def record(self, instruction: Instruction) -> None:
        self.block.items.append(instruction)
        if instruction.op not in PRODUCTS:
            for tensor in instruction.reads:
                tensor.storage.finished = True
        self._used(instruction.reads + instruction.writes)
        self._step()

    def note(self, text: str) -> None:
        """Adds a note on the kernel's current line, once."""
        file, line = kernel_location()
        note = f"{file}:{line}: {text}"
        if note not in self.notes:
            self.notes.append(note)

    def _step(self) -> None:
        self._count += 1
        if self._count > MOST_STEPS:
            raise NkiError(
                "err_too_many_instructions",
                f"the kernel has more than {MOST_STEPS:,} instructions and iterations of loops; does a loop end?",
            )

    def exchange(self, exchange: Exchange) -> None:
        self.exchanged = True
        self.block.items.append(exchange)
        self._used([t for t in (exchange.source, exchange.destination) if t is not None])
        self._step()

    def _used(self, tensors: Iterable[NkiTensor]) -> None:
        number = self._count
        for tensor in tensors:
            storage = tensor.storage
            if storage.first < 0:
                storage.first = number
            storage.last = max(storage.last, number)
            if tensor.dynamic:
                self._used([d.index for d in tensor.dynamic])

    def known(self, tensor: NkiTensor) -> np.ndarray[Any, Any]:
        """Returns a tensor's current values: it runs the instructions recorded so far.

        Raises:
            NkiError: the arguments' values are unknown, or programs of a grid have exchanged data.
        """
        if self.run is None:
            raise NkiError(
                "err_dynamic_loop_bound",
                "the bound of a loop is known at run time only, and HLO is made before; it is known where the kernel is "
                "called with arrays",
            )
        if self.exchanged:
            raise NkiError(
                "err_dynamic_loop_bound", "the bound of a loop is known at run time only, after programs exchanged data"
            )
        return self.run(Block([item for block in self.before for item in block.items]), tensor)

    def iterate(self, kind: str, values: Iterable[int]) -> Iterator[int]:
        """Yields the values; it records the instructions between two of them as an iteration of a loop."""
        outer = self.block
        loop = Loop(kind)
        outer.items.append(loop)
        try:
            for value in values:
                self._step()
                self.block = block = Block(begin=self._count)
                index = NkiLoopIndex(value)
                index.turn = len(loop.iterations)
                loop.iterations.append(block)
                self.indices.append(index)
                try:
                    yield index
                finally:
                    if self.indices and self.indices[-1] is index:
                        self.indices.pop()
                    else:  # a loop left by an exception or a break closes late
                        self.indices = [one for one in self.indices if one is not index]
                    block.end = self._count
        finally:
            self.block = outer

    @contextlib.contextmanager
    def one_program(self, program: tuple[int, ...], blocks: list[Block]) -> Iterator[None]:
        """Records one program of the grid into a new block, and adds the block to `blocks`."""
        outer = self.block
        self.program = program
        self._shared_next = 0
        self.registers = {}
        self.reduced = {}
        self.block = block = Block(begin=self._count)
        blocks.append(block)
        try:
            yield
        finally:
            block.end = self._count
            self.block = outer

    @contextlib.contextmanager
    def launch(self, grid: tuple[int, ...]) -> Iterator[Loop]:
        """Records the programs of another kernel that this kernel launches over a grid, as the iterations of a loop.

        Raises:
            NkiError: the kernel is launched over several programs itself.
        """
        if math.prod(self.grid) > 1:
            raise NkiError(
                "err_nested_grid",
                f"a kernel of a grid {self.grid} launches another one with a grid {grid}; give a grid to one of them only",
            )
        loop = Loop("grid")
        self.block.items.append(loop)
        kept = (self.grid, self.program, self._shared, self._shared_next, self.registers, self.reduced)
        self.grid, self._shared = grid, []
        try:
            yield loop
        finally:
            self.grid, self.program, self._shared, self._shared_next, self.registers, self.reduced = kept


_CURRENT: list[Recorder] = []


def current() -> Recorder:
    """Returns the recorder of the kernel that is being recorded.

    Raises:
        NkiError: no kernel is being recorded.
    """
    if not _CURRENT:
        raise NkiError("err_outside_kernel", "this function of NKI works inside a kernel only")
    return _CURRENT[-1]


def recording() -> bool:
    return bool(_CURRENT)


@contextlib.contextmanager
def recorded_by(recorder: Recorder) -> Iterator[Recorder]:
    """Makes a recorder the current one.

    While it is active, Python's cycle collector is off: it would walk the whole recording repeatedly.
    """
    _CURRENT.append(recorder)
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield recorder
    finally:
        _CURRENT.pop()
        if collecting:
            gc.enable()
