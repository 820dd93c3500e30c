"""With NKI installed on the machine, the manifest still chooses each kernel's lowering."""

from __future__ import annotations

import shutil
from pathlib import Path

import page
import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
MANIFEST = """\
format: 1
name: m
targets: [trn2]
kernels:
  - source: in_nki.py:exp_masked
    inputs: ["f32[250,512]"]
    outputs: ["f32[250,512]"]
  - source: in_newer_nki.py:matmul
    inputs: ["bf16[128,128]", "bf16[128,512]"]
    outputs: ["f32[128,512]"]
  - source: add.py:add
    inputs: ["f32[128,8]", "f32[128,8]"]
    outputs: ["f32[128,8]"]
    lowering: native
  - source: add.py:add
    name: add_interpreted
    inputs: ["f32[128,8]", "f32[128,8]"]
    outputs: ["f32[128,8]"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in [*(DATA / "source_kernels" / "kernels").glob("*.py"), DATA / "native_kernels" / "kernels" / "add.py"]:
        shutil.copy(file, tmp_path)
    (tmp_path / "m.yaml").write_text(MANIFEST)
    return tmp_path


def test_a_build_interprets_what_its_manifest_does_not_say_is_native(folder: Path) -> None:
    page.program(folder)

    def hlo(output: str) -> dict[str, bytes]:
        for kernel in ("exp_masked", "matmul", "add_interpreted"):
            page.run(f"kernelgen emit m.yaml -o {output} --only {kernel}", folder)
        return {file.name: file.read_bytes() for file in (folder / output).glob("*.hlo.pb")}

    absent = hlo("absent")
    (folder / "bin" / "kernelgen").write_text(
        (folder / "bin" / "kernelgen").read_text().replace("exec", f'PYTHONPATH="$PYTHONPATH:{DATA / "fake_nki"}" exec')
    )
    assert len(absent) == 3 and hlo("present") == absent
    # NKI's compiler, here a double, makes the native kernel.
    page.run("kernelgen emit m.yaml -o native --only add", folder)
    (native,) = (folder / "native").glob("add-*.hlo.pb")
    assert b"AwsNeuronCustomNativeKernel" in native.read_bytes()
