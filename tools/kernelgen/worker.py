"""The build steps as Bazel and CMake call them: one step a process, or many in a persistent worker.

    python -m kernelgen.worker @ARGUMENTS                one step; ARGUMENTS is a file with an argument a line
    python -m kernelgen.worker --persistent_worker       Bazel's JSON worker protocol on standard input and output

A step is `emit`, `emit-batch`, `compile`, `bundle` or `embed`, followed by `--name=value` arguments. It reads and writes only the
files that it is given. With `--depfile` (a path) a step also writes, as a Makefile rule, which of kernelgen's own sources it
ran, for build tools that are not told so beforehand. With `--jax` (a version) it works with no other JAX than that.

A worker imports JAX once; an emitter whose source changes is imported anew (see `kernelgen.library`), so an edit needs no restart.

This is the narrow interface between the rules and kernelgen; people use `kernelgen` (`kernelgen.cli`).
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kernelgen.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Diagnostic, KernelgenError

if TYPE_CHECKING:
    from kernelgen.cache import Cache

Arguments = Mapping[str, list[str]]


def emit(arguments: Arguments) -> None:
    """Writes one kernel's HLO: `--spec` (canonical JSON), `--library` (name), `--emitter` (module file), `--output`."""
    from kernelgen import fileio, hlo
    from kernelgen import library as libraries
    from kernelgen.kernel import KernelSpec

    spec = KernelSpec.from_json(json.loads(one(arguments, "spec")))
    module = Path(one(arguments, "emitter"))
    source = libraries.Library(one(arguments, "library"), module.parent)
    function = libraries.load_function(source, libraries.registration(module, spec.op))
    fileio.write_bytes(one(arguments, "output"), hlo.emit(spec, function))


def emit_batch(arguments: Arguments) -> None:
    """Writes the HLO of a module's kernels: `--library`, `--emitter`, a `--spec` a kernel, `--folder` (where to) and `--stamp`.

    A file that is there with the same content keeps its time, so that nothing is compiled for it; the stamp is written when all
    are up to date. A kernel that fails does not stop the others, and leaves no file.
    """
    from kernelgen import fileio, hlo
    from kernelgen import library as libraries
    from kernelgen.kernel import KernelSpec

    module, folder = Path(one(arguments, "emitter")), Path(one(arguments, "folder"))
    source = libraries.Library(one(arguments, "library"), module.parent)
    mistakes: dict[Diagnostic, None] = {}
    code = EXIT_OK
    for text in arguments["spec"]:
        spec = KernelSpec.from_json(json.loads(text))
        output = folder / f"{spec.id}.hlo.pb"
        try:
            function = libraries.load_function(source, libraries.registration(module, spec.op))
            fileio.write_if_changed(output, hlo.emit(spec, function))
        except KernelgenError as error:
            output.unlink(missing_ok=True)
            mistakes |= dict.fromkeys(error.diagnostics)
            code = max(code, error.exit_code)
    if mistakes:
        raise KernelgenError(mistakes, exit_code=code)
    write_depfile(arguments, one(arguments, "stamp"), libraries.dependencies(source, module.stem))
    fileio.write_bytes(one(arguments, "stamp"), b"")


def compile_(arguments: Arguments) -> None:
    """Compiles one HLO: `--compiler`, `--config` (JSON), `--kernel` (id), `--hlo`, `--output`; neuronx-cc also takes
    `--executable`, `--identity`, `--memory-mb` and `--timeout` (seconds). `--log-dir` is where the log of a failure is kept.

    `--cache` is a folder of NEFFs; `--shared-cache` (URL or folder), `--shared-cache-mode` and `--shared-cache-timeout` (seconds)
    the one that machines share; `--notices` (a folder) and `--build` (any word) keep their warnings from being printed by every
    step. What the NEFF was made of, and whether it was compiled now, is written to `--origin` (`kernelgen.building.origins`).
    """
    from kernelgen.compilers import choice
    from kernelgen.compilers.settings import CompileConfig
    from kernelgen.compilers.step import compile_file

    executable, memory = maybe(arguments, "executable"), maybe(arguments, "memory-mb")
    timeout = maybe(arguments, "timeout")
    compiler = choice.resolve(one(arguments, "compiler"), path=executable)
    planned = maybe(arguments, "identity")
    if planned and compiler.identity != planned:
        # The NEFF would be stored under the name of a compiler that did not make it.
        raise KernelgenError(f"the build is for {planned}, and this machine has {compiler.identity} ({executable})")
    source = compile_file(
        Path(one(arguments, "hlo")),
        Path(one(arguments, "output")),
        CompileConfig.from_json(json.loads(one(arguments, "config"))),
        compiler,
        kernel=one(arguments, "kernel"),
        log_dir=maybe(arguments, "log-dir"),
        timeout=float(timeout) if timeout else None,
        memory_mb=int(memory) if memory else None,
        cache=_cache(arguments),
    )
    if origin := maybe(arguments, "origin"):
        from kernelgen.building import origins

        origins.write(origin, one(arguments, "hlo"), source)
    write_depfile(arguments, one(arguments, "output"))


