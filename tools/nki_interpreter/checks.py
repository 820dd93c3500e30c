"""Checks the limits of the hardware and the rules of NKI while the interpreter records a kernel.

Sources: AWS's documentation of NKI's errors and of the sizes of SBUF and PSUM.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nki_interpreter import devices
from nki_interpreter.dtypes import bfloat16, float8_e4m3, float8_e5m2, float32, is_float
from nki_interpreter.elementwise import BITWISE, op_name
from nki_interpreter.errors import NkiError, NkiIndexError, NkiTypeError, NkiValueError
from nki_interpreter.program import PSUM, SBUF, Buffer, NkiMemory, Recorder, current
from nki_interpreter.tensors import NkiTensor

PARTITIONS = devices.PARTITIONS
PSUM_BANKS = devices.PSUM_BANKS
PSUM_BANK_BYTES = devices.PSUM_BANK_BYTES
STATIONARY_FREE = 128
MOVING_FREE = 512
BN_STATS_FREE = 512


GENERATIONS = {name: device.generation for name, device in devices.DEVICES.items()}


def needs(version: devices.nc_version, what: str, code: str = "") -> None:
    """Requires a generation of the hardware. Without a target, every feature is allowed.

    Args:
        version: the first generation that has the feature.
        what: the feature.
        code: the error code of AWS's compiler, if known ("NCC_IBIR530").

    Raises:
        NkiValueError: a target of the kernel is of an earlier generation.
    """
    recorder = current()
    if recorder.targets_given:
        for target in recorder.targets:
            if GENERATIONS[target] < version:
                shown = f" ({code})" if code else ""
                raise NkiValueError(
                    "err_unsupported_on_target",
                    f"{what} needs NeuronCore-v{int(version)} or newer, and {target} has v{int(GENERATIONS[target])}{shown}",
                )


def _devices() -> list[devices.Device]:
    """Returns the kernel's targets."""
    return [devices.DEVICES[target] for target in current().targets]


def sbuf_bytes() -> int:
    """Returns the smallest number of usable SBUF bytes per partition among the kernel's targets."""
    return devices.DEVICES[_smallest()].sbuf_bytes


def _smallest() -> str:
    """Returns the kernel's target with the least SBUF."""
    return min(current().targets, key=lambda target: devices.DEVICES[target].sbuf_bytes)


def tile(tensor: NkiTensor) -> None:
    """Requires that a tile fits in SBUF or PSUM: at most 128 partitions, one bank of PSUM, SBUF's bytes."""
    recorder = current()
    if tensor.buffer.is_hbm:
        return
    known = (tensor.dims, tensor.partition, tensor.dtype, tensor.buffer, tensor.storage.address)
    if known in recorder.allowed:
        return
    shape = tensor.shape
    if len(shape) < 2:
        raise NkiValueError(
            "err_tensor_rank_too_small", f"a tile in {tensor.buffer} has 2 dimensions at least, not {list(shape)}"
        )
    if shape[tensor.partition] > PARTITIONS:
        raise NkiValueError(
            "err_num_partition_exceed_arch_limit",
            f"number of partitions {shape[tensor.partition]} exceeds the hardware limit {PARTITIONS}",
        )
    width = math.prod(shape[tensor.partition + 1 :]) * tensor.dtype.itemsize
    if tensor.storage.address is not None:  # the end of the tile
        width = max(width, tensor.storage.address + tensor.storage.bytes_per_partition)
    if tensor.buffer.kind == "sbuf" and width > sbuf_bytes():
        raise NkiValueError(
            "err_sbuf_exceed_arch_limit",
            f"a tile of {width} bytes per partition exceeds the {sbuf_bytes()} of {_smallest()}'s SBUF",
        )
    if tensor.buffer.kind == "psum" and width > PSUM_BANKS * PSUM_BANK_BYTES:
        raise NkiValueError(
            "err_psum_exceed_arch_limit",
            f"a tile of {width} bytes per partition exceeds the {PSUM_BANKS} banks of {PSUM_BANK_BYTES} bytes of PSUM",
        )
    recorder.allowed.add(known)


def writable(tensor: NkiTensor) -> None:
    if tensor.storage.parameter is not None and not tensor.storage.mutable:
        raise NkiError(
            "err_mutable_annotation_needed",
            f"the kernel writes to its argument '{tensor.name}'; annotate it with nki.typing.mutable_tensor and return it",
        )


