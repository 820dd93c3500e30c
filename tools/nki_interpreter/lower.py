"""Lowers a recorded program to JAX operations, instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_interpreter import indices, memory
from nki_interpreter.access import plan, strides_of
from nki_interpreter.dtypes import boolean, is_float, is_int
from nki_interpreter.errors import NkiError
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.program import Block, Exchange, Instruction, Loop, NkiMemory
from nki_interpreter.roll import RolledLoop, Varying, checks_indices
from nki_interpreter.tensors import NkiTensor, shown_of

Lowering = Callable[["Context", Instruction], None]
LOWERINGS: dict[str, Lowering] = {}

INSIDE = np.int32(-(2**31) + 1)
"""The result of an index check if all indices are inside the memory."""


def lowering(name: str, exact: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the lowering of an instruction: a function of the context and the instruction.

    It returns the value of the instruction's result, a tuple of several, or None if it wrote them. `exact`: see `converted`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def lowered(context: Context, instruction: Instruction) -> None:
            results = function(context, instruction)
            if results is not None:
                results = results if isinstance(results, tuple) else (results,)
                for tensor, value in zip(instruction.writes, results, strict=True):
                    context.write(tensor, fitted(value, tensor), exact=exact)

        LOWERINGS[name] = lowered
        return function

    return register


def fitted(value: Any, target: NkiTensor) -> Any:
    """Returns values in the destination's shape, if the number of elements agrees."""
    return value.reshape(target.shape) if value.shape != target.shape and value.size == target.size else value


def to_float(value: Any) -> Any:
    """Converts values to float32, in which the engines compute."""
    return value if value.dtype == np.float32 else lax.convert_element_type(value, np.float32)


def bits(value: Any, itemsize: int) -> Any:
    """Returns the bit patterns of integers as unsigned integers of `itemsize` bytes, zero-extended or truncated."""
    own = np.dtype(value.dtype)
    if own != boolean:
        value = lax.convert_element_type(value, np.dtype(f"u{own.itemsize}") if is_int(own) else np.uint32)
    return lax.convert_element_type(value, np.dtype(f"u{itemsize}"))


def converted(value: Any, dtype: np.dtype[Any], exact: bool = False) -> Any:
    """Converts values to a dtype through float32, as engines and DMA do: rounded to nearest even, integers saturating.

    With `exact`, integers converted to other integers keep their bits, for results of operations on bits and integers.
    """
    own = np.dtype(value.dtype)
    if own == dtype:
        return value
    if dtype == boolean:
        return value != 0
    if is_int(dtype) and own != boolean and not (exact and is_int(own)) and not _holds_all(dtype, own):
        info = np.iinfo(dtype)
        rounded = lax.round(to_float(value), lax.RoundingMethod.TO_NEAREST_EVEN)
        # The greatest float32 below the limit: the limit itself may round up to a number above it.
        highest = np.nextafter(np.float32(info.max), np.float32(0)) if info.max >= 1 << 24 else np.float32(info.max)
        clamped = lax.clamp(np.float32(info.min), rounded, highest)
        result = lax.convert_element_type(clamped, dtype)
        if info.max >= 1 << 24:
            result = jnp.where(rounded >= np.float32(info.max), np.asarray(info.max, dtype), result)
        return result
    return lax.convert_element_type(value, dtype)


def _holds_all(dtype: np.dtype[Any], own: np.dtype[Any]) -> bool:
    """Returns whether `dtype` and float32 both represent every integer of `own`."""
    return is_int(own) and own.itemsize < 4 and np.can_cast(own, dtype)


