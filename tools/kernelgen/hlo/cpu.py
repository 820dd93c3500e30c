"""JAX and XLA on the CPU, also on machines with other devices; imported on first use."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_checking_client: Any = None
_client: Any = None
_starting = threading.Lock()


ignored: dict[str, str] = {}
"""The environment variables that `ignore_variables` removed."""


def ignore_variables() -> None:
    """Removes the variables of JAX and XLA from this process, a program of kernelgen: no build depends on a user's settings."""
    for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_", "TF_XLA_"))]:
        ignored[name] = os.environ.pop(name)


def import_jax() -> Any:
    """Returns the `jax` module, bound to the CPU. Its gathers and scatters stay in bounds (`kernelgen.hlo.in_bounds`)."""
    _settings()
    if "jax" not in sys.modules:
        with _without_collections():
            import jax
    import jax

    from kernelgen.hlo.in_bounds import keep_in_bounds

    keep_in_bounds(jax)
    return jax


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disables garbage collection while many modules are imported.

    The imports create hardly any garbage, and collection takes a fifth of the time. The imported objects are never scanned again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def xla_compile(hlo: bytes, client: Any, *, optimize: bool = True) -> Any:
    """Compiles a serialized `HloModuleProto` for the CPU of a client (jaxlib's) and returns the executable.

    Args:
        hlo: the module.
        client: XLA's client.
        optimize: whether to optimize the machine code. Without it, compiling takes a quarter to a half of the time, the code runs
            several times slower, and results may round differently.

    Raises:
        ValueError: XLA does not compile it (its message).
    """
    from jaxlib import _jax

    options = _jax.CompileOptions()
    try:
        program = _jax.mlir.hlo_to_stablehlo(hlo)
        devices = _jax.DeviceList((client.devices()[0],))
        if not optimize:
            options.executable_build_options.debug_options.xla_backend_optimization_level = 0
            # Fall back to XLA's defaults if it lacks the option or does not compile the module with it.
            with contextlib.suppress(Exception):
                options.env_option_overrides = [("xla_cpu_use_fusion_emitters", False)]
                return client.compile_and_load(program, devices, options)
            options.env_option_overrides = []
        return client.compile_and_load(program, devices, options)
    except Exception as error:  # jaxlib raises its own error types, and not only for mistakes in the program
        raise ValueError(f"XLA does not compile the HLO: {str(error).strip()}") from error


def check_compiles(hlo: bytes) -> None:
    """Raises XLA's error for a module, if any. Discards the executable, so nothing is optimized.

    It compiles on one thread, since builds compile on every core.

    Raises:
        ValueError: XLA does not compile it (its message).
    """
    global _checking_client
    with _starting:
        if _checking_client is None:
            # The first compile starts one thread per core that this process may use, and all later ones use these threads.
            with _on_one_core():
                made = _make_client()
                xla_compile(hlo, made, optimize=False)
            _checking_client = made
            return
    xla_compile(hlo, _checking_client, optimize=False)


def client() -> Any:
    """Returns XLA's client for this machine's CPU, which computes in the calling thread.

    It needs only jaxlib: importing JAX takes four times as long, and code that only runs HLO does not need it.
    """
    global _client
    with _starting:
        if _client is None:
            _client = _make_client()
    return _client


def _make_client() -> Any:
    _settings()
    from jaxlib import xla_client

    return xla_client.make_cpu_client(asynchronous=False)


@contextlib.contextmanager
def _on_one_core() -> Iterator[None]:
    """Keeps this thread, and threads that it starts, on one core until the block ends."""
    if sys.platform != "linux":
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def _settings() -> None:
    # Otherwise an installed TPU or GPU plug-in would start, which may take seconds or fail.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # otherwise XLA prints a banner to standard error
