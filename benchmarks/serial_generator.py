"""A simple generator without a cache, as a baseline: it emits and compiles kernels one after another.

    serial_generator.py KERNELS OUTPUT

KERNELS is a file with one kernel per line, in JSON: `spec`, `library`, `emitter` (a file) and `config`.
against_scripts.py runs it with all kernels in one process, and with one process per kernel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from kernelgen import lowering
from kernelgen.compilers import choice
from kernelgen.compilers.settings import CompileConfig
from kernelgen.compilers.step import compile_file
from kernelgen.emitters.library import Library
from kernelgen.emitters.loading import load_function
from kernelgen.emitters.scan import registration
from kernelgen.spec.kernel import KernelSpec


def main(kernels: Path, output: Path) -> None:
    compiler = choice.resolve("simulator")
    output.mkdir(parents=True, exist_ok=True)
    for line in kernels.read_text().splitlines():
        kernel = json.loads(line)
        spec, module = KernelSpec.from_json(kernel["spec"]), Path(kernel["emitter"])
        function = load_function(Library(kernel["library"], module.parent), registration(module, spec.op))
        path = output / f"{spec.id}.hlo.pb"
        path.write_bytes(lowering.emit(spec, function))
        config = msgspec.convert(kernel["config"], CompileConfig)
        compile_file(path, output / f"{spec.id}.neff", config, compiler, kernel=spec.id)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