class Context:
    """The values that lowerings read and write.

    Args:
        parameters: the values of the kernel's tensor arguments, in order.
        checking: whether to check indices at run time. `checks` then holds the results: the first index out of range,
            or `INSIDE`, and the number of its entry in `places`.

    Attributes:
        places: for each index check the number of elements, and the kernel's line.
    """

    def __init__(self, parameters: Sequence[Any], checking: bool = False) -> None:
        self.parameters = parameters
        self.checking = checking
        self.values: dict[int, Any] = {}
        self.variables: dict[int, Any] = {}
        self.checks: list[tuple[Any, Any]] = []
        self.places: list[tuple[int, str]] = []

    def memory(self, storage: NkiMemory) -> Any:
        """Returns the current values of a storage, in its shape."""
        if storage.number not in self.values:
            self.values[storage.number] = self._initial(storage)
        return self.values[storage.number]

    def _initial(self, storage: NkiMemory) -> Any:
        if storage.parameter is not None:
            return jnp.asarray(self.parameters[storage.parameter]).reshape(storage.shape)
        if storage.initial is not None:
            first = storage.initial.reshape(-1)[:1]
            if storage.initial.size > 1 and storage.initial.tobytes() == first.tobytes() * storage.initial.size:
                return lax.full(storage.shape, first[0].astype(storage.value_dtype), storage.value_dtype)
            return jnp.asarray(storage.initial.astype(storage.value_dtype).reshape(storage.shape))
        blank = np.nan if is_float(storage.value_dtype) else 0
        return lax.full(storage.shape, np.asarray(blank, storage.value_dtype), storage.value_dtype)

    def offset(self, tensor: NkiTensor) -> tuple[Any, list[Any] | None]:
        """Returns the offset of a view, and the starts of its plan's slices if a loop changes them."""
        if not tensor.varying:
            return tensor.offset, None
        starts: list[Any] | None = None
        total: Any = tensor.offset
        for loop, coefficient, steps in tensor.varying:
            variable = self.variables[loop]
            total = total + coefficient * variable
            if steps is not None:
                starts = starts or [0] * len(steps)
                starts = [s + step * variable if step else s for s, step in zip(starts, steps, strict=True)]
        return total, starts

    def integer(self, value: Any) -> Any:
        """Returns an integer of an instruction; a rolled loop may change it."""
        if isinstance(value, Varying):
            return sum((step * self.variables[loop] for loop, step in value.parts), start=value.start)
        return value

    def _starts(self, tensor: NkiTensor, values: Any) -> list[Any] | None:
        _offset, moved = self.offset(tensor)
        if moved is None:
            return None
        found = plan(values.shape, tensor.offset, tensor.dims)
        if found is None:
            return None
        return [axis.start + by for axis, by in zip(found.axes, moved, strict=True)]

    def read(self, tensor: NkiTensor) -> Any:
        """Returns the elements of a view, in its shape; elements outside the memory have no particular value."""
        return self.read_checked(tensor)[0]

    def read_checked(self, tensor: NkiTensor) -> tuple[Any, Any]:
        """Returns the elements of a view and, if its indices are known at run time only, which of them are inside (else None)."""
        values = self.memory(tensor.storage)
        if tensor.cast is not None:
            values = memory.bitcast(values, tensor.cast)
        if tensor.dynamic:
            return self._read_dynamic(tensor, values)
        if tensor.gather is not None:
            size = values.size
            flat = np.clip(tensor.gather, 0, size - 1).astype(np.int32)
            return _taken(values, flat), None
        if tensor.valid is not None:
            shown = np.broadcast_to(tensor.valid, tensor.shape)
            found = indices.box(shown)
            if found is None:
                offset, _ = self.offset(tensor)
                flat = jnp.clip(memory.flat_indices(tensor.dims, offset), 0, values.size - 1)
                return _taken(values, flat), None
            inner = _boxed(tensor, found)
            if 0 in inner.shape:
                return jnp.zeros(tensor.shape, values.dtype), None
            part = memory.read(values, inner.dims, inner.offset)
            blank = np.asarray(np.nan if is_float(np.dtype(values.dtype)) else 0, values.dtype)
            edges = [(low, n - high, 0) for (low, high), n in zip(found, tensor.shape, strict=True)]
            return lax.pad(part, blank, edges), None
        starts = self._starts(tensor, values)
        if tensor.varying and starts is None:
            offset, _ = self.offset(tensor)
            return _taken(values, memory.flat_indices(tensor.dims, offset)), None
        return memory.read(values, tensor.dims, tensor.offset, starts), None

    def write(self, tensor: NkiTensor, value: Any, ok: Any = None, exact: bool = False) -> None:
        """Writes values to the elements of a view that its mask shows, in the memory's dtype (see `converted`)."""
        storage = tensor.storage
        values = self.memory(storage)
        if tensor.cast is not None:
            values = memory.bitcast(values, tensor.cast)
        value = converted(jnp.asarray(value), np.dtype(values.dtype), exact)
        if value.shape != tensor.shape:
            value = jnp.broadcast_to(value, tensor.shape)
        shown = shown_of(tensor)
        result = self._written(tensor, values, value, shown, ok)
        if tensor.cast is not None:
            result = memory.bitcast(result, storage.value_dtype)
        self.values[storage.number] = result

    def _written(self, tensor: NkiTensor, values: Any, value: Any, shown: Any, ok: Any) -> Any:
        if tensor.dynamic:
            flat, inside = self._flat(tensor)
            if shown is not None:
                inside = inside & shown
            if ok is not None:
                inside = inside & ok
            return _put(values, *_kept_in(values, flat.reshape(-1), value.reshape(-1), inside.reshape(-1)))
        if tensor.gather is not None:
            taken = np.ones(tensor.shape, np.bool_) if shown is None else np.broadcast_to(shown, tensor.shape)
            if ok is not None:
                value = jnp.where(ok, value, self.read(tensor))
            flat = tensor.gather[taken].astype(np.int32)
            places = np.flatnonzero(taken)
            return _put(values, flat, value.reshape(-1)[places])
        if shown is not None:
            full = np.broadcast_to(shown, tensor.shape)
            found = indices.box(full)
            if found is not None:
                inner = _boxed(tensor, found)
                if 0 in inner.shape:
                    return values
                value = lax.slice(value, [a for a, _ in found], [b for _, b in found])
                tensor = inner
                if ok is not None:
                    ok = lax.slice(jnp.broadcast_to(ok, full.shape), [a for a, _ in found], [b for _, b in found])
            else:
                ok = full if ok is None else ok & full
        if ok is not None:
            value = jnp.where(ok, value, self.read(tensor.replaced(valid=None, mask=None)))
        starts = self._starts(tensor, values)
        if tensor.varying and starts is None:
            offset, _ = self.offset(tensor)
            flat = memory.flat_indices(tensor.dims, offset).reshape(-1)
            return _put(values, flat, value.reshape(-1))
        return memory.write(values, tensor.dims, tensor.offset, value, starts)

    def _flat(self, tensor: NkiTensor) -> tuple[Any, Any]:
        """Returns the number of every element of a view with run-time indices, and which of them are inside the memory."""
        offset, _ = self.offset(tensor)
        flat = tensor.gather.astype(np.int32) if tensor.gather is not None else memory.flat_indices(tensor.dims, offset)
        inside: Any = jnp.ones((), np.bool_)
        for dynamic in tensor.dynamic:
            index = self.read(dynamic.index).astype(np.int32).reshape(dynamic.shape)
            inside = inside & (index >= 0) & (index < dynamic.limit)
            flat = flat + index * dynamic.stride
        return flat, jnp.broadcast_to(inside, flat.shape)

    def _read_dynamic(self, tensor: NkiTensor, values: Any) -> tuple[Any, Any]:
        if (part := self._read_named(tensor, values)) is not None:
            return part
        flat, inside = self._flat(tensor)
        if tensor.valid is not None:
            inside = inside & tensor.valid
        return _taken(values, jnp.clip(flat, 0, values.size - 1)), inside

    def _read_named(self, tensor: NkiTensor, values: Any) -> tuple[Any, Any] | None:
        """Does `_read_dynamic` with one slice, for a view that lies inside one step of the axis that the only index selects."""
        if len(tensor.dynamic) != 1 or tensor.gather is not None or tensor.valid is not None:
            return None
        (dynamic,) = tensor.dynamic
        found = plan(values.shape, tensor.offset, tensor.dims)
        if found is None or dynamic.index.size != 1:
            return None
        starts = self._starts(tensor, values) if tensor.varying else [axis.start for axis in found.axes]
        if starts is None:
            return None
        for place, (axis, stride) in enumerate(zip(found.axes, strides_of(found.shape), strict=True)):
            within = isinstance(starts[place], int) and starts[place] == 0 and not axis.parts
            if within and (stride, axis.size) == (dynamic.stride, dynamic.limit):
                starts[place] = self.read(dynamic.index).astype(np.int32).reshape(())
                inside = (starts[place] >= 0) & (starts[place] < dynamic.limit)
                values = memory.read(values, tensor.dims, tensor.offset, starts)
                return values, jnp.broadcast_to(inside, tensor.shape)
        return None

    def check_indices(self, tensor: NkiTensor, where: str) -> None:
        """Records the first index of a view outside the memory; `simulate` reports it."""
        if not self.checking or not tensor.dynamic:
            return
        flat, _ = self._flat(tensor)
        shown = shown_of(tensor)
        size = int(np.prod(tensor.storage.shape))
        bad = (flat < 0) | (flat >= size)
        if shown is not None:
            bad = bad & shown
        first = jnp.argmax(bad.reshape(-1))
        worst = jnp.where(jnp.any(bad), flat.reshape(-1)[first], INSIDE)
        self.checks.append((worst, np.int32(len(self.places))))
        self.places.append((size, where))

    def run(self, block: Block) -> None:
        for item in block.items:
            if isinstance(item, Instruction):
                function = LOWERINGS[item.op]
                try:
                    function(self, item)
                except NkiError:
                    raise
                except (TypeError, ValueError) as error:
                    problem = NkiError("err_lowering", f"{item.op} can't be lowered: {error}")
                    problem.file, problem.line = item.file, item.line
                    problem.args = (f"{item.file}:{item.line}: err_lowering: {item.op} can't be lowered: {error}",)
                    raise problem from error
            elif isinstance(item, RolledLoop):
                self._run_rolled(item)
            elif isinstance(item, Loop):
                for iteration in item.iterations:
                    self.run(iteration)
            elif isinstance(item, Exchange):
                raise AssertionError("exchanges are resolved before lowering")

    def _run_rolled(self, loop: RolledLoop) -> None:
        carried = list(loop.carried)
        initial = tuple(self.memory(storage) for storage in carried)
        for storage in loop.read:
            self.memory(storage)
        outside, checks = dict(self.values), self.checks
        # The result of the checks in earlier iterations, if indices are checked.
        none = ((INSIDE, np.int32(0)),) if self.checking and any(map(checks_indices, loop.body.items)) else ()

        def body(variable: Any, state: tuple[tuple[Any, ...], Any]) -> tuple[tuple[Any, ...], Any]:
            values, found = state
            self.values = dict(outside)
            self.values.update({s.number: v for s, v in zip(carried, values, strict=True)})
            self.variables[loop.number] = variable
            self.checks = list(found)
            self.run(loop.body)
            return tuple(self.values[s.number] for s in carried), _first_outside(self.checks)

        results, found = lax.fori_loop(0, loop.count, body, (initial, none))
        self.values = outside
        self.checks = [*checks, *found]
        self.variables.pop(loop.number, None)
        self.values.update({s.number: v for s, v in zip(carried, results, strict=True)})


