"""The embedded form: compiled, linked, and compared with the pack."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from kernelgen.bundle import build as bundle
from kernelgen.bundle import embed, pack
from kernelgen.plan import Bundle

from .conftest import Kernels

HEADERS = Path(__file__).parents[2] / "backend/bundle/include"

# Prints every table; the test compares the text.
MAIN = r"""
#include "tiny_trn1.h"
#include <stdio.h>
#include <string.h>

int main(void) {
    const neuron_kernels_table * t = &neuron_kernels_tiny_trn1;
    printf("%u %u %u %u %u %u %u\n", t->struct_size == sizeof(*t), t->format, t->simulated, t->lnc, t->n_kernels, t->n_neffs,
           t->n_slots);
    printf("%s|%s|%s|%s|%s|%s", t->name, t->target, t->compiler, t->version, t->jax_version, t->flags);
    for (uint32_t i = 0; i < t->n_kernels; i++) {
        printf("%s %s %u", t->ids + t->id_offsets[i], t->hlo_sha256 + 65 * i, t->kernel_neff[i]);
        for (uint32_t w = t->key_offsets[i]; w < t->key_offsets[i + 1]; w++) {
            printf(" %llu", (unsigned long long) t->key_words[w]);
        }
        printf("\n");
    }
    for (uint32_t i = 0; i < t->n_slots; i++) {
        printf("%u ", t->slots[i]);
    }
    printf("\n");
    for (uint32_t i = 0; i < t->n_neffs; i++) {
        const uint8_t * data = t->neff_data + t->neff_offsets[i];
        unsigned long long sum = 0;
        for (uint64_t b = 0; b < t->neff_sizes[i]; b++) {
            sum = sum * 31 + data[b];
        }
        printf("%llu %llu %s", (unsigned long long) t->neff_sizes[i], sum, t->neff_sha256 + 65 * i);
        for (int m = 0; t->neff_memory && m < NEURON_KERNELS_N_MEMORY; m++) {
            printf(" %llu", (unsigned long long) t->neff_memory[NEURON_KERNELS_N_MEMORY * i + m]);
        }
        printf("\n");
    }
    return (uintptr_t) t->neff_data % 64 + (uintptr_t) t->key_words % 8 + (uintptr_t) t->slots % 4;
}
"""


def expected(made: pack.Pack) -> str:
    origin = made.origin
    lines = [
        f"1 3 {int(origin.simulated)} {origin.lnc} {len(made.index.ids)} {len(made.neffs)} {len(made.index.slots)}"
    ]
    head = [origin.name, origin.target, origin.compiler, origin.version, origin.jax_version, origin.flags[0]]
    lines += ["|".join(head), *origin.flags[1:]]
    for number, kernel in enumerate(made.index.ids):
        words = " ".join(map(str, made.index.key_of(number)))
        lines.append(f"{kernel} {made.hlo_sha256[number]} {made.kernel_neff[number]} {words}")
    lines.append("".join(f"{slot} " for slot in made.index.slots))
    for number, neff in enumerate(made.neffs):
        total = 0
        for byte in made.read_neff(number):
            total = (total * 31 + byte) % 2**64
        lines.append(" ".join(map(str, (neff.size, total, neff.sha256, *(neff.memory.words() if neff.memory else ())))))
    return "\n".join(lines) + "\n"


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no warnings"
    return done.stdout


@pytest.mark.parametrize("flags", [["-O2", "-fPIE", "-pie"], ["-fno-pie", "-no-pie", "-g"]])
def test_linked_tables_are_those_of_the_pack(kernels: Kernels, tmp_path: Path, flags: list[str]) -> None:
    out = tmp_path / "out"
    bundle.build(*kernels.arguments, jax_version='0"\\?', pack_path=out / "tiny_trn1.kernels.gguf", embed_folder=out)
    (out / "main.c").write_text(MAIN)
    flags = [*flags, "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", "-I."]
    run("cc", *flags, "main.c", "tiny_trn1.c", "tiny_trn1.S", "-o", "program", cwd=out)
    made = pack.read(out / "tiny_trn1.kernels.gguf")
    assert run("./program", cwd=out) == expected(made)

    symbols = run("nm", "--print-size", "program", cwd=out)
    for neff in made.neffs:
        (size,) = re.findall(rf"^\w+ (\w+) r neuron_neff_tiny_trn1_{neff.sha256[:16]}$", symbols, re.MULTILINE)
        assert int(size, 16) == neff.size
    assert "RWE" not in run("readelf", "-lW", "program", cwd=out), "the stack is not executable"
    assert str(tmp_path).encode() not in (out / "tiny_trn1.S").read_bytes()


def test_a_pack_that_does_not_say_what_programs_take_is_embedded(kernels: Kernels, tmp_path: Path) -> None:
    contents = dataclasses.replace(bundle.build(*kernels.arguments), neff_memory=())
    pack.write(tmp_path / "tiny_trn1.kernels.gguf", contents)
    made = pack.read(tmp_path / "tiny_trn1.kernels.gguf")
    assert {neff.memory for neff in made.neffs} == {None}
    embed.write(tmp_path, made)
    (tmp_path / "main.c").write_text(MAIN)
    run("cc", f"-I{HEADERS}", "-I.", "main.c", "tiny_trn1.c", "tiny_trn1.S", "-o", "program", cwd=tmp_path)
    assert run("./program", cwd=tmp_path) == expected(made)


def test_shared_library_exports_the_bundle_and_no_tables(kernels: Kernels, tmp_path: Path) -> None:
    out = tmp_path / "out"
    bundle.build(*kernels.arguments, pack_path=out / "tiny_trn1.kernels.gguf", embed_folder=out)
    flags = ["-shared", "-fPIC", f"-I{HEADERS}", "-I."]
    run("cc", *flags, "tiny_trn1.c", "tiny_trn1.S", "-o", "lib.so", cwd=out)
    exported = [line.split()[-1] for line in run("nm", "-D", "--defined-only", "lib.so", cwd=out).splitlines()]
    assert [name for name in exported if "neuron" in name] == ["neuron_kernels_tiny_trn1"]


def test_the_pack_is_found_by_another_name(kernels: Kernels, tmp_path: Path) -> None:
    bundle.build(*kernels.arguments, pack_path=tmp_path / 'a "b"/p.gguf', embed_folder=tmp_path, incbin='a "b"/p.gguf')
    run("cc", "-c", "tiny_trn1.S", "-o", "s.o", cwd=tmp_path)


def test_symbols_are_names_in_c(kernels: Kernels) -> None:
    assert embed.symbol(Bundle("llama-3.1 8B", "trn1", "trn1", ()).id) == "neuron_kernels_llama_3_1_8B_trn1"