def inside(tensor: NkiTensor) -> None:
    """Requires that a mask excludes the elements of a view that are outside the memory."""
    if tensor.valid is None:
        return
    outside = ~tensor.valid if tensor.mask is None else tensor.mask & ~tensor.valid
    if outside.any():
        shape = tensor.storage.shape
        raise NkiIndexError(
            "err_access_out_of_bounds",
            f"an access of shape {tensor.shape} goes past the end of a tensor of {shape}; mask it or shorten it",
        )


def partitions_agree(operands: Sequence[NkiTensor], shape: tuple[int, ...]) -> None:
    if current().older:
        return
    for operand in operands:
        if operand.ndim == len(shape) and operand.shape[0] != shape[0]:
            raise NkiValueError(
                "err_cannot_broadcast_partition",
                f"{operand.shape[0]} partitions can't be broadcast to {shape[0]}: only free dimensions are; "
                "use broadcast_to",
            )


def operand_on_chip(tensor: NkiTensor, what: str) -> None:
    if not tensor.on_chip:
        if tensor.storage.initial is None:
            raise NkiTypeError(
                "err_unsupported_memory",
                f"an operand of {what} is in {tensor.buffer}; load it into SBUF first",
            )
    elif tensor.offset:
        start_partition(tensor, what)
    if tensor.dynamic and not current().older:
        static_address(what)


def start_partition(tensor: NkiTensor, what: str) -> None:
    """Requires that an access starts at partition 0, 32, 64 or 96; at 0 or 64 for more than 32 partitions, at 0 for more than 64.

    Source: AWS's guide to the architecture of Trainium and Inferentia2, "Partition-dimension access patterns". The
    compiler of the older generation places tiles itself, so this does not check parts of its tiles.
    """
    recorder = current()
    if recorder.older or tensor.gather is not None or tensor.dynamic or not tensor.dims:
        return
    row = tensor.storage.bytes_per_partition
    stride, count = tensor.dims[0]
    if not stride:
        count = 1
    if count > 1 and stride * tensor.dtype.itemsize != row:
        return
    start = tensor.offset * tensor.dtype.itemsize // row
    step = PARTITIONS if count > 64 else 64 if count > 32 else 32
    if start % step:
        starts = " or ".join(map(str, range(0, PARTITIONS, step)))
        raise NkiValueError(
            "err_start_partition",
            f"{what} is on {count} partition{'s'[: count > 1]} from {start} on; an engine reads and writes that many from {starts} "
            "on; move it there with dma_copy",
        )


def static_address(what: str) -> None:
    """Requires static addresses for the engines of gen2; only a DMA may compute its address at run time."""
    code = "NCC_IBIR040" if what == "stationary" else "NCC_IBIR829"
    needs(devices.nc_version.gen3, f"an address known at run time of {what}, which is not a DMA's,", code)


def as_tile(tensor: Any, what: str) -> NkiTensor:
    if not isinstance(tensor, NkiTensor):
        raise NkiTypeError("err_operand_not_tile", f"{what} has to be a tensor, not {type(tensor).__name__}")
    return tensor


def on_chip(tensor: Any, what: str) -> NkiTensor:
    tile = as_tile(tensor, what)
    operand_on_chip(tile, what)
    return tile


def in_hbm(tensor: Any, what: str) -> NkiTensor:
    memory = as_tile(tensor, what)
    if memory.on_chip:
        raise NkiTypeError("err_hbm_tensor_required", f"{what} has to be in HBM, not in {memory.buffer}")
    return memory


def dma_source(source: NkiTensor) -> None:
    """Refuses a source with a partition stride of 0 in the older generation, as AWS's compiler does."""
    recorder = current()
    if not recorder.older or source.gather is not None or not source.dims:
        return
    stride, count = source.dims[0]
    if stride == 0 and count > 1 and not any(index.shape and index.shape[0] == count for index in source.dynamic):
        raise NkiValueError(
            "err_dma_partition_broadcast",
            f"dma_copy reads one row for {count} partitions, which the compiler refuses (NCC_IBCG901); "
            "load the row into a tile of one partition and use that as the operand",
        )