def _cache(arguments: Arguments) -> Cache | None:
    words = [maybe(arguments, name) for name in ("cache", "shared-cache", "shared-cache-mode", "shared-cache-timeout")]
    if not words[0] and not words[1]:
        return None  # as in Bazel, which has caches of its own
    from kernelgen.cache import Cache, Notices, Settings

    folder = maybe(arguments, "notices")
    notices = Notices(
        lambda text: print(f"warning: {text}"), Path(folder) if folder else None, maybe(arguments, "build") or ""
    )
    return Cache(Settings.from_arguments(*words), notices)


def bundle(arguments: Arguments) -> None:
    """Writes a bundle: `--pack` or `--tree` (a path), `--name` (the manifest's), `--config` (JSON), and an `--entry` a kernel:
    JSON with its `spec` and the paths `hlo` and `neff`. `--compiler` is what the bundle says made it; the NEFFs tell when it is not
    given. With `--lookups` (a path) also the table that tests look kernels up by.

    An entry's `origin` is what its compile step wrote about the NEFF: one of an earlier HLO is refused. With `--made` (a path, of
    this step's own) it says how many NEFFs were compiled since it ran last, and how many came from a cache.
    """
    from importlib.metadata import version

    from kernelgen import bundle as bundles
    from kernelgen import fileio
    from kernelgen.bundle.lookups import lookups
    from kernelgen.compilers.settings import CompileConfig
    from kernelgen.kernel import KernelSpec
    from kernelgen.plan import Bundle

    config = CompileConfig.from_json(json.loads(one(arguments, "config")))
    specs, hlos, neffs, made = {}, {}, {}, {}
    for text in arguments["entry"]:
        entry = json.loads(text)
        spec = KernelSpec.from_json(json.loads(entry["spec"]))
        specs[spec.id], hlos[spec.id], neffs[spec.id] = spec, Path(entry["hlo"]), Path(entry["neff"])
        if "origin" in entry:
            made[spec.id] = Path(entry["origin"])
    if made:
        from kernelgen.building import origins

        known = origins.check(made, hlos, neffs)
    if table := maybe(arguments, "lookups"):
        fileio.write_bytes(table, lookups(specs.values()).encode())
    bundles.build(
        Bundle(one(arguments, "name"), config.target, config.key, tuple(sorted(specs))),
        specs,
        hlos,
        neffs,
        config,
        compiler=maybe(arguments, "compiler"),
        jax_version=version("jax"),
        pack_path=maybe(arguments, "pack"),
        tree_path=maybe(arguments, "tree"),
    )
    if made and (path := maybe(arguments, "made")):
        print(f"{one(arguments, 'name')}_{config.target}: {origins.count(path, known)}")
    write_depfile(arguments, maybe(arguments, "pack") or f"{one(arguments, 'tree')}/index.json")


def embed(arguments: Arguments) -> None:
    """Writes the sources that embed a bundle: `--pack`, and the folder `--output`.

    The assembly names the pack as it is given, or by `--incbin`.
    """
    from kernelgen.bundle import embed as embedding
    from kernelgen.bundle import pack

    path = one(arguments, "pack")
    paths = embedding.write(one(arguments, "output"), pack.read(path), incbin=maybe(arguments, "incbin") or path)
    write_depfile(arguments, str(paths[0]))


