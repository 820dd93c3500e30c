"""Kernels as objects: `nki.jit` and its relatives, the recording of a kernel, and its execution on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nki_interpreter import checks, tensors
from nki_interpreter import indexing as indexing  # it registers what indexing a tensor does
from nki_interpreter.devices import DEVICES
from nki_interpreter.dtypes import dtype_of
from nki_interpreter.errors import NkiError, NkiTypeError
from nki_interpreter.operators import assign
from nki_interpreter.program import (
    HBM,
    SBUF,
    SHARED_HBM,
    Block,
    Exchange,
    Loop,
    NkiMemory,
    Recorder,
    current,
    recorded_by,
    recording,
)
from nki_interpreter.roll import BOUND, Roller
from nki_interpreter.standing_in import interpreter
from nki_interpreter.tensors import NkiTensor

if TYPE_CHECKING:
    from nki_interpreter.lower import Context


@dataclass(frozen=True, eq=False)
class RecordedKernel:
    """A kernel recorded for arguments of certain shapes.

    Attributes:
        block: the recorded program, loops rolled.
        parameters: the storages of the tensor arguments, in order.
        names, arguments: the kernel's names for these arguments, and their values.
        results: the tensors that the kernel returns, or writes as arguments.
        aliases: for each result the number of its parameter, or None for new memory.
        structure: the kernel's return value, with result numbers in place of tensors.
        notes: remarks on the lowering ("a loop of 32 iterations is rolled").
        storages: all memory that the kernel uses.
        older: whether the kernel uses the older NKI.
    """

    block: Block
    parameters: tuple[NkiMemory, ...]
    names: tuple[str, ...]
    arguments: tuple[Any, ...]
    results: tuple[NkiTensor, ...]
    aliases: tuple[int | None, ...]
    structure: Any
    notes: tuple[str, ...]
    storages: tuple[NkiMemory, ...]
    older: bool

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """Returns the results for arrays; JAX may trace the arrays."""
        return self.run(arrays, False)[0]

    def run(self, arrays: Sequence[Any], checking: bool) -> tuple[tuple[Any, ...], Context]:
        """Returns the results for arrays, and the lowering context, which holds the index checks."""
        from nki_interpreter.lower import Context

        context = Context(arrays, checking)
        context.run(self.block)
        values = tuple(context.read(tensor) for tensor in self.results)
        return values, context


def record(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    older: bool,
    grid: tuple[int, ...] = (),
    targets: tuple[str, ...] = (),
    bound: int = BOUND,
    values: bool = False,
) -> RecordedKernel:
    """Runs a kernel's Python code and records its instructions.

    Args:
        function: the kernel.
        args: the kernel's arguments. Arrays (or anything with shape and dtype) become tensors in HBM, also inside
            lists, tuples, dictionaries and dataclasses; other values are passed unchanged.
        kwargs: the kernel's arguments by name.
        older: whether the kernel imports `neuronxcc.nki`.
        grid: the number of programs per axis.
        targets: the targets whose limits are checked; all targets if none are given.
        bound: the most instructions of a loop that stays unrolled.
        values: whether to use the arrays' values, for loop bounds in memory. The recording is then valid for these values only.

    Raises:
        NkiError: the kernel breaks a rule.
    """
    recorder = Recorder(older=older, targets=targets, grid=grid)
    annotations = getattr(function, "__annotations__", {})
    mutable = {name for name, kind in annotations.items() if "mutable" in str(kind)}
    # The newer generation has no annotation for mutable arguments: an argument that the kernel writes is a result.
    all_mutable = not older or not _returns(function)
    given: list[tuple[str, Any]] = []
    parameters: list[NkiMemory] = []

    def tensor(value: Any, name: str) -> Any:
        if not _is_array(value):
            return value
        if value.shape == () and "tensor" not in str(annotations.get(name)):
            return np.asarray(value)[()]
        if isinstance(value, BlankOutput):
            return tensors.new(value.shape, value.dtype, HBM, name=name)
        storage = recorder.storage(
            value.shape,
            dtype_of(value.dtype),
            SHARED_HBM,
            name=name,
            parameter=len(parameters),
            mutable=all_mutable or name in mutable,
        )
        given.append((name, value))
        parameters.append(storage)
        return tensors.whole(storage)

    if values:
        recorder.run = lambda block, wanted: _after([value for _, value in given], block, wanted)
    with recorded_by(recorder), interpreter():  # a kernel may import while it runs
        bound_arguments = _bound(function, args, kwargs)
        arguments = bound_arguments.arguments
        arguments.update((name, _mapped(value, tensor, name)) for name, value in arguments.items())
        returned: Any = None
        for number, program in enumerate(itertools.product(*(range(n) for n in grid))):
            with recorder.one_program(program, recorder.before):
                got = function(*bound_arguments.args, **bound_arguments.kwargs)
            returned = got if number == 0 else returned
        structure, results = _returned(returned)
        checks.results(recorder, results)
        if not results:
            structure = None
            blank = [t for t in arguments.values() if isinstance(t, NkiTensor) and t.storage.parameter is None]
            results = [t for t in blank if t.storage.stored]
        returned_storages = {t.storage.number for t in results}
        results += [tensors.whole(s) for s in parameters if s.stored and s.number not in returned_storages]
        if not results:
            raise NkiError("err_no_result", "the kernel returns no tensor and writes none of its arguments")
        checks.memory(recorder)
        block = _scheduled(recorder.before)
    roller = Roller(bound)
    rolled = roller.roll(block, frozenset(s.number for s in (*parameters, *(t.storage for t in results))))
    return RecordedKernel(
        rolled,
        tuple(parameters),
        tuple(name for name, _ in given),
        tuple(value for _, value in given),
        tuple(results),
        tuple(t.storage.parameter if t.storage.stored else None for t in results),
        structure,
        tuple(dict.fromkeys([*recorder.notes, *roller.notes])),
        tuple(recorder.storages),
        older,
    )


def _after(arrays: Sequence[Any], block: Block, tensor: NkiTensor) -> np.ndarray[Any, Any]:
    """Returns a tensor's values after a block ran with the kernel's arrays."""
    from nki_interpreter.lower import Context

    context = Context([np.asarray(a).astype(dtype_of(a.dtype)) for a in arrays])
    context.run(block)
    return np.asarray(context.read(tensor))


@dataclass(frozen=True)
class BlankOutput:
    """An output that a kernel receives as an argument: memory that was never written."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def blank_outputs(kernel: NkiKernel, results: Any) -> list[BlankOutput]:
    """Returns the outputs that a kernel of the first generation takes as arguments after its inputs."""
    if results is None or not kernel.older or _returns(kernel.function):
        return []
    return [BlankOutput(tuple(shape), dtype_of(dtype)) for shape, dtype in results]