def dtype(tensor: Any, what: str, *allowed: Any) -> None:
    """Requires one of the dtypes that AWS documents for an operand; the older generation casts."""
    if isinstance(tensor, NkiTensor) and not current().older and tensor.dtype not in [np.dtype(one) for one in allowed]:
        names = " or ".join(np.dtype(one).name for one in allowed)
        raise NkiTypeError("err_unsupported_dtype", f"{what} is {names}, not {tensor.dtype}; copy it with tensor_copy")


def equal_dtypes(a: Any, b: Any, what: str) -> None:
    """Requires that an instruction that moves data without a cast has one dtype."""
    if isinstance(a, NkiTensor) and isinstance(b, NkiTensor):
        dtype(a, what, b.dtype)


def in_sbuf(what: str, *tiles: NkiTensor) -> None:
    """Requires tiles in SBUF."""
    if not current().older and any(tile.buffer.kind != "sbuf" for tile in tiles):
        raise NkiTypeError("err_unsupported_memory", f"the tiles of {what} are in SBUF; copy others with tensor_copy")


def one_per_partition(tensor: Any, what: str) -> None:
    if isinstance(tensor, NkiTensor) and math.prod(tensor.shape[1:]) != 1:
        raise NkiValueError("err_shape_mismatch", f"{what} has one element per partition, not {tensor.shape}")


def _product_dtypes(stationary: NkiTensor, moving: NkiTensor, *, double: bool) -> None:
    """Requires dtypes of operands that the targets multiply, by AWS's documentation of nc_matmul."""
    operands = (stationary.dtype, moving.dtype)
    if "float8_e4m3fn" in (names := [one.name for one in operands]):
        needs(devices.nc_version.gen4, "float8_e4m3fn in a product")
        if float8_e4m3.name in names:
            raise NkiTypeError("err_matmul_dtype", "float8_e4m3 and float8_e4m3fn can't be in one product")
    if double and any(one not in (float8_e4m3, float8_e5m2) and one.name != "float8_e4m3fn" for one in operands):
        raise NkiTypeError("err_matmul_dtype", f"double_row multiplies float8, not {' and '.join(names)}")


def product_result(target: NkiTensor) -> None:
    """Requires the dtypes in which the tensor engine passes products to PSUM: float32, and bfloat16 since NeuronCore-v4.

    Source: AWS's documentation of nc_matmul, and its guide to the architecture of Trainium3, "BF16 Matmul Results in PSUM".
    """
    if current().older or target.dtype == float32:
        return
    if target.dtype != bfloat16:
        raise NkiTypeError("err_matmul_dtype", f"a product in PSUM is float32, or bfloat16 on trn3, not {target.dtype}")
    needs(devices.nc_version.gen4, "a product into bfloat16 in PSUM (before, it has to be float32)")


def matmul(stationary: NkiTensor, moving: NkiTensor, target: NkiTensor | None, *, double: bool = False) -> None:
    """Requires sizes and dtypes that the tensor engine accepts."""
    recorder = current()
    known = (
        double,
        *((t.dims, t.dtype, t.buffer, t.gather is None) for t in (stationary, moving, target) if t is not None),
    )
    if known in recorder.allowed:
        return
    k, m = stationary.shape[0], math.prod(stationary.shape[1:]) // (2 if double else 1)
    n = math.prod(moving.shape[1:]) // (2 if double else 1)
    if moving.shape[0] != k:
        raise NkiValueError(
            "err_matmul_contraction", f"stationary has {k} partitions and moving {moving.shape[0]}: they are contracted"
        )
    if k > PARTITIONS:
        raise NkiValueError(
            "err_num_partition_exceed_arch_limit", f"number of partitions {k} exceeds the hardware limit {PARTITIONS}"
        )
    if m > STATIONARY_FREE:
        raise NkiValueError(
            "err_size_of_dimension_exceed_arch_limit",
            f"the free size {m} of the stationary tile exceeds the hardware limit {STATIONARY_FREE}",
        )
    limit = min(device.moving_free for device in _devices())
    if target is not None and target.dtype == bfloat16 and limit > MOVING_FREE:
        limit *= 2  # all banks of PSUM
    if n > limit:
        raise NkiValueError(
            "err_size_of_dimension_exceed_arch_limit",
            f"the free size {n} of the moving tile exceeds the hardware limit {limit}",
        )
    for what, operand in (("stationary", stationary), ("moving", moving)):
        if not is_float(operand.dtype):
            raise NkiTypeError(
                "err_matmul_dtype",
                f"{what} is {operand.dtype}; the tensor engine multiplies floats: copy it to a tile of bfloat16 or float32",
            )
    if (stationary.dtype == float32) != (moving.dtype == float32):
        raise NkiTypeError(
            "err_matmul_dtype",
            f"one operand of a product is float32, the other not: {stationary.dtype}, {moving.dtype}",
        )
    if not recorder.older:
        _product_dtypes(stationary, moving, double=double)
    for operand in (stationary, moving):
        # The older generation's compiler copies a transpose out of PSUM itself: published kernels multiply it there.
        if operand.buffer.kind == "psum" and not recorder.older:
            raise NkiTypeError("err_unsupported_memory", "the operands of a product have to be in SBUF, not in PSUM")
    if target is not None and target.buffer.kind != "psum":
        raise NkiTypeError("err_unsupported_memory", f"a product goes to PSUM, not to {target.buffer}")
    recorder.allowed.add(known)


