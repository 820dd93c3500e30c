"""`kernelgen doctor --device`: builds small kernels and checks the first NeuronCore with them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from kernelgen import cli
from kernelgen.cli import simulate
from kernelgen.device import checks
from kernelgen.device.libnrt import NEURON_RUNTIME, Libnrt
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError
from kernelgen.targets import TARGETS, Target


def run(output_format: str, libnrt: Path | None, bundle: Path | None) -> int:
    """Checks the device, prints the results, and returns the exit status.

    Args:
        output_format: `text` or `json`.
        libnrt: the runtime's path from the user.
        bundle: the folder of kernels from the user; None to build them.

    Raises:
        KernelgenError: the runtime or the kernels are missing.
    """
    library = _find(libnrt)
    if simulate._is_simulator(library):
        os.environ.update(simulate.variables(library, os.environ))
    with tempfile.TemporaryDirectory() as folder:
        tree = bundle or _build(Path(folder), library, simulated=simulate._is_simulator(library))
        try:
            bench = checks.Bench(library, tree)
        except (OSError, ValueError, KeyError) as error:
            raise KernelgenError(f"{tree}: no tree of kernels: {error}") from None
        lacking = {"add", "set_rows"} - {kernel.op for kernel in bench.kernels}
        if lacking:
            raise KernelgenError(f"{tree}: no tree of kernels of this command: it lacks {', '.join(sorted(lacking))}")
        results = []
        for result in bench.run_all():
            results.append(result)
            if output_format == "text":
                click.echo(f"{result.status:7}  {result.name}: {result.text}")
    failed = [result.name for result in results if result.status == "FAILED"]
    if output_format == "json":
        click.echo(json.dumps([asdict(result) for result in results], indent=1, ensure_ascii=False))
    else:
        skipped = [result.name for result in results if result.status == "skipped"]
        if skipped and not failed:
            click.echo(f"not made: {', '.join(skipped)}")
        warned = [result.name for result in results if result.status == "warning"]
        click.echo(f"\nfailed: {', '.join(failed)}" if failed else "\nevery check that was made passed")
        if warned:
            click.echo(f"not as expected: {', '.join(warned)}")
    return EXIT_FAILED if failed else EXIT_OK


def _find(named: Path | None) -> Path:
    path = named or Path(os.environ.get("GGML_NEURON_LIBNRT") or NEURON_RUNTIME)
    if path.is_file():
        return path.absolute()
    if named or os.environ.get("GGML_NEURON_LIBNRT"):
        raise KernelgenError(f"there is no file {path}: --libnrt, or GGML_NEURON_LIBNRT, names libnrt.so.1")
    return simulate.find(None, os.environ)


def _lnc(library: Path, target: Target) -> int:
    try:
        return Libnrt(library).lnc(target)[0]
    except (OSError, AttributeError):  # the check `library` reports it
        return target.lnc


def _build(folder: Path, library: Path, *, simulated: bool) -> Path:
    """Builds the kernels and returns the folder of their tree."""
    manifest = folder / "doctor.yaml"
    target = os.environ.get("GGML_NEURON_TARGET") or "trn1"
    text = checks.MANIFEST
    if target in TARGETS:
        text = text.replace("kernels:\n", f"compiler: {{lnc: {_lnc(library, TARGETS[target])}}}\nkernels:\n", 1)
    manifest.write_text(text)
    words = ["build", str(manifest), "--target", target, "-o", str(folder / "out")]
    words += ["--kernels", str(checks.KERNELS), "--compiler", "simulator" if simulated else "neuronx-cc"]
    with contextlib.redirect_stdout(sys.stderr):
        status = cli.run(words)
    if status:
        raise KernelgenError("the kernels could not be built; see above")
    return folder / "out" / f"doctor_{target}"