def imports_older(function: Callable[..., Any]) -> bool:
    """Returns whether an undecorated function's module imports `neuronxcc.nki`."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return any(str(getattr(value, "__name__", "")).startswith("neuronxcc.nki") for value in names.values())


def _bound(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        place = (code.co_filename, code.co_firstlineno) if code else None
        raise NkiTypeError("err_arguments", f"{getattr(function, '__name__', 'the kernel')}: {error}", place) from None
    bound.apply_defaults()
    return bound


def _returns(function: Callable[..., Any]) -> bool:
    """Returns whether a function's own code returns a value; otherwise its outputs are among its parameters."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    import dis

    last = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        if instruction.opname == "RETURN_VALUE" and not (
            last is not None and last.opname == "LOAD_CONST" and last.argval is None
        ):
            return True
        last = instruction
    return False


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic | type | NkiTensor)


@dataclass(frozen=True)
class _Result:
    """The place of a result in what a kernel returns."""

    number: int


def _mapped(value: Any, function: Callable[[Any, str], Any], name: str = "") -> Any:
    """Returns `function(item, name)` for a value, or for the items of tuples, lists, dictionaries and dataclasses."""
    changed: Any
    if isinstance(value, tuple | list):
        items = [_mapped(item, function, f"{name}.{i}") for i, item in enumerate(value)]
        changed = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value if all(a is b for a, b in zip(value, changed, strict=True)) else changed
    if isinstance(value, dict):
        return {key: _mapped(item, function, f"{name}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type | NkiTensor | _Result | BlankOutput):
        changed = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if field.init and (new := _mapped(item, function, f"{name}.{field.name}")) is not item:
                changed[field.name] = new
        return dataclasses.replace(value, **changed) if changed else value
    return function(value, name)


def _returned(value: Any) -> tuple[Any, list[NkiTensor]]:
    """Returns what a kernel returned with results in place of tensors, and the tensors."""
    results: list[NkiTensor] = []

    def result(item: Any, name: str) -> Any:
        if not isinstance(item, NkiTensor):
            return item
        results.append(item)
        return _Result(len(results) - 1)

    return _mapped(value, result), results


def _scheduled(blocks: list[Block]) -> Block:
    """Returns one block for all programs: one after the other, or in lockstep between points of data exchange."""
    if len(blocks) == 1:
        return (
            Block([item for item in _flattened(blocks[0].items) if not isinstance(item, Exchange)])
            if _exchanges(blocks[0].items)
            else blocks[0]
        )
    if not any(_exchanges(block.items) for block in blocks):
        return Block([Loop("grid", blocks)])
    lists = [_flattened(block.items) for block in blocks]
    result = Block()
    while any(lists):
        waiting: list[Exchange | None] = []
        for items in lists:
            while items and not isinstance(items[0], Exchange):
                result.items.append(items.pop(0))
            waiting.append(items.pop(0) if items else None)
        _exchanged(waiting, result)
    return result


def _exchanges(items: Sequence[Any]) -> bool:
    return any(
        isinstance(item, Exchange) or (isinstance(item, Loop) and any(_exchanges(b.items) for b in item.iterations))
        for item in items
    )


def _flattened(items: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in items:
        if isinstance(item, Loop) and _exchanges([item]):
            for block in item.iterations:
                flat += _flattened(block.items)
        else:
            flat.append(item)
    return flat


def _exchanged(waiting: list[Exchange | None], result: Block) -> None:
    kinds = {e.kind for e in waiting if e is not None}
    if len(kinds) > 1 or (None in waiting and kinds):
        raise NkiError("err_exchange_mismatch", "the programs of the grid don't reach the same barriers and exchanges")
    if kinds != {"sendrecv"}:
        return
    recorder = Recorder()
    recorder.block = result
    with recorded_by(recorder):
        copies = []
        for number, exchange in enumerate(waiting):
            assert exchange is not None and exchange.destination is not None
            sender = waiting[exchange.receive_from]
            if sender is None or sender.send_to != number or sender.source is None:
                raise NkiError("err_exchange_mismatch", f"program {number} receives from one that does not send to it")
            copies.append((exchange.destination, sender.source))
        # All programs read before any program writes.
        received = []
        for number, (destination, source) in enumerate(copies):
            storage = NkiMemory(-1 - number - len(result.items) * 64, source.shape, source.dtype, source.dtype, SBUF)
            tile = tensors.whole(storage)
            assign(tile, source)
            received.append((destination, tile))
        for destination, tile in received:
            assign(destination, tile)


class NkiKernel:
    """The kernel that `nki.jit` returns. A call with arrays runs it; a call from another kernel inlines it."""

    def __init__(
        self, function: Callable[..., Any], *, older: bool, grid: tuple[int, ...] = (), **options: Any
    ) -> None:
        self.function = getattr(function, "function", function)
        self.older = older
        self.grid = grid
        self.options = options
        functools.update_wrapper(self, self.function)

    @property
    def func(self) -> Callable[..., Any]:
        return self.function

    def __getitem__(self, grid: Any) -> NkiKernel:
        sizes = tuple(int(n) for n in grid) if isinstance(grid, tuple | list) else (int(grid),)
        return NkiKernel(self.function, older=self.older, grid=sizes, **self.options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not recording():
            return simulate(self, *args, **kwargs)
        if not self.grid:
            return self.function(*args, **kwargs)
        recorder = current()
        returned: Any = None
        with recorder.launch(self.grid) as loop:
            for number, program in enumerate(itertools.product(*(range(n) for n in self.grid))):
                with recorder.one_program(program, loop.iterations):
                    got = self.function(*args, **kwargs)
                returned = got if number == 0 else returned
        if _exchanges([loop]):
            recorder.block.items[-1:] = _scheduled(loop.iterations).items
        return returned

    @property
    def target(self) -> str:
        given = str(self.options.get("platform_target") or self.options.get("target") or "trn2")
        of_generation = {device.generation.name: name for name, device in reversed(DEVICES.items())}
        given = of_generation.get(given, given)
        return given if given in DEVICES else "trn2"


def record_kernel(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, older: bool | None = None, **options: Any
) -> RecordedKernel:
    """Records a kernel object or a plain function (see `record`)."""
    if isinstance(kernel, NkiKernel):
        options.setdefault("targets", (kernel.target,))
        return record(
            kernel.function, args, kwargs, older=kernel.older if older is None else older, grid=kernel.grid, **options
        )
    return record(kernel, args, kwargs, older=bool(older), **options)


def simulate(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a kernel on the CPU and returns its results as NumPy arrays; it updates arguments that the kernel writes.

    Raises:
        IndexError: an index known only at run time is out of range.
    """
    from nki_interpreter import steps
    from nki_interpreter.lower import INSIDE

    recorded = record_kernel(kernel, args, kwargs, values=True)
    arrays = [np.asarray(a).astype(s.dtype) for a, s in zip(recorded.arguments, recorded.parameters, strict=True)]
    values, found = steps.run(recorded, arrays)
    for worst, (size, place) in found:
        if worst != INSIDE:
            error = IndexError(f"index {worst} is out of bounds for axis 0 with size {size}")
            error.add_note(f"{place}: a tile of indices names an element that is not there")
            raise error
    outputs = [np.array(value) for value in values]
    for output, alias in zip(outputs, recorded.aliases, strict=True):
        given = None if alias is None else recorded.arguments[alias]
        if isinstance(given, np.ndarray) and given.flags.writeable:
            given[...] = output.reshape(given.shape).astype(given.dtype)

    def result(value: Any, name: str) -> Any:
        return outputs[value.number] if isinstance(value, _Result) else value

    return _mapped(recorded.structure, result)


def decorator(older: bool) -> Callable[..., Any]:
    """Returns a decorator that works bare or with options."""

    def jit(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda f: NkiKernel(f, older=older, **options)
        return NkiKernel(function, older=older, **options)

    return jit