def psum_bank(target: NkiTensor) -> None:
    """Requires that a tensor-engine instruction writes to one PSUM bank; memory of several banks starts at a bank."""
    if target.buffer is not PSUM or target.gather is not None:
        return
    size, storage = target.dtype.itemsize, target.storage
    width = (sum(abs(s) * (n - 1) for s, n in target.dims[1:]) + 1) * size
    first = 0 if target.dynamic else target.offset + sum(s * (n - 1) for s, n in target.dims[1:] if s < 0)
    first = first * size % max(1, storage.bytes_per_partition) + (storage.address or 0)
    limit = PSUM_BANK_BYTES * min(device.product_banks for device in _devices())
    if first % limit + width > limit:
        where = f" from byte {first:,} on" if width <= limit else ""
        raise NkiValueError(
            "err_psum_bank", f"a product of {width:,} bytes per partition{where} exceeds a bank of {limit:,}"
        )


def engine(what: str, given: Any, *allowed: str) -> str:
    """Returns the name of an instruction's engine, or "unknown" if the compiler chooses it.

    Raises:
        NkiValueError: the instruction does not run on that engine.
    """
    name = str(getattr(given, "name", given) or "unknown")
    if name not in ("unknown", *allowed):
        raise NkiValueError("err_unsupported_engine", f"{what} runs on {' or '.join(allowed)}, not on {name}")
    return name


def gpsimd_arithmetic(what: str, engine: str) -> None:
    """Refuses arithmetic on tiles by gen2's GpSimd in the newer NKI, although AWS's simulator runs it."""
    if engine == "gpsimd" and not current().older:
        needs(devices.nc_version.gen3, f"{what} on GpSimd", "NCC_IXCG965")


def gpsimd_in_sbuf(what: str, *tiles: NkiTensor) -> None:
    """Refuses PSUM tiles in gen2 for an instruction that runs only on GpSimd; the older NKI's compiler copies such tiles itself."""
    if not current().older and any(tile.buffer.kind == "psum" for tile in tiles):
        needs(devices.nc_version.gen3, f"{what}, on GpSimd, of a tile in PSUM")


def reachable(what: str, engine: str, tiles: Sequence[NkiTensor]) -> None:
    """Refuses PSUM operands for GpSimd, which can't access PSUM."""
    if engine == "gpsimd" and any(tile.buffer.kind == "psum" for tile in tiles):
        raise NkiTypeError("err_unsupported_memory", f"{what} on GpSimd can't access PSUM")


def one_in_psum(what: str, a: Any, b: Any, first: str, second: str) -> None:
    """Requires that the vector engine reads at most one PSUM tile."""
    if all(isinstance(t, NkiTensor) and t.buffer.kind == "psum" for t in (a, b)):
        raise NkiTypeError(
            "err_unsupported_memory",
            f"{first} and {second} of {what} are both in PSUM, and the vector engine reads at most one tile of it; copy one to "
            "SBUF with tensor_copy",
        )


def operands_in_psum(what: str, operands: Sequence[NkiTensor]) -> None:
    """Does the check of `one_in_psum` also for operands with one element per partition; the older NKI's compiler copies these."""
    inside = [t for t in operands if t.buffer.kind == "psum"]
    if not current().older and len(inside) > 1:
        raise NkiTypeError(
            "err_unsupported_memory",
            f"{what} reads {len(inside)} tiles of PSUM, and the vector engine one at most; copy others to SBUF with tensor_copy",
        )