STEPS: Mapping[str, Callable[[Arguments], None]] = {
    "emit": emit,
    "emit-batch": emit_batch,
    "compile": compile_,
    "bundle": bundle,
    "embed": embed,
}


def write_depfile(arguments: Arguments, target: str, sources: Sequence[Path] = ()) -> None:
    """Writes the `--depfile`, if one is asked for: `target` depends on what of kernelgen was imported, and on `sources`."""
    path = maybe(arguments, "depfile")
    if path is None:
        return
    from kernelgen import fileio

    # Emitters of other kernels may have been imported too; `sources` says which count.
    names = [name for name in sys.modules if f"{name}.".startswith("kernelgen.")]
    own = [sys.modules[name] for name in names if not name.startswith("kernelgen.kernels")]
    paths = [Path(__file__), *(Path(m.__file__) for m in own if m.__file__), *sources]
    files = {str(p.resolve()) for p in paths}
    rule = " \\\n  ".join([f"{_makefile(target)}:", *map(_makefile, sorted(files))])
    fileio.write_bytes(path, f"{rule}\n".encode())


def _makefile(path: str) -> str:
    return path.replace("$", "$$").replace("#", "\\#").replace(" ", "\\ ")


def check_jax(planned: str) -> None:
    """Raises when JAX is another than the build was planned for.

    Raises:
        KernelgenError: it is.
    """
    from importlib.metadata import version

    if version("jax") != planned:
        raise KernelgenError(
            f"the build is for jax {planned}, and {sys.prefix} has jax {version('jax')}: configure the build again"
        )


def one(arguments: Arguments, name: str) -> str:
    """Returns the value of an argument that must be given once."""
    values = arguments.get(name, [])
    if len(values) != 1:
        raise KernelgenError(f"expected one --{name}=VALUE, not {len(values)}")
    return values[0]


def maybe(arguments: Arguments, name: str) -> str | None:
    """Returns the value of an argument that may be left out."""
    return one(arguments, name) if arguments.get(name) else None


def run(words: Sequence[str]) -> tuple[int, str]:
    """Runs one step and returns its exit status and what it has to say; nothing it prints reaches standard output."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            step, *rest = expand(words)
            if step not in STEPS:
                raise KernelgenError(f"unknown step '{step}': expected one of {', '.join(STEPS)}")
            arguments: defaultdict[str, list[str]] = defaultdict(list)
            for word in rest:
                name, equals, value = word.partition("=")
                if not name.startswith("--") or not equals:
                    raise KernelgenError(f"expected --name=value, not '{word}'")
                arguments[name[2:]].append(value)
            if arguments.get("jax"):
                check_jax(one(arguments, "jax"))
            STEPS[step](arguments)
        return EXIT_OK, said.getvalue()
    except KernelgenError as error:
        return error.exit_code, said.getvalue() + f"{error}\n"
    except OSError as error:
        # A full disk or a folder that can't be written to is no bug of ours.
        return EXIT_FAILED, said.getvalue() + f"error: {error}\n"
    except Exception:
        return EXIT_FAILED, said.getvalue() + traceback.format_exc()


def expand(words: Sequence[str]) -> list[str]:
    """Returns the arguments with `@FILE` replaced by the file's lines."""
    out: list[str] = []
    for word in words:
        out += Path(word[1:]).read_text().splitlines() if word.startswith("@") else [word]
    if not out:
        raise KernelgenError(f"expected a step: one of {', '.join(STEPS)}")
    return out


def serve(requests: TextIO, responses: TextIO) -> None:
    """Answers Bazel's work requests until standard input ends: a JSON object a line, each answered by one."""
    for line in requests:
        if not line.strip():
            continue
        request: dict[str, Any] = json.loads(line)
        code, output = run(request.get("arguments", []))
        response = {"exitCode": code, "output": output, "requestId": request.get("requestId", 0)}
        responses.write(json.dumps(response) + "\n")
        responses.flush()


def main(argv: Sequence[str]) -> int:
    if "--persistent_worker" in argv:
        serve(sys.stdin, sys.stdout)
        return EXIT_OK
    if not argv:
        print(__doc__, file=sys.stderr)
        return EXIT_USAGE
    code, output = run(argv)
    sys.stderr.write(output)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
