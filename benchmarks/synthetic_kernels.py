"""Makes synthetic kernels, so that a build of 10,000 kernels measures the build and not the kernels.

There are two kinds, both from the HLO of one real kernel:

* `files`: an HLO and a simulated NEFF for each kernel of a plan, all different, for writing bundles;
* `stand_in`: a scratch copy of this checkout whose emit and compile steps write that kernel's HLO and NEFF for every
  kernel. The work of Bazel, CMake and Ninja around the steps, and the steps' command lines and outputs, stay the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPEC = {"op": "add", "inputs": ["(8,4,1,1)/f32", "(8,1,1,1)/f32"], "output": "(8,4,1,1)/f32"}
"""The one real kernel."""


@dataclass(frozen=True)
class Sample:
    """The outputs of the real steps for one kernel.

    Attributes:
        hlo: its HLO.
        neff: its simulated NEFF.
        origin: the text that CMake's compile step writes with the NEFF.
    """

    hlo: bytes
    neff: bytes
    origin: str


def manifest(name: str, target: str = "trn1") -> dict[str, Any]:
    """Returns a manifest of the one real kernel."""
    return {"format": 1, "name": name, "targets": [target], "kernels": [SPEC]}


def sample(copy: Path, folder: Path) -> Sample:
    """Emits and compiles the one real kernel with a copy's own sources.

    Args:
        copy: a checkout, or a copy of one.
        folder: scratch space.
    """
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(copy / "tools"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(folder),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "one.json"
    path.write_text(json.dumps(manifest("one")))
    python = [sys.executable, "-P", "-m"]
    planned = subprocess.run(
        [*python, "kernelgen", "plan", "--format=json", str(path)], env=env, check=True, capture_output=True, text=True
    )
    plan = json.loads(planned.stdout)
    (kernel,), (config,) = plan["kernels"], plan["configs"].values()
    import msgspec

    from kernelgen.compilers.settings import CompileConfig

    flags = msgspec.convert(config, CompileConfig).flags()
    out = {name: folder / f"one.{name}" for name in ("hlo", "neff", "origin")}
    worker = [*python, "kernelgen.steps.worker"]
    spec = ["--spec=" + json.dumps(kernel["spec"]), "--library=kernelgen"]
    emitter = f"--emitter={copy / 'kernels' / kernel['emitters'][0][1]}.py"
    subprocess.run([*worker, "emit", *spec, emitter, f"--output={out['hlo']}"], env=env, check=True)
    compile_ = ["compile", "--compiler=simulator", *(f"--flag={f}" for f in flags), f"--kernel={kernel['id']}"]
    files = [f"--hlo={out['hlo']}", f"--output={out['neff']}", f"--origin={out['origin']}"]
    subprocess.run([*worker, *compile_, *files], env=env, check=True)
    return Sample(out["hlo"].read_bytes(), out["neff"].read_bytes(), out["origin"].read_text())


_WORKER = """
from pathlib import Path

from kernelgen.steps.common import write_depfile
from kernelgen.steps.protocol import one

_MADE_UP = {{"hlo": bytes.fromhex("{hlo}"), "neff": bytes.fromhex("{neff}")}}


def _made_up_emit(arguments: Arguments) -> None:
    from kernelgen import fileio

    fileio.write_if_changed(one(arguments, "output"), _MADE_UP["hlo"])
    for stamp in arguments["stamp"]:
        write_depfile(arguments, stamp, [Path(one(arguments, "emitter"))])
        fileio.write_bytes(stamp, b"")


def _made_up_compile(arguments: Arguments) -> None:
    from kernelgen import fileio

    fileio.write_bytes(one(arguments, "output"), _MADE_UP["neff"])


STEPS = {{**STEPS, "emit": _made_up_emit, "compile": _made_up_compile}}


"""

_SIMULATE = """
def step(arguments: Arguments) -> None:
    write_bytes(one(arguments, "output"), bytes.fromhex("{neff}"))


"""

# CMake's compile step is a process per kernel; this shell script starts in a tenth of the time.
_STEP = """\
#!/bin/sh
case "$4" in compile)
for word; do
    case $word in
        --output=*) output=${word#*=} ;;
        --origin=*) origin=${word#*=} ;;
    esac
done
cp '%(neff)s' "$output" && printf %%s '%(origin)s' > "$origin"
exit ;;
esac
"""


def stand_in(copy: Path, made: Sample, folder: Path) -> None:
    """Makes the emit and compile steps of a scratch copy write one kernel's HLO and NEFF for every request."""
    for program, addition in (("steps/worker.py", _WORKER), ("steps/simulate.py", _SIMULATE)):
        path = copy / "tools/kernelgen" / program
        before, found, after = path.read_text().partition('if __name__ == "__main__":')
        if not found:
            raise ValueError(f"{path} does not end as a program")
        path.write_text(f"{before}{addition.format(hlo=made.hlo.hex(), neff=made.neff.hex())}{found}{after}")
    step = copy / "rules/cmake/kernels/step.in"
    neff = folder / "made-up.neff"
    neff.write_bytes(made.neff)
    values = {"neff": neff, "origin": made.origin}
    if any("'" in str(value) for value in values.values()):
        raise ValueError("a path has an apostrophe in it")
    first, _, rest = step.read_text().partition("\n")
    if first != "#!/bin/sh":
        raise ValueError(f"{step} is not a shell script")
    step.write_text(_STEP % values + rest)


def files(plan: Any, made: Sample, folder: Path) -> tuple[Path, Path]:
    """Writes an HLO and a simulated NEFF for each kernel of a plan, in the form that `kernelgen bundle` reads.

    Each HLO is the real one with the kernel's id as its name, so that all are different.

    Args:
        plan: `kernelgen.plan.Plan` of one set of settings.
        made: the real kernel.
        folder: the output folder.

    Returns:
        the folder of the HLO and the folder of the NEFFs.
    """
    from kernelgen.compilers import choice
    from kernelgen.hlo import proto
    from kernelgen.neff import container

    (config,) = plan.configs
    identity = choice.resolve("simulator").identity
    hlo_folder, neff_folder = folder / "hlo", folder / "neff"
    for path in (hlo_folder, neff_folder):
        path.mkdir(parents=True)
    module = proto.parse(made.hlo)
    for kernel in plan.kernels:
        module.name = kernel.spec.id
        data = module.SerializeToString(deterministic=True)
        (hlo_folder / f"{kernel.spec.id}.hlo.pb").write_bytes(data)
        (neff_folder / f"{kernel.spec.id}.{config.key}.neff").write_bytes(
            container.write_simulated(data, config.flags(), identity)
        )
    return hlo_folder, neff_folder