def _first_outside(checks: Sequence[tuple[Any, Any]]) -> tuple[tuple[Any, Any], ...]:
    """Returns the first of several checks that found an index outside, else the last one, as a tuple; empty for no checks."""
    if not checks:
        return ()
    worst, place = checks[-1]
    for before, its_place in reversed(checks[:-1]):
        outside = before != INSIDE
        worst, place = jnp.where(outside, before, worst), jnp.where(outside, its_place, place)
    return ((worst, place),)


def _taken(values: Any, flat: Any) -> Any:
    """Returns the elements at these places of the flattened values, all of them inside."""
    return values.reshape(-1).at[flat].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _put(values: Any, flat: Any, new: Any) -> Any:
    """Returns values with new ones at these places of the flattened values, all of them inside."""
    elements = values.reshape(-1).at[flat]
    return elements.set(new, mode="promise_in_bounds", wrap_negative_indices=False).reshape(values.shape)


def _kept_in(values: Any, flat: Any, new: Any, inside: Any) -> tuple[Any, Any]:
    """Returns places and new values of which none is outside: those not `inside` repeat the first one that is.

    A device has no place for what it should leave out: it ends with NRT_EXEC_OOB. If none is inside, all write the first
    element's own value.
    """
    first = jnp.min(jnp.where(inside, lax.iota(np.int32, flat.size), np.int32(flat.size)))
    is_none, first = first == flat.size, jnp.minimum(first, np.int32(flat.size - 1))
    index, element = (lax.dynamic_index_in_dim(x, first, keepdims=False) for x in (flat, new))
    index = jnp.where(is_none, np.int32(0), index)
    element = jnp.where(is_none, values.reshape(-1)[0], element)
    return jnp.where(inside, flat, index), jnp.where(inside, new, element)


def _boxed(tensor: NkiTensor, bounds: tuple[tuple[int, int], ...]) -> NkiTensor:
    offset = tensor.offset + sum(s * low for (s, _), (low, _) in zip(tensor.dims, bounds, strict=True))
    dims = tuple((s, high - low) for (s, _), (low, high) in zip(tensor.dims, bounds, strict=True))
    return tensor.replaced(offset=offset, dims=dims, valid=None, mask=None)


def masked(value: Any, tensor: NkiTensor, neutral: Any) -> Any:
    """Returns values with a neutral value in place of the elements that the tensor's mask excludes."""
    shown = shown_of(tensor)
    return value if shown is None else jnp.where(shown, value, jnp.asarray(neutral, value.dtype))
