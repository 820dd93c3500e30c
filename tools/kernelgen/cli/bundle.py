"""`kernelgen bundle`: assembles compiled kernels into a plan's bundles."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from kernelgen.cli import bundle_forms
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.plan import Bundle, Plan
from kernelgen.spec.filenames import NEFF, hlo_file


@click.command(short_help="Pack compiled kernels into bundles.")
@click.argument("bundles", nargs=-1, metavar="[BUNDLE...]")
@click.option(
    "--plan",
    "plan_path",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The output of `kernelgen plan --format json`.",
)
@click.option(
    "--hlo-dir",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder of the HLO files, <kernel>.hlo.pb, as `kernelgen emit` writes it.",
)
@click.option(
    "--neff-dir",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder of the NEFFs, <kernel>.<settings>.neff, with the plan's name of the settings (`trn1`).",
)
@click.option(
    "-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to write to."
)
@bundle_forms.option
@click.option(
    "--compiler-identity",
    metavar="TEXT",
    help="The compiler that made the NEFFs; by default the one that they record.",
)
@click.option(
    "--jax-version",
    metavar="TEXT",
    default="unknown",
    help="The version of JAX that emitted the HLO, for the bundle's metadata.",
)
def command(
    bundles: tuple[str, ...],
    plan_path: Path,
    hlo_dir: Path,
    neff_dir: Path,
    output: Path,
    forms: tuple[str, ...],
    compiler_identity: str | None,
    jax_version: str,
) -> None:
    """Pack compiled kernels into all bundles of the plan, or only into those named (`llama3_trn1`).

    Writes NAME_TARGET.kernels.gguf (the pack), NAME_TARGET/ (the tree), and NAME_TARGET.S, .c and .h, which embed the pack.
    """
    plan = _plan(plan_path)
    chosen = _chosen(plan, bundles)
    written = bundle_forms.write(
        plan,
        chosen,
        output,
        forms,
        {kernel: hlo_dir / hlo_file(kernel) for b in chosen for kernel in b.kernels},
        {neff: neff_dir / f"{neff}{NEFF}" for b in chosen for neff in b.neffs().values()},
        compiler=compiler_identity,
        jax_version=jax_version,
    )
    for path in written:
        click.echo(str(path))


def _plan(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_bytes().decode())
    except OSError as error:
        raise KernelgenError(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, msgspec.ValidationError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) and error.args else error
        raise KernelgenError(f"{path}: not a plan as `kernelgen plan --format json` prints it: {what}") from None


def _chosen(plan: Plan, names: tuple[str, ...]) -> list[Bundle]:
    known = {b.id: b for b in plan.bundles}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise KernelgenError(
            [
                Diagnostic(f"the plan has no bundle '{n}'{did_you_mean(n, known)} (it has {', '.join(known)})")
                for n in unknown
            ]
        )
    return [b for b in plan.bundles if not names or b.id in names]
