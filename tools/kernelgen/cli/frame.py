"""The frame of the command line: the group that loads subcommands when they are called, and the handling of all errors."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

import kernelgen
from kernelgen.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, KernelgenError, did_you_mean, printable
from kernelgen.hlo.cpu import ignore_variables

EXIT_BUG = 70
"""Exit status for an exception that is not a user's mistake (EX_SOFTWARE of sysexits.h)."""
EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as in shells."""

GROUPS = MappingProxyType(
    {
        "From a model to its kernels": {
            "model": "Write the manifest of a model: which kernels it needs.",
            "build": "Compile the kernels of manifests and pack them into bundles.",
            "repack": "Write a model's weights in the layouts that its kernels read.",
            "coverage": "Show which nodes of a model's graphs have a kernel.",
            "forecast": "Estimate the time of a token and of a prompt on a device.",
            "report": "Write an HTML report of a model's kernels: times, bytes, coverage.",
        },
        "Run programs": {
            "simulate": "Run a program with simulated NeuronCores.",
            "doctor": "Show what is installed, what is missing and how to get it.",
        },
        "Write manifests": {
            "validate": "Check manifests and report every mistake.",
            "plan": "Print the kernels, compiles and bundles that manifests need.",
            "list": "Print the ops, targets and dtypes that kernelgen supports.",
        },
        "Write kernels": {
            "run": "Run a kernel on the CPU and print what it computes.",
            "check": "Compare kernels with their references.",
        },
        "Inspect files": {
            "inspect": "Print what is in a bundle, a NEFF or an HLO file.",
            "cache": "Show, prune or verify the cache of NEFFs.",
        },
        "Single steps of a build, for scripts": {
            "generate": "Write build files for Bazel or CMake.",
            "emit": "Write the HLO of kernels.",
            "prebuild": "Compile kernels with NKI's own compiler, ahead of a build.",
            "compile": "Compile HLO to NEFF.",
            "bundle": "Pack compiled kernels into bundles.",
        },
    }
)
"""Every command and its one-line description, by purpose; a command's module has its name, or is in `_MODULES`.

The descriptions are here so that help imports no command module; a test compares them with the commands' own.
"""

COMMANDS = MappingProxyType({name: text for group in GROUPS.values() for name, text in group.items()})
"""Every command and its description."""

_WIDTH = max(map(len, COMMANDS))

_MODULES = {"run": "run_kernel"}
"""The modules of commands whose names are taken in the package."""


def module_of(command: str) -> str:
    """Returns the name of a command's module."""
    return f"kernelgen.cli.{_MODULES.get(command, command)}"


class LazyGroup(click.Group):
    """A group that imports commands when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(module_of(cmd_name))
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{_WIDTH}}", text) for name, text in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns the commands with this prefix, without importing any, and the options of kernelgen itself."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in COMMANDS:
            ctx.fail(f"no command '{name}'{did_you_mean(name, COMMANDS) or ': see kernelgen --help'}")
        return super().resolve_command(ctx, args)


def _version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Prints the version for `--version` and exits."""
    if value and not context.resilient_parsing:
        from kernelgen.cli import version

        click.echo(version.text())
        context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and exit."
)
def cli() -> None:
    """Build the kernels of GGML models for AWS Neuron devices: from a model to a manifest, from a manifest to bundles of NEFFs.

    Exit status: 0 done, 1 a kernel failed or is missing, 2 wrong usage or bad input.
    """


def run(args: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status; prints every error to stderr, with a traceback only for a bug.

    Args:
        args: the arguments; None for `sys.argv[1:]`.
    """
    argv = list(sys.argv[1:] if args is None else args)
    try:
        result: Any = cli.main(args=argv, prog_name="kernelgen", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else EXIT_OK
    except KernelgenError as error:
        for line in error.report():
            _say(line)
        if len(error.diagnostics) > 1:
            _say(f"{len(error.diagnostics)} errors")
        return error.exit_code
    except click.ClickException as error:
        _usage(error)
        return EXIT_USAGE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        # A full disk or an unwritable folder is not a bug of kernelgen.
        _say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
        return EXIT_FAILED
    except Exception:
        _say(
            f"{traceback.format_exc()}\nkernelgen {kernelgen.__version__} failed in a way that is a bug in it, not a mistake in "
            f"your input.\nPlease report the lines above, with Python {platform.python_version()} on {platform.platform()} and "
            f"the command: kernelgen {' '.join(argv)}"
        )
        return EXIT_BUG


def _usage(error: click.ClickException) -> None:
    context = getattr(error, "ctx", None)
    _say(f"error: {error.format_message()}")
    if context is not None:
        _say(f"    {context.get_usage()}\n    see {context.command_path} --help")


def _say(text: str) -> None:
    click.echo(printable(text), err=True)


def _open_standard_streams() -> None:
    """Opens /dev/null for each closed standard stream, since the next opened file would take its number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main() -> NoReturn:
    """The `kernelgen` program."""
    _open_standard_streams()
    ignore_variables()
    sys.exit(run())
