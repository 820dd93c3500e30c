"""Decodes requests, and answers them with a `SimulatedDevice`."""

from __future__ import annotations

from collections.abc import Sequence

from kernelgen.errors import KernelgenError
from kernelgen.simulator import protocol
from kernelgen.simulator.device import DeviceError, OutOfBounds, SimulatedDevice
from kernelgen.simulator.protocol import Operation, Status


class RequestServer:
    """Answers the requests of all lanes. Thread-safe.

    Args:
        device: the device that executes them.

    Attributes:
        find: returns the function that executes a request again, by the request's bytes; None if the request is new.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.find = device.launches.get

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to a request. It never raises, because a client waits for the answer."""
        (operation,) = protocol.OPERATION.unpack_from(message)
        try:
            if operation == Operation.EXECUTE:
                self._device.execute(message, _read_places)
                return protocol.DONE
            if operation == Operation.LOAD:
                return self._load(message)
            if operation == Operation.UNLOAD:
                _, _, number = protocol.UNLOAD.unpack(message)
                self._device.unload(number)
                return protocol.DONE
            return protocol.failed(Status.FAILURE, f"unknown request {operation}")
        except Exception as error:  # XLA raises types of its own
            return self.failed(operation, error)

    @staticmethod
    def failed(operation: int, error: Exception) -> bytes:
        """Returns the answer to a request that raised an error."""
        if isinstance(error, KernelgenError):
            return protocol.failed(Status.INVALID, str(error))
        if isinstance(error, DeviceError):
            return protocol.failed(Status.FAILURE, str(error))
        if isinstance(error, OutOfBounds):
            return protocol.failed(Status.EXEC_OOB, str(error))
        status = Status.EXEC_COMPLETED_WITH_ERR if operation == Operation.EXECUTE else Status.FAILURE
        return protocol.failed(status, f"{type(error).__name__}: {error}")

    def _load(self, message: bytes) -> bytes:
        _, arena, offset, size, ranks, _ = protocol.LOAD.unpack(message)
        number, tensors, needs = self._device.load(arena, offset, size, ranks)
        names = [t.name for t in tensors]
        loaded = protocol.LOADED.pack(number, *needs)
        parts = [protocol.ANSWER.pack(Status.SUCCESS, len(tensors)), loaded]
        for t in tensors:
            alias = -1 if t.alias is None else names.index(t.alias)
            parts.append(protocol.tensor(int(t.usage == "out"), t.dtype, t.size, alias, t.shape, t.name))
        answer = b"".join(parts)
        if len(answer) > protocol.MAX_MESSAGE:
            self._device.unload(number)
            return protocol.failed(Status.FAILURE, f"a model of {len(tensors)} tensors is too large for the simulator")
        return answer


def _read_places(request: bytes) -> tuple[int, Sequence[tuple[int, int]]]:
    _, _, number = protocol.EXECUTE.unpack_from(request)
    bindings = protocol.BINDING.iter_unpack(request[protocol.EXECUTE.size :])
    return number, [(arena, offset) for arena, _, offset in bindings]
