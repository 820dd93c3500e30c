"""The limits of the hardware and the rules of NKI, checked while a kernel is recorded.

Sources: AWS's documentation of NKI's errors and of the sizes of SBUF and PSUM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kernelgen.languages.nki import devices
from kernelgen.languages.nki.dtypes import float32
from kernelgen.languages.nki.errors import NkiError, NkiIndexError, NkiTypeError, NkiValueError
from kernelgen.languages.nki.program import Recorder, Storage, current
from kernelgen.languages.nki.tensors import Tensor

PARTITIONS = devices.PARTITIONS
PSUM_BANKS = devices.PSUM_BANKS
PSUM_BANK_BYTES = devices.PSUM_BANK_BYTES
STATIONARY_FREE = 128
MOVING_FREE = 512
BN_STATS_FREE = 512


def _devices() -> list[devices.Device]:
    """Returns what the kernel is for."""
    return [devices.DEVICES[target] for target in current().targets]


def sbuf_bytes() -> int:
    """Returns the usable bytes of SBUF per partition that all targets of the kernel have."""
    return min(device.sbuf_bytes for device in _devices())


def tile(tensor: Tensor) -> None:
    """A tile of SBUF or PSUM fits: at most 128 partitions, one bank of PSUM, SBUF's bytes."""
    recorder = current()
    if not recorder.check or tensor.buffer.is_hbm:
        return
    known = (tensor.dims, tensor.partition, tensor.dtype, tensor.buffer)
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
    smallest = min(recorder.targets, key=lambda t: devices.DEVICES[t].sbuf_bytes)
    if tensor.buffer.kind == "sbuf" and width > sbuf_bytes():
        raise NkiValueError(
            "err_sbuf_exceed_arch_limit",
            f"a tile of {width} bytes per partition exceeds the {sbuf_bytes()} of {smallest}'s SBUF",
        )
    if tensor.buffer.kind == "psum" and width > PSUM_BANKS * PSUM_BANK_BYTES:
        raise NkiValueError(
            "err_psum_exceed_arch_limit",
            f"a tile of {width} bytes per partition exceeds the {PSUM_BANKS} banks of {PSUM_BANK_BYTES} bytes of PSUM",
        )
    recorder.allowed.add(known)


def writable(tensor: Tensor) -> None:
    if tensor.storage.parameter is not None and not tensor.storage.mutable:
        raise NkiError(
            "err_mutable_annotation_needed",
            f"the kernel writes to its argument '{tensor.name}'; annotate it with nki.typing.mutable_tensor and return it",
        )


def inside(tensor: Tensor) -> None:
    """Elements outside of the memory are excused by a mask."""
    if tensor.valid is None:
        return
    outside = ~tensor.valid if tensor.mask is None else tensor.mask & ~tensor.valid
    if outside.any():
        shape = tensor.storage.shape
        raise NkiIndexError(
            "err_access_out_of_bounds",
            f"an access of shape {tensor.shape} goes past the end of a tensor of {shape}; mask it or shorten it",
        )


def partitions_agree(operands: Sequence[Tensor], shape: tuple[int, ...]) -> None:
    if not current().check or current().older:
        return
    for operand in operands:
        if operand.ndim == len(shape) and operand.shape[0] != shape[0]:
            raise NkiValueError(
                "err_cannot_broadcast_partition",
                f"{operand.shape[0]} partitions can't be broadcast to {shape[0]}: only free dimensions are; "
                "use broadcast_to",
            )


def operand_on_chip(tensor: Tensor, what: str) -> None:
    if not tensor.on_chip and tensor.storage.initial is None and current().check:
        raise NkiTypeError(
            "err_unsupported_memory",
            f"an operand of {what} is in {tensor.buffer}; load it into SBUF first",
        )


