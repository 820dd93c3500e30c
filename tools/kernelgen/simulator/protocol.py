"""The messages between libnrt and its helper. backend/simulator/src/protocol.h describes them and is libnrt's side."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

VERSION = 5

MAX_MESSAGE = 65536


class Operation(IntEnum):
    """The operation of a request: its first four bytes."""

    HELLO = 1
    LANE = 2
    LOAD = 3
    EXECUTE = 4
    UNLOAD = 5


class Status(IntEnum):
    """The status codes of libnrt that the helper returns."""

    SUCCESS = 0
    FAILURE = 1
    INVALID = 2
    INVALID_HANDLE = 3
    EXEC_COMPLETED_WITH_ERR = 1004
    EXEC_OOB = 1006


OPERATION = struct.Struct("=I")
HELLO = struct.Struct("=IIII")  # operation, version, arenas, 0; then each arena's size
SIZE = struct.Struct("=Q")
LOAD = struct.Struct("=IIQQII")  # operation, arena, offset, size, ranks, 0
EXECUTE = struct.Struct("=IIQ")  # operation, tensors of all ranks, model; then a binding per tensor
BINDING = struct.Struct("=IIQ")  # arena, 0, offset
UNLOAD = struct.Struct("=IIQ")  # operation, 0, model
MESSAGE = struct.Struct("=I")  # bytes of a message on a lane, which follow
ANSWER = struct.Struct("=II")  # status, tensors
LOADED = struct.Struct("=QQQQII")
"""The model, bytes of its scratchpad, bytes of its code and rings, DMA descriptors, its NeuronCore's version, collectives."""
TENSOR = struct.Struct("=IIQiIII")  # usage, dtype, size, alias, ndim, bytes of the name, 0

DTYPES = {
    "u64": 1,
    "s8": 2,
    "pred": 3,
    "u8": 3,
    "s16": 4,
    "u16": 5,
    "bf16": 6,
    "f16": 7,
    "s32": 8,
    "u32": 9,
    "f32": 10,
    "s64": 12,
    "f8e3m4": 13,
    "f8e4m3": 14,
    "f8e4m3fn": 14,
    "f8e5m2": 15,
}
"""libnrt's number of an element type, by XLA's name. Other types are 0, unknown."""

DONE = ANSWER.pack(Status.SUCCESS, 0)


def failed(status: Status, reason: str) -> bytes:
    """Returns the answer to a request that failed."""
    # The limit is in bytes, and well below a packet's: XLA's reasons can fill a page.
    return ANSWER.pack(status, 0) + reason.encode()[:4096]


def tensor(usage: int, dtype: str, size: int, alias: int, shape: Sequence[int], name: str) -> bytes:
    """Returns the description of a model's tensor in the answer to LOAD."""
    text = name.encode()
    head = TENSOR.pack(usage, DTYPES.get(dtype, 0), size, alias, len(shape), len(text), 0)
    return head + struct.pack(f"={len(shape)}I", *shape) + text
