"""AWS's libnrt, or the simulator's, from Python: the functions that the checks use. backend/nrt/nrt_api.h has the prototypes."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.targets import Target

NEURON_RUNTIME = Path("/opt/aws/neuron/lib/libnrt.so.1")
"""The path in AWS's package aws-neuronx-runtime-lib."""

SUCCESS = 0
COMPLETED_WITH_NUM_ERR = 1003
_DEVICE = 0
_NO_FRAMEWORK = 1
_PENDING = -1


class StatusError(Exception):
    """A function of libnrt did not return NRT_SUCCESS."""


class _Info(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 256),
        ("usage", ctypes.c_int),
        ("size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_uint32)),
        ("ndim", ctypes.c_uint32),
    )


class _Version(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_uint64 * 4),
        ("detail", ctypes.c_char * 128),
        ("git_hash", ctypes.c_char * 64),
    )


@dataclass(frozen=True, slots=True)
class NrtTensor:
    """A tensor on the device.

    Attributes:
        handle: libnrt's handle.
        size: bytes.
    """

    handle: ctypes.c_void_p
    size: int


@dataclass(frozen=True, slots=True)
class NrtModel:
    """A loaded NEFF.

    Attributes:
        handle: libnrt's handle.
        inputs: bytes of each input, by name.
        outputs: bytes of each output, by name.
    """

    handle: ctypes.c_void_p
    inputs: dict[str, int]
    outputs: dict[str, int]


@dataclass(frozen=True, slots=True)
class ScheduledExecution:
    """A queued execution, or a queued copy or write.

    Attributes:
        function: the function that queued it.
        status: its result, after completion.
        sequence: its number.
        data: bytes that the library reads until completion.
    """

    function: str
    status: ctypes.c_int
    sequence: ctypes.c_uint64
    data: bytes = b""


