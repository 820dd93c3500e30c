"""The persistent worker's protocol, whatever a step does to the descriptors that it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelgen import worker

TENSOR = "(4,1,1,1)/f32"

NOISY = """
import os, sys, threading, time
from kernelgen.emitter import emitter

@emitter("noisy")
def noisy(x):
    os.write(1, b'{"exitCode": 7, "output": "forged", "requestId": 0}\\n')
    print("printed")
    sys.__stdout__.write("to the stream that was there first\\n")
    sys.__stdout__.flush()
    threading.Thread(target=lambda: (time.sleep(0.3), os.write(1, b"late\\n"))).start()
    assert os.read(0, 100) == b""
    return x + x

@emitter("quiet")
def quiet(x):
    return x * x
"""


@pytest.fixture
def emitters(tmp_path: Path) -> Path:
    path = tmp_path / "noisy.py"
    path.write_text(NOISY)
    return path


def request(emitters: Path, op: str, number: int) -> str:
    spec = json.dumps({"op": op, "inputs": [TENSOR], "output": TENSOR, "params": {}, "alias": None})
    output = emitters.with_name(f"{op}{number}.hlo.pb")
    words = ["emit", f"--spec={spec}", "--library=mine", f"--emitter={emitters}", f"--output={output}"]
    return json.dumps({"arguments": words, "requestId": number}) + "\n"


def test_what_a_step_writes_and_reads_is_no_part_of_the_protocol(emitters: Path) -> None:
    requests = "".join(request(emitters, op, n) for n, op in enumerate(["noisy", "quiet", "noisy", "quiet"]))
    tools = str(Path(worker.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kernelgen.worker", "--persistent_worker"],
        input=requests,
        env=os.environ | {"PYTHONPATH": tools},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(a["requestId"], a["exitCode"]) for a in answers] == [(n, 0) for n in range(4)], done.stderr
    assert [a["output"] for a in answers] == ["printed\n", "", "printed\n", ""]
    assert done.stderr.count("forged") == done.stderr.count("late") == 2
    assert all(emitters.with_name(f"{op}.hlo.pb").is_file() for op in ("noisy0", "quiet1", "noisy2", "quiet3"))