def on_chip(tensor: Any, what: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise NkiTypeError("err_operand_not_tile", f"{what} has to be a tensor, not {type(tensor).__name__}")
    operand_on_chip(tensor, what)
    return tensor


def in_hbm(tensor: Any, what: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise NkiTypeError("err_operand_not_tile", f"{what} has to be a tensor, not {type(tensor).__name__}")
    if current().check and tensor.on_chip:
        raise NkiTypeError("err_hbm_tensor_required", f"{what} has to be in HBM, not in {tensor.buffer}")
    return tensor


def dma_source(source: Tensor) -> None:
    """A DMA of the older generation reads each partition from its own place: AWS's compiler refuses a stride of 0 there."""
    recorder = current()
    if not recorder.check or not recorder.older or source.gather is not None or not source.dims:
        return
    stride, count = source.dims[0]
    if stride == 0 and count > 1 and not any(index.shape and index.shape[0] == count for index in source.dynamic):
        raise NkiValueError(
            "err_dma_partition_broadcast",
            f"dma_copy reads one row for {count} partitions, which the compiler refuses (NCC_IBCG901); "
            "load the row into a tile of one partition and use that as the operand",
        )


def matmul(stationary: Tensor, moving: Tensor, target: Tensor | None, *, double: bool = False) -> None:
    """The sizes and dtypes that the tensor engine takes."""
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
    if not recorder.check:
        return
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
    if n > limit:
        raise NkiValueError(
            "err_size_of_dimension_exceed_arch_limit",
            f"the free size {n} of the moving tile exceeds the hardware limit {limit}",
        )
    if (stationary.dtype == float32) != (moving.dtype == float32):
        raise NkiTypeError(
            "err_matmul_dtype",
            f"one operand of a product is float32, the other not: {stationary.dtype}, {moving.dtype}",
        )
    for operand in (stationary, moving):
        # The older generation's compiler copies a transpose, which is in PSUM, on its own: published kernels multiply it.
        if operand.buffer.kind == "psum" and not recorder.older:
            raise NkiTypeError("err_unsupported_memory", "the operands of a product have to be in SBUF, not in PSUM")
    if target is not None and target.buffer.kind != "psum":
        raise NkiTypeError("err_unsupported_memory", f"a product goes to PSUM, not to {target.buffer}")
    if target is not None:
        psum_bank(target)
    recorder.allowed.add(known)


def psum_bank(target: Tensor) -> None:
    """What an instruction writes to PSUM is in one bank."""
    if not current().check or target.gather is not None:
        return
    width = sum(abs(s) * (n - 1) for s, n in target.dims[1:]) + 1
    limit = PSUM_BANK_BYTES * min(device.product_banks for device in _devices())
    if width * target.dtype.itemsize > limit:
        raise NkiValueError(
            "err_psum_bank",
            f"a product of {width * target.dtype.itemsize} bytes per partition exceeds a bank of {limit}",
        )


def vector_operands(name: str, engine: str, operands: Sequence[Tensor]) -> None:
    """GpSimd can't reach PSUM."""
    if current().check and engine == "gpsimd":
        for operand in operands:
            if operand.buffer.kind == "psum":
                raise NkiTypeError("err_unsupported_memory", f"{name} on GpSimd can't access PSUM")


def per_partition(value: Any, tile: Tensor, what: str) -> None:
    """A vector operand has one element per partition."""
    if isinstance(value, Tensor) and current().check:
        if math.prod(value.shape[1:]) != 1:
            raise NkiValueError(
                "err_scalar_or_vector",
                f"{what} has to be a number or a vector with one element per partition, not {value.shape}",
            )
        if value.shape[0] not in (tile.shape[0],):
            raise NkiValueError(
                "err_scalar_or_vector", f"{what} has {value.shape[0]} partitions, and the data {tile.shape[0]}"
            )


def results(recorder: Recorder, returned: Sequence[Tensor]) -> None:
    """What a kernel of the newer generation returns is in shared_hbm."""
    if not recorder.check or recorder.older:
        return
    for tensor in returned:
        kind = tensor.buffer.kind
        if kind != "shared_hbm" and tensor.storage.parameter is None:
            raise NkiError("err_nki_return_not_shared_hbm", f"a kernel returns tensors in shared_hbm, not in {kind}")


def sbuf_high_water(storages: Sequence[Storage]) -> int:
    """Returns the largest tile of SBUF, in bytes per partition."""
    return max((s.bytes_per_partition for s in storages if s.buffer.kind == "sbuf"), default=0)