def name(given: Any) -> None:
    """Requires that an instruction's name is a string; the name has no effect."""
    if given is not None and not isinstance(given, str):
        raise NkiTypeError("err_instruction_name", f"an instruction's name is text, not {type(given).__name__}")


def arithmetic(what: str, *ops: Any) -> None:
    """Refuses operations on bit patterns for instructions that lack them."""
    bitwise = [op_name(op) for op in ops if op is not None and op_name(op) in BITWISE]
    if bitwise:
        raise NkiTypeError("err_unsupported_op", f"{what} takes arithmetic operations, not '{bitwise[0]}'")


def priority(given: Any) -> None:
    """Requires a valid priority for a DMA, on NeuronCore-v4; the priority has no effect on values."""
    if given is not None:
        needs(devices.nc_version.gen4, "priority of a DMA")
    if given not in (None, 0, 1, 2, 3):
        raise NkiValueError("err_dma_priority", f"the priority of a DMA is 0, 1, 2 or 3, not {given!r}")


def per_partition(value: Any, tile: NkiTensor, what: str) -> None:
    """Requires that a vector operand has one element per partition."""
    if isinstance(value, NkiTensor):
        if math.prod(value.shape[1:]) != 1:
            raise NkiValueError(
                "err_scalar_or_vector",
                f"{what} has to be a number or a vector with one element per partition, not {value.shape}",
            )
        if value.shape[0] not in (tile.shape[0],):
            raise NkiValueError(
                "err_scalar_or_vector", f"{what} has {value.shape[0]} partitions, and the data {tile.shape[0]}"
            )


def results(recorder: Recorder, returned: Sequence[NkiTensor]) -> None:
    """Requires that a kernel of the newer generation returns tensors in shared_hbm."""
    if recorder.older:
        return
    for tensor in returned:
        kind = tensor.buffer.kind
        if kind != "shared_hbm" and tensor.storage.parameter is None:
            raise NkiError("err_nki_return_not_shared_hbm", f"a kernel returns tensors in shared_hbm, not in {kind}")


def at_once(storages: Iterable[NkiMemory], buffer: Buffer) -> tuple[int, list[NkiMemory]]:
    """Returns the peak use of SBUF or PSUM, in bytes per partition, and the storages in use at that point.

    A storage is in use from its first instruction to its last. A tile of PSUM takes whole banks. The count leaves out memory
    that the kernel places itself, because its tiles may share addresses.

    Args:
        storages: all storages of the kernel.
        buffer: SBUF or PSUM.

    Returns:
        the peak, and the storages in the order of their first use.
    """
    used = sorted(
        (s for s in storages if s.buffer is buffer and s.first >= 0 and s.address is None), key=lambda s: s.first
    )
    ends: list[tuple[int, int]] = []
    most = now = when = 0
    for number, storage in enumerate(used):
        heapq.heappush(ends, (storage.last, number))
        now += _taken(storage)
        while ends[0][0] < storage.first:
            now -= _taken(used[heapq.heappop(ends)[1]])
        if now > most:
            most, when = now, storage.first
    return most, [s for s in used if s.first <= when <= s.last]


def _taken(storage: NkiMemory) -> int:
    size = storage.bytes_per_partition
    return -(-size // PSUM_BANK_BYTES) * PSUM_BANK_BYTES if storage.buffer is PSUM else size


def memory(recorder: Recorder) -> None:
    """Requires that the kernel's peak use of SBUF and PSUM fits.

    The older generation's compiler reorders a kernel and spills, so its kernels get a check of each tile only.
    """
    if recorder.older:
        return
    for buffer, code, limit in (
        (SBUF, "err_sbuf_exceed_arch_limit", sbuf_bytes()),
        (PSUM, "err_psum_exceed_arch_limit", PSUM_BANKS * PSUM_BANK_BYTES),
    ):
        most, there = at_once(recorder.storages, buffer)
        if most > limit:
            largest = sorted(there, key=_taken, reverse=True)[:3]
            where = f" on {_smallest()}" if buffer is SBUF else ""
            shown = ", ".join(f"{list(s.shape)} {s.dtype} of line {s.place[1]} ({_taken(s):,})" for s in largest)
            raise NkiValueError(
                code,
                f"{len(there)} tiles in {buffer} are in use at once, this one the last of them: {most:,} bytes per partition, "
                f"and there are {limit:,}{where}. The largest are {shown}",
                there[-1].place,
            )
