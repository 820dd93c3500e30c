"""A recorded kernel: memory, instructions and loops, in the order in which the kernel's Python code ran.

Recording runs the kernel once per program of its grid with concrete indices and without data. What is recorded is lowered later
(`lower`), after loops whose iterations are alike were rolled (`roll`).
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
    """A kind of memory: sbuf, psum, hbm, private_hbm or shared_hbm. Where in it a tensor is placed has no effect on values."""

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
"""Instructions and iterations that a kernel may have; recording so many takes some minutes and some gigabytes."""

MOST_FOLLOWED = 1 << 28
"""Elements of memory in HBM of which it is followed which are written."""

PRODUCTS = frozenset(("matmul", "accumulate"))
"""Instructions that read of PSUM what they add to."""


class Origin(IntEnum):
    """What put values into PSUM: a product can be added to what the tensor engine put there."""

    NOTHING = 0
    ZEROS = 1
    OTHER = 2
    TENSOR_ENGINE = 3


REGISTERS = Buffer("sbuf")
"""The registers of engines: instructions use them as tiles of SBUF, and they take nothing of it."""

SBUF, PSUM, HBM, PRIVATE_HBM, SHARED_HBM = map(Buffer, ("sbuf", "psum", "hbm", "private_hbm", "shared_hbm"))


@dataclass(eq=False, slots=True)
class NkiMemory:
    """A piece of memory.

    Attributes:
        shape: the number of elements per axis, row-major.
        dtype: what the kernel declared.
        value_dtype: what the values are in: float32 for results that the older generation leaves unrounded, else `dtype`.
        initial: None for memory that was never written (NaN where `value_dtype` is a float), or the values it begins with.
        parameter: the number of the kernel's tensor argument that it is, if it is one.
        written: which elements were written: False for none, True for all, else an array; None where it is not followed, which
            it is in PSUM and in new memory in HBM.
        origin: where what PSUM holds is from, an `Origin` for all of it or an array of them; None for other memory.
        finished: whether what products added up in it, memory in PSUM, was read since.
        sums: where products put something since then: offsets and dimensions.
        place: the kernel's file and line that made it.
        partition: which axis is the partitions'; those before it are block dimensions.
        address: where a partition's bytes begin that the kernel placed itself; None where it leaves that to the compiler.
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
        """What a tile of it takes of each of its partitions, in bytes; with block dimensions it is several tiles."""
        return math.prod(self.shape[self.partition + 1 :]) * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class Instruction:
    """One step of a program.

    Attributes:
        op: the name of its lowering (`lower.LOWERINGS`).
        reads, writes: the tensors it reads and writes.
        attributes: what else decides what it computes (`same_attributes`).
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


def same_attributes(one: Any, other: Any) -> bool:
    """Whether two instructions' attributes mean the same computation: 0.0 equals -0.0, which computes something else."""
    return one is other or bool(one == other and repr(one) == repr(other))


@dataclass(eq=False, slots=True)
class Block:
    items: list[Any] = field(default_factory=list)
    """Instructions, loops and exchanges in order; after `roll` rolled loops as well."""
    begin: int = 0
    end: int = 0
    """The numbers of its first instruction and of the first one after it."""


class NkiLoopIndex(int):
    """What a loop gives its body: a number that knows which iteration it is of, from 0. Equal ones of two loops are two objects."""

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
        source, destination: what is sent and where what is received goes.
        send_to, receive_from: numbers of programs.
    """

    kind: str
    source: NkiTensor | None = None
    destination: NkiTensor | None = None
    send_to: int = 0
    receive_from: int = 0


class Recorder:
    """Records one kernel.

    Args:
        older: whether the kernel is of the generation that imports `neuronxcc.nki`.
        targets: the targets whose limits are checked, all of them if none are given.
        grid: the number of programs per axis.
        check: whether the limits of the hardware are checked.
    """

    def __init__(
        self, *, older: bool = False, targets: tuple[str, ...] = (), grid: tuple[int, ...] = (), check: bool = True
    ) -> None:
        self.older = older
        self.targets_given = bool(targets)
        self.targets = targets or tuple(DEVICES)
        self.grid = grid
        self.check = check
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
        """What `checks` found to be within the limits: a kernel does the same many times."""
        self.run: Callable[[Block, NkiTensor], np.ndarray[Any, Any]] | None = None
        """What gives the values of a tensor after a block ran; None where the arguments' values are unknown."""
        self.before: list[Block] = []
        """The blocks of the programs of the grid so far, the last one being recorded."""
        self.exchanged = False
        """Whether a program waits for another, so that what is before is not what ran before."""
        self._count = 0
        self.reduced: dict[tuple[Any, ...], Any] = {}
        self.sums: set[Instruction] = set()
        """Instructions that add to a sum outside of PSUM, which is the first that they read."""
        self.loops: set[tuple[str, int]] = set()
        """The lines of the loops whose turns were looked at."""
        self.indices: list[NkiLoopIndex] = []
        """Those of the loops around what is recorded, outer ones first."""

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
        """Returns new memory; in a grid, what is in shared_hbm is the same for all programs, told by the order of its creation."""
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
        if buffer is PSUM:
            made.origin = Origin.NOTHING
        if parameter is None and initial is None:
            made.place = kernel_location()
            if buffer is PSUM or (buffer.is_hbm and made.size <= MOST_FOLLOWED):
                made.written = False
        self.storages.append(made)
        if buffer is SHARED_HBM and parameter is None:
            self._shared.append(made)
        return made

    def constant(self, values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> NkiMemory:
        """Returns memory that holds constants; equal ones share it."""
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
        """Notes something about the kernel's line that is recorded, once."""
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
        """Returns the values that a tensor has now, by running what is recorded so far.

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
        """Yields the values and records what happens between two of them as an iteration of a loop."""
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
                    else:  # a loop that was left by an exception or a break is closed late
                        self.indices = [one for one in self.indices if one is not index]
                    block.end = self._count
        finally:
            self.block = outer

    @contextlib.contextmanager
    def one_program(self, program: tuple[int, ...], blocks: list[Block]) -> Iterator[None]:
        """Records what one program of the grid does into a block of its own, which is added to `blocks`."""
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
        """Meanwhile programs of a grid are recorded that the kernel launches of another kernel; they are the iterations of a loop.

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

    Meanwhile Python's search for cycles is off: it would walk all that is recorded again and again.
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