class Libnrt:
    """The library; it uses the first core.

    Args:
        path: its file.

    Raises:
        OSError: it can't be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._path = path
        self._scheduled: list[ScheduledExecution] = []
        self._closed = False
        self._library.nrt_get_status_as_str.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, int(getattr(self._library, name)(*arguments)))

    def _check(self, name: str, status: int) -> None:
        if status not in (SUCCESS, COMPLETED_WITH_NUM_ERR):
            text = self._library.nrt_get_status_as_str(status) or b"unknown status"
            raise StatusError(f"{name} returned {text.decode()} ({status})")

    def version(self) -> str:
        """Returns the runtime's version with its description."""
        found = _Version()
        self._call("nrt_get_version", ctypes.byref(found), ctypes.c_size_t(ctypes.sizeof(found)))
        return f"{'.'.join(map(str, found.numbers[:3]))} {found.detail.decode(errors='replace')}".strip()

    def init(self) -> int:
        """Initializes the library and returns the number of this process's cores.

        Sets NEURON_RT_ROOT_COMM_ID to a free port of this machine, unless it is set: programs with collectives need it.
        """
        if "NEURON_RT_ROOT_COMM_ID" not in os.environ:
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                os.environ["NEURON_RT_ROOT_COMM_ID"] = f"127.0.0.1:{unused.getsockname()[1]}"
        self._call("nrt_init", ctypes.c_int(_NO_FRAMEWORK), b"", b"")
        count = ctypes.c_uint32()
        self._call("nrt_get_visible_vnc_count", ctypes.byref(count))
        return count.value

    def close(self) -> None:
        """Releases the cores. After that only `close` may be called, and does nothing."""
        if not self._closed:
            self._closed = True
            self._library.nrt_close()

    def abandon(self) -> None:
        """Leaves the cores to the end of the process, because a call in another thread does not return."""
        self._closed = True

    def lnc(self, target: Target) -> tuple[int, str]:
        """Returns the physical cores per logical core, and what states them, as the backend decides (backend/nrt/nrt.cpp)."""
        size = ctypes.c_uint32()
        ask = getattr(self._library, "nec_get_virtual_core_size", None)
        if ask is not None and ask(ctypes.byref(size)) == SUCCESS and size.value:
            return size.value, "libnrt"
        for name in ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"):
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name]), name
        file = self._path.parent.parent / "logical_nc_config"
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            return int(text), str(file)
        return target.lnc, f"the default of {target.name}"

    def memory_used(self) -> int:
        """Returns the used bytes of the first core's memory; 0 if the library does not report them."""
        if not hasattr(self._library, "nrt_get_vnc_memory_stats"):
            return 0
        used, size = (ctypes.c_size_t * 2)(), ctypes.c_size_t()
        sizes = ctypes.c_size_t(ctypes.sizeof(used)), ctypes.byref(size)
        self._call("nrt_get_vnc_memory_stats", 0, ctypes.byref(used), *sizes)
        return used[0]

    def simulated_ns(self, core: int = 0) -> int | None:
        """Returns the nanoseconds that a core's executions so far would take on a device; None if the library is a device's."""
        if not hasattr(self._library, "nrt_simulator_clock"):
            return None
        ns = ctypes.c_uint64()
        self._call("nrt_simulator_clock", core, ctypes.byref(ns))
        return ns.value

    def load(self, neff: bytes) -> NrtModel:
        """Loads a NEFF."""
        handle = ctypes.c_void_p()
        self._call("nrt_load", neff, ctypes.c_size_t(len(neff)), 0, -1, ctypes.byref(handle))
        return self._described(handle)

    def load_rank(self, neff: bytes, core: int, rank: int, ranks: int) -> NrtModel:
        """Loads a NEFF with collectives; returns after one thread per rank has called it."""
        handle = ctypes.c_void_p()
        size = ctypes.c_size_t(len(neff))
        self._call("nrt_load_collectives", neff, size, core, -1, rank, ranks, ctypes.byref(handle))
        return self._described(handle)

    def build_global_comm(self, core: int, rank: int, ranks: int) -> None:
        """Sets the maximum number of a program's ranks; returns after that many threads have called it."""
        self._call("nrt_build_global_comm", core, rank, ranks)

    def barrier(self, core: int, rank: int, ranks: int) -> None:
        """Returns after one thread per rank has called it."""
        self._call("nrt_barrier", core, rank, ranks)

    def _described(self, handle: ctypes.c_void_p) -> NrtModel:
        array = ctypes.c_void_p()
        self._call("nrt_get_model_tensor_info", handle, ctypes.byref(array))
        assert array.value is not None
        count = ctypes.c_uint64.from_address(array.value).value
        infos = (_Info * count).from_address(array.value + 8)
        sizes: tuple[dict[str, int], dict[str, int]] = ({}, {})
        for info in infos:
            sizes[info.usage][info.name.decode()] = info.size
        self._call("nrt_free_model_tensor_info", array)
        return NrtModel(handle, *sizes)

    def unload(self, model: NrtModel) -> None:
        """Unloads a NEFF."""
        self._call("nrt_unload", model.handle)

    def allocate(self, size: int, core: int = 0) -> NrtTensor:
        """Allocates `size` bytes of device memory."""
        handle = ctypes.c_void_p()
        self._call("nrt_tensor_allocate", _DEVICE, core, ctypes.c_size_t(size), b"doctor", ctypes.byref(handle))
        return NrtTensor(handle, size)

    def slice(self, source: NrtTensor, offset: int, size: int) -> NrtTensor:
        """Returns a view of a tensor's part."""
        handle = ctypes.c_void_p()
        sizes = ctypes.c_size_t(offset), ctypes.c_size_t(size)
        self._call("nrt_tensor_allocate_slice", source.handle, *sizes, b"doctor", ctypes.byref(handle))
        return NrtTensor(handle, size)

    def free(self, tensor: NrtTensor) -> None:
        """Frees a tensor or a slice."""
        self._library.nrt_tensor_free(ctypes.byref(tensor.handle))

    def write(self, tensor: NrtTensor, data: bytes, offset: int = 0) -> None:
        """Writes bytes to a tensor."""
        self._call("nrt_tensor_write", tensor.handle, data, ctypes.c_size_t(offset), ctypes.c_size_t(len(data)))

    def read(self, tensor: NrtTensor) -> bytes:
        """Returns a tensor's bytes."""
        data = ctypes.create_string_buffer(tensor.size)
        self._call("nrt_tensor_read", tensor.handle, data, ctypes.c_size_t(0), ctypes.c_size_t(tensor.size))
        return data.raw

    def copy(self, source: NrtTensor, to: NrtTensor) -> None:
        """Copies a tensor's bytes on the device."""
        zero = ctypes.c_size_t(0)
        self._call("nrt_tensor_copy", source.handle, zero, to.handle, zero, ctypes.c_size_t(source.size))

    def tensor_set(self, tensors: Mapping[str, NrtTensor]) -> ctypes.c_void_p:
        """Returns a set of tensors by name; it exists until the process ends."""
        handle = ctypes.c_void_p()
        self._call("nrt_allocate_tensor_set", ctypes.byref(handle))
        for name, tensor in tensors.items():
            self._call("nrt_add_tensor_to_tensor_set", handle, name.encode(), tensor.handle)
        return handle

    def execute(self, model: NrtModel, inputs: ctypes.c_void_p, outputs: ctypes.c_void_p) -> None:
        """Runs a model on sets of tensors."""
        self._call("nrt_execute", model.handle, inputs, outputs)

    def has_queues(self) -> bool:
        """Returns whether executions can be queued as in SDK 2.29 and later, with symbol version NRT_3.0.0."""
        release = tuple(map(int, self.version().split(".")[:2]))
        dlvsym = ctypes.CDLL(None).dlvsym
        dlvsym.restype = ctypes.c_void_p
        function = dlvsym(ctypes.c_void_p(self._library._handle), b"nrta_execute_schedule", b"NRT_3.0.0")
        return function is not None and release >= (2, 31)

    def schedule(self, model: NrtModel, inputs: ctypes.c_void_p, outputs: ctypes.c_void_p) -> ScheduledExecution:
        """Queues an execution on the core of the model."""
        return self._schedule("nrta_execute_schedule", model.handle, inputs, outputs)

    def schedule_write(self, tensor: NrtTensor, data: bytes) -> ScheduledExecution:
        """Queues a write of bytes to a tensor, in the core's queue of transfers."""
        sizes = ctypes.c_uint64(0), ctypes.c_uint64(len(data))
        return self._schedule("nrta_tensor_write", tensor.handle, data, *sizes, data=data)

    def schedule_copy(self, source: NrtTensor, to: NrtTensor) -> ScheduledExecution:
        """Queues a copy of a tensor's bytes on the device, in the core's queue of transfers."""
        zero = ctypes.c_uint64(0)
        return self._schedule("nrta_tensor_copy", source.handle, zero, to.handle, zero, ctypes.c_uint64(source.size))

    def _schedule(self, function: str, *arguments: Any, data: bytes = b"") -> ScheduledExecution:
        status, sequence = ctypes.c_int(_PENDING), ctypes.c_uint64()
        self._call(function, *arguments, 0, ctypes.byref(status), ctypes.byref(sequence))
        # the library uses them even after the caller is gone
        self._scheduled.append(ScheduledExecution(function, status, sequence, data))
        return self._scheduled[-1]

    def is_completed(self, scheduled: ScheduledExecution) -> bool:
        """Returns whether an execution is done.

        Raises:
            StatusError: it is done, and failed.
        """
        completed = ctypes.c_bool()
        self._call("nrta_is_completed", scheduled.sequence, ctypes.byref(completed))
        if completed.value:
            self._check(scheduled.function, scheduled.status.value)
        return completed.value
