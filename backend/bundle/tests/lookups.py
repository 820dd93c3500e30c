"""Prints a bundle's kernels as a plain text table, for lookups in tests in other languages.

    lookups.py PLAN BUNDLE        prints the table of one bundle of a plan (`kernelgen plan --format json`)

With it those tests describe every kernel as a backend does, without reading JSON. Each line is a kernel, with six fields that tabs
separate:

    id      op      alias   op_params            inputs           output
    (text)  (text)  or -1   16 × int32, decimal  tensors and `|`  tensor

A tensor is `type ne0 ne1 ne2 ne3 nb0 nb1 nb2 nb3` in decimal, with ggml's type number, its layout from bit 16 on, and the canonical
strides. An absent input is `-`; no inputs are the empty text.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from kernelgen.bundle.key import key, tensor_words
from kernelgen.ggml.ops import N_WORDS
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.plan import Plan
from kernelgen.spec.kernel import KernelSpec


def lookups(specs: Iterable[KernelSpec]) -> str:
    """Returns the table of some kernels, sorted by id."""
    return "".join(_line(spec) for spec in sorted(specs, key=lambda spec: spec.id.encode()))


def _line(spec: KernelSpec) -> str:
    # From the key, which holds the digest of the parameters for an op that ggml does not have.
    words = struct.unpack(f"<{N_WORDS}i", struct.pack(f"<{N_WORDS // 2}Q", *key(spec)[-N_WORDS // 2 :]))
    fields = (
        spec.id,
        spec.op,
        str(-1 if spec.alias is None else spec.alias),
        " ".join(map(str, words)),
        "|".join(map(_tensor, spec.inputs)),
        _tensor(spec.output),
    )
    return "\t".join(fields) + "\n"


def _tensor(tensor: TensorDesc | None) -> str:
    return "-" if tensor is None else " ".join(map(str, tensor_words(tensor)))


if __name__ == "__main__":
    plan = Plan.from_json(Path(sys.argv[1]).read_text())
    (bundle,) = (bundle for bundle in plan.bundles if bundle.id == sys.argv[2])
    sys.stdout.write(lookups(kernel.spec for kernel in plan.kernels if kernel.spec.id in set(bundle.kernels)))
