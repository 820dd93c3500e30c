"""NEFFs that nrt_load refuses, with the status and the message."""

from __future__ import annotations

import hashlib
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.compilers.settings import CompileConfig
from kernelgen.neff import container

Run = Callable[..., subprocess.CompletedProcess[str]]


def with_hash(data: bytes) -> bytes:
    """Returns a NEFF with a header that matches its payload."""
    payload = data[1024:]
    header = bytearray(data[:1024])
    struct.pack_into("<Q", header, 16, len(payload))
    header[172:204] = hashlib.sha256(payload).digest()
    return bytes(header) + payload


def other(data: bytes, offset: int, replacement: bytes) -> bytes:
    return data[:offset] + replacement + data[offset + len(replacement) :]


CASES = {
    "empty": (lambda d: b"", "NRT_INVALID", "not a NEFF: 0 bytes"),
    "short": (lambda d: d[:1000], "NRT_INVALID", "not a NEFF: 1000 bytes"),
    "text": (lambda d: b"not a NEFF at all\n" * 100, "NRT_INVALID", "not a NEFF: package version"),
    "zeros": (lambda d: bytes(4096), "NRT_INVALID", "not a NEFF: package version 0 and header size 0"),
    "cut off": (lambda d: d[:-512], "NRT_INVALID", "damaged NEFF: the header says"),
    "longer": (lambda d: d + b"x", "NRT_INVALID", "damaged NEFF: the header says"),
    "bits": (
        lambda d: other(d, 3000, b"\xff" * 64),
        "NRT_INVALID",
        "damaged NEFF: the payload does not have the digest",
    ),
    "no tar": (
        lambda d: with_hash(d[:1024] + b"x" * 2048),
        "NRT_INVALID",
        "nrt_load: damaged NEFF: the payload is not a tar",
    ),
    "no HLO": (lambda d: with_hash(d.replace(b"hlo_module.pb", b"olh_module.pb")), "NRT_INVALID", "damaged"),
    "real": (
        lambda d: other(d, 40, bytes(128)),
        "NRT_UNSUPPORTED_NEFF_VERSION",
        "a NEFF for a Neuron device, which the simulator cannot run; compile the kernel with the simulator",
    ),
    "later": (
        lambda d: other(d, 32, b"\x07"),
        "NRT_UNSUPPORTED_NEFF_VERSION",
        "a simulated NEFF of version 7; this simulator reads 3",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refuses(client: Run, add: Path, tmp_path: Path, name: str) -> None:
    damage, status, message = CASES[name]
    path = tmp_path / "bad.neff"
    path.write_bytes(damage(add.read_bytes()))
    result = client("load", path)
    assert (result.stdout.strip(), result.returncode) == (status, 0)
    assert message in result.stderr


def test_refuses_hlo_that_does_not_compile(client: Run, neuron_target: str, add: Path, tmp_path: Path) -> None:
    from kernelgen.hlo import proto

    module = proto.parse(container.read_simulated(add.read_bytes()).hlo)
    root = next(i for i in proto.entry(module).instructions if i.opcode == "add")
    root.opcode = "no-such-thing"
    path = tmp_path / "bad.neff"
    path.write_bytes(
        container.write_simulated(proto.serialize(module), CompileConfig.make(neuron_target).flags(), "simulator 1")
    )
    result = client("load", path)
    assert result.stdout.strip() == "NRT_FAILURE"
    assert "NRT simulator ERROR nrt_load: XLA does not compile the HLO: " in result.stderr


def test_survives_damage_anywhere(library: Path, environment: dict[str, str], add: Path) -> None:
    """Bytes are changed anywhere; the payload's digest is right, so the readers of the payload parse the damage."""
    rng = random.Random(5)
    data = add.read_bytes()
    program = f"""
import ctypes, random, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_load import with_hash
nrt = ctypes.CDLL({str(library)!r})
assert nrt.nrt_init(1, b"", b"") == 0
data, rng, seen = bytes.fromhex(sys.stdin.read()), random.Random({rng.random()}), set()
for _ in range(150):
    bad = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        bad[rng.randrange(len(bad))] = rng.randrange(256)
    bad = with_hash(bytes(bad))
    model = ctypes.c_void_p()
    seen.add(nrt.nrt_load(bad, ctypes.c_size_t(len(bad)), -1, -1, ctypes.byref(model)))
model = ctypes.c_void_p()
assert nrt.nrt_load(data, ctypes.c_size_t(len(data)), -1, -1, ctypes.byref(model)) == 0
print(sorted(seen))
"""
    python = environment | {"PYTHONPATH": str(Path(__file__).parents[2] / "tools"), "NEURON_RT_LOG_LEVEL": "ERROR"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=data.hex(),
        capture_output=True,
        text=True,
        env=python,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    seen = set(eval(result.stdout))
    assert seen <= {0, 1, 2, 6, 10}  # 6: XLA itself ended; the next load still works
    assert {2, 10} & seen


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NEURON_SIMULATOR_PYTHON": "/nowhere/python"}, "cannot start '/nowhere/python -m kernelgen.simulator'"),
        ({"NEURON_SIMULATOR_PYTHON": "/bin/false"}, "the helper '/bin/false -m kernelgen.simulator'"),
        ({"NEURON_SIMULATOR_PATH": "/nowhere"}, "exited with status 1 before it was ready"),
    ],
)
def test_the_reason_for_a_missing_helper_is_reported(
    client: Run, add: Path, variables: dict[str, str], message: str
) -> None:
    result = client("load", add, PYTHONPATH=None, **variables)
    assert result.stdout.strip() == "NRT_FAILURE"
    assert message in result.stderr
    assert result.stderr.count("NRT simulator ERROR") == 1  # once, though there were two attempts
    assert "NEURON_SIMULATOR_PYTHON names a Python 3.11 or later that has jax" in result.stderr


def test_says_that_jaxlib_is_missing(client: Run, add: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "jaxlib.py").write_text("raise ImportError('No module named jaxlib')\n")
    path = f"{tmp_path}:{environment['NEURON_SIMULATOR_PATH']}"
    result = client("load", add, NEURON_SIMULATOR_PATH=path)
    assert result.stdout.strip() == "NRT_FAILURE"
    assert (
        f"the helper is not able to run: {sys.executable} lacks packages that kernelgen needs (No module named jaxlib)"
        in result.stderr
    )


def test_a_kernel_runs_without_jax(client: Run, add: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """Importing JAX would take most of the helper's start."""
    (tmp_path / "jax.py").write_text("raise ImportError('the helper imports jax')\n")
    result = client("run", add, NEURON_SIMULATOR_PATH=f"{tmp_path}:{environment['NEURON_SIMULATOR_PATH']}")
    assert result.returncode == 0, result.stderr
