"""Kernels of several devices: XLA runs them on as many CPU devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernel_harness import emit, spec

from kernelgen.hlo import proto
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.hlo.lint import lint
from kernelgen.spec.kernel import KernelSpec
from kernelgen.targets import TARGETS


def all_reduce(n_devices: int, tensor: str = "(64,3,1,1)/f32") -> KernelSpec:
    return spec("all_reduce", [tensor], tensor, alias=0, n_devices=n_devices)


def on_devices(hlo: bytes, arrays: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Returns the result of each device, given each device's parameter."""
    from jaxlib import _jax, xla_client

    client = xla_client.make_cpu_client(num_devices=len(arrays))
    options = _jax.CompileOptions()
    options.num_replicas = len(arrays)
    program = _jax.mlir.hlo_to_stablehlo(hlo)
    executable = client.compile_and_load(program, _jax.DeviceList(tuple(client.devices())), options)
    mesh = Mesh(np.array(client.devices()), ("devices",))
    sharded = jax.device_put(np.concatenate(arrays), NamedSharding(mesh, PartitionSpec("devices")))
    (results,) = executable.execute_sharded([sharded]).disassemble_into_single_device_arrays()
    return [np.asarray(r) for r in results]


@pytest.mark.parametrize("n_devices", [2, 4])
def test_each_device_has_the_sum(n_devices: int) -> None:
    hlo = emit(all_reduce(n_devices))
    rng = np.random.default_rng(n_devices)
    ((name, shape),) = [(i.name, tuple(i.shape.dimensions)) for i in proto.parameters(proto.entry(proto.parse(hlo)))]
    assert name == "input0.must_alias_input"
    arrays = [rng.standard_normal(shape, np.float32) for _ in range(n_devices)]
    for result in on_devices(hlo, arrays):
        np.testing.assert_allclose(result, np.sum(arrays, 0), rtol=1e-5, atol=1e-6)


def test_neuronx_cc_takes_it() -> None:
    module = emit(all_reduce(2))
    assert {target.name: found for target in TARGETS.values() if (found := lint(module, target))} == {}


def test_channels_are_numbered_and_do_not_identify_a_kernel() -> None:
    module = proto.parse(emit(all_reduce(2)))
    (reduction,) = [i for i in proto.entry(module).instructions if i.opcode == "all-reduce"]
    assert reduction.channel_id == 1
    reduction.channel_id = 7
    assert canonicalize(proto.serialize(module), ["input0"], aliases={0: 0}) == emit(all_reduce(2))


def test_the_number_of_devices_identifies_a_kernel() -> None:
    assert emit(all_reduce(2)) != emit(all_reduce(4))
    assert all_reduce(2).id != all_reduce(4).id
