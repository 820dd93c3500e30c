"""Options and arguments that several subcommands share, with the same meaning everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kernelgen import cache
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library, builtin_library
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.plan import Request
from kernelgen.targets import TARGETS

F = TypeVar("F", bound=Callable[..., Any])


def manifests_argument(function: F) -> F:
    """Adds the argument `MANIFEST…` as `manifests: tuple[Path, ...]`; `kernelgen.manifest` reports unreadable files."""
    return click.argument("manifests", nargs=-1, required=True, metavar="MANIFEST...", type=click.Path(path_type=Path))(
        function
    )


def kernels_argument(function: F) -> F:
    """Adds the argument `KERNELS…` as `paths: tuple[Path, ...]`: manifests and bundles, for `kernel_files`."""
    return click.argument("paths", nargs=-1, required=True, metavar="KERNELS...", type=click.Path(path_type=Path))(
        function
    )


def kernels_option(function: F) -> F:
    """Adds `--kernels DIR…` as `catalog: Catalog`, with the user's libraries in the order given, and the built-in one last."""
    return click.option(
        "--kernels",
        "catalog",
        multiple=True,
        metavar="DIR",
        type=click.Path(path_type=Path),
        callback=lambda context, parameter, value: Catalog(libraries(value)),
        help="A folder with your own emitters; they override kernelgen's. May be given several times.",
    )(function)


def _complete_target(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Returns the targets with this prefix, for a shell."""
    return [name for name in TARGETS if name.startswith(incomplete)]


def target_option(function: F) -> F:
    """Adds `--target NAME…` as `targets: tuple[str, ...]`, checked against the table of targets; empty means all."""
    return click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="NAME",
        callback=_check_targets,
        shell_complete=_complete_target,
        help=f"Only for this target ({', '.join(TARGETS)}). May be given several times.",
    )(function)


def chip_options(function: F) -> F:
    """Adds `--target NAME` and `--lnc N` as `target: str | None` and `lnc: str | None`, for `kernel_files`."""
    function = click.option(
        "--lnc", type=click.Choice(["1", "2"]), help="Physical cores per logical NeuronCore.  [default: the target's]"
    )(function)
    return click.option(
        "--target",
        type=click.Choice(list(TARGETS)),
        metavar="NAME",
        help="The target.  [default: the bundles' target, or trn1]",
    )(function)


def compiler_option(function: F) -> F:
    """Adds `--compiler CHOICE` as `compiler: str`, for `kernelgen.compilers.resolve`."""
    return click.option(
        "--compiler",
        type=click.Choice(["auto", "neuronx-cc", "simulator"]),
        default="auto",
        show_default=True,
        help="auto is neuronx-cc if it is installed, and otherwise the simulator.",
    )(function)


def cache_options(function: F) -> F:
    """Adds `--cache`, `--shared-cache` and `--shared-cache-mode` as one parameter `caches: kernelgen.cache.CacheSettings`."""

    @functools.wraps(function)
    def wrapper(
        *args: Any, cache_folder: str | None, shared_cache: str | None, shared_cache_mode: str | None, **kwargs: Any
    ) -> Any:
        return function(*args, caches=cache.CacheSettings.make(cache_folder, shared_cache, shared_cache_mode), **kwargs)

    wrapped: Callable[..., Any] = wrapper
    for option in (
        click.option(
            "--shared-cache-mode",
            type=click.Choice(cache.MODES),
            help=f"Whether the build adds NEFFs to the shared cache; {cache.MODE_VARIABLE}, or read-write, by default.",
        ),
        click.option(
            "--shared-cache",
            metavar="URL",
            help=f"A cache that machines share: a folder, or s3://, gs://, http(s)://…; {cache.SHARED_VARIABLE} by default.",
        ),
        click.option(
            "--cache",
            "cache_folder",
            metavar="DIR",
            help="The folder in which builds on this machine keep NEFFs, or 'off'; "
            f"{cache.FOLDER_VARIABLE}, or a folder in ~/.cache, by default.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def libraries(folders: Sequence[Path]) -> tuple[Library, ...]:
    """Returns the libraries in the folders, in their order, and the built-in one last.

    A library is named after its folder, so that a plan does not depend on the folder's path.

    Raises:
        KernelgenError: a folder does not exist, or two have the same name.
    """
    found: dict[str, Library] = {}
    builtin = builtin_library()
    for folder in folders:
        root = folder.resolve()
        if not root.is_dir():
            raise KernelgenError(f"--kernels {folder}: the folder does not exist")
        if root == builtin.root.resolve() or (root.name in found and found[root.name].root == root):
            continue  # named twice, or the built-in library
        if root.name in found or root.name == builtin.name:
            other = found.get(root.name, builtin).root
            raise KernelgenError(
                f"--kernels {folder}: a library is named after its folder, and {other} is already named '{root.name}'"
            )
        found[root.name] = Library(root.name, root)
    return (*found.values(), builtin)


def only_targets(requests: Sequence[Request], targets: Sequence[str]) -> list[Request]:
    """Returns the manifests' requests for these targets; everything if none is named.

    Raises:
        KernelgenError: a manifest does not have one of them.
    """
    if not targets:
        return list(requests)
    wrong = [
        Diagnostic(f"manifest '{r.name}' is for {', '.join(c.target for c in r.configs)}, not for {target}")
        for r in requests
        for target in targets
        if target not in {c.target for c in r.configs}
    ]
    if wrong:
        raise KernelgenError(wrong)
    return [
        replace(
            r,
            configs=tuple(c for c in r.configs if c.target in targets),
            kernels=tuple(k for k in r.kernels if not k.targets or not set(k.targets).isdisjoint(targets)),
        )
        for r in requests
    ]


def _check_targets(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if name not in TARGETS:
            raise click.BadParameter(
                f"unknown target '{name}'{did_you_mean(name, TARGETS)} (known: {', '.join(TARGETS)})"
            )
    return tuple(dict.fromkeys(value))
