"""`kernelgen plan`: prints the kernels, compiles and bundles of manifests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import click

from kernelgen import manifest
from kernelgen.cli import options
from kernelgen.emitters.catalog import Catalog
from kernelgen.plan import Kernel, Plan, instructions
from kernelgen.targets import MAX_INSTRUCTIONS


@click.command(short_help="Print the kernels, compiles and bundles that manifests need.")
@options.manifests_argument
@options.target_option
@options.kernels_option
@click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option(
    "--estimate",
    "estimated",
    is_flag=True,
    help="Emit the kernels, and print estimates of their programs: instructions, DMA descriptors, memory.",
)
@click.option("--only", metavar="GLOB", help="With --estimate: only kernels whose id or op matches.")
def command(
    manifests: tuple[Path, ...],
    targets: tuple[str, ...],
    catalog: Catalog,
    output_format: str,
    estimated: bool,
    only: str | None,
) -> None:
    """Print the kernels, compiles and bundles that manifests need, each once.

    The build files are made from the JSON; its bytes depend only on the manifests' meaning.

    With --estimate, a program above half of a limit of neuronx-cc or the runtime is a warning. A program above the limit is an
    error, with the largest possible number of tokens.
    """
    if (estimated and output_format == "json") or (only and not estimated):
        raise click.UsageError("--estimate prints a table, and --only is for --estimate")
    plan = Plan.merge(options.only_targets(manifest.load(manifests, catalog), targets))
    if estimated:
        _print_estimates(plan, catalog, only)
        return
    for text in _too_long(plan):
        click.echo(f"warning: {text}", err=True)
    click.echo(plan.to_json() if output_format == "json" else _table(plan), nl=False)


def _too_long(plan: Plan) -> list[str]:
    """Returns a line for each group whose products alone may exceed half of neuronx-cc's limit."""
    cores = {config.key: config.lnc for config in plan.configs}
    specs = {kernel.id: kernel.spec for kernel in plan.kernels}
    found = [(n, instructions(specs[n.kernel]) // cores[n.config]) for n in plan.neffs]
    return [
        f"kernel {neff.kernel} for {neff.config}: its products may take {count:,} instructions, and neuronx-cc takes "
        f"{MAX_INSTRUCTIONS:,}: fewer layers or fewer tokens; `kernelgen plan --estimate` looks at the HLO"
        for neff, count in found
        if count > MAX_INSTRUCTIONS / 2
    ]


def _print_estimates(plan: Plan, catalog: Catalog, only: str | None) -> None:
    from kernelgen.cli import estimates
    from kernelgen.cli.emit import select

    chosen = set(select([k.id for k in plan.kernels], [k.spec.op for k in plan.kernels], only))
    found = []
    for one in estimates.estimates(replace(plan, kernels=tuple(k for k in plan.kernels if k.id in chosen)), catalog):
        click.echo(str(one))
        found.append(one)
    for text in estimates.refuse(found):
        click.echo(f"warning: {text}", err=True)


def modules(kernel: Kernel) -> str:
    """Returns the modules of a kernel, for people: `kernelgen/matmul.py`; all modules of a graph kernel."""
    return ",".join(f"{library}/{module}.py" for library, module in kernel.emitters)


def _table(plan: Plan) -> str:
    width = max((len(kernel.id) for kernel in plan.kernels), default=0)
    lines = []
    for kernel in plan.kernels:
        lines.append(f"{kernel.id:<{width}}  {modules(kernel)}  {kernel.spec.description}")
    lines.append("")
    for bundle in plan.bundles:
        counts = Counter(bundle.configs().values())
        special = "".join(
            f", {count} as {config}" for config, count in sorted(counts.items()) if config != bundle.config
        )
        lines.append(f"bundle {bundle.id}: {len(bundle.kernels)} kernels, compiled as {bundle.config}{special}")
    lines.append(f"{len(plan.kernels)} kernels, {len(plan.neffs)} compiles, {len(plan.bundles)} bundles")
    return "\n".join(lines) + "\n"
