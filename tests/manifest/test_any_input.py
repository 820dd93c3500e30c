"""For any content, loading a file succeeds or gives messages with places; it never raises another exception."""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError
from kernelgen.ggml.ops import OPS
from kernelgen.manifest import types

MANIFESTS = Path(__file__).parents[2] / "manifests"

SETTINGS = """\
format: 1
name: small
targets: [trn1, trn2]
compiler: {optlevel: 1, auto_cast: all, auto_cast_type: bf16, lnc: 1, extra_flags: ["--verbose", "35"], memory_per_compile: 2G}
kernels:
  - op: rope
    inputs: ["(64,4,1,1)/f32", "(1,1,1,1)/i32", "(32,1,1,1)/f32"]
    output: "(64,4,1,1)/f32"
    params: {n_dims: 64, freq_base: 1e4, attn_factor: 1.5}
"""
BATCHES = """\
format: 1
name: batches
targets: [inf2]
sizes: {n_rows: [1, 4], n_cells: [2, 4]}
where: [n_rows <= 2 * n_cells, n_rows != n_cells]
kernels:
  - &shared
    op: mul_mat
    name: mm-${n}
    inputs: ["(64,8,1,1)/f16", "(64,${n},1,1)/f32"]
    output: "(8,${n},1,1)/f32"
    params: {prec: 10}
    batch: {n: [1, 2]}
  - {<<: *shared, name: "other-${n}", params: {prec: 0, hint: "${n - 1}"}}
  - op: flash_attn_ext
    inputs: ["(64,${4 * n},8,1)/f32/(4,2048,256,${n * 8192})", "(64,256,2,1)/f16", "(64,256,2,1)/f16", "(256,${4 * n},1,1)/f16"]
    output: "(64,8,${4 * n},1)/f32"
    params: {scale: 0.125}
    batch: {n: [1, 2]}
  - {op: relu, inputs: ["(4,${n_rows},${n_cells},1)/f32"], output: "(4,${n_rows},${n_cells},1)/f32", where: [n_rows < 9]}
  - {op: my_bias, inputs: ["(4,1,1,1)/f32", "(4,1,1,1)/f32"], output: "(4,1,1,1)/f32", params: {scale: 1, clip: true}}
"""
SEEDS = [SETTINGS, BATCHES, (MANIFESTS / "basic.yaml").read_text(encoding="utf-8")]

ODD = [
    *("", "~", "null", "0", "-1", "1", "2", "1.5", "1e400", "-0", ".nan", ".inf", "0x10", "9" * 30, "16777216", "1e39", "1e-46", "true", "on", "[]"),
    "{}",
    *("[[]]", "{a: b}", "*x", "&x 1", "<<", "? ", "- ", "!!int 3", "!!binary x", "'", '"', "|", ">", "#", "%YAML 1.1", "---"),
    "...",
    *("${n}", "${", "${}", "${n*n}", "${9**9**9}", "${2and n}", "${(" + "(" * 60 + "}", "(1,1,1,1)/f32", "(1,1,1,1)/q4_0", "(0,1,1,1)/f32"),
    *("(1,1,1)/f32", "(2,2,2,2)/f32/(4,4,4,4)", "(9999999999,9999999999,1,1)/f32", "trn1", "trn3", "llama", "both", "\x00"),
    "\ud7ff",
    *("é", "\U0001f600", "\t", "\u2028", "a" * 3000, "4294967296", "256", "q8_0", "--target=x", "word3"),
    *OPS,
    *types.Manifest.__struct_fields__,
    *types.OpKernel.__struct_fields__,
    *types.SourceKernel.__struct_fields__,
]  # fmt: skip

_TOKEN = re.compile(r"[A-Za-z_0-9.+-]+|\s+|.", re.DOTALL)


def examples(count: int) -> settings:
    """The same examples in every run, on a machine of any speed."""
    return settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )


def outcome(data: bytes, library: Library) -> list[str]:
    """Loads `data` as a manifest; returns the messages, each with a right place."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        try:
            manifest.load([file.name], Catalog([library]))
        except KernelgenError as error:
            assert error.diagnostics
            lines = data.count(b"\n") + 2
            for diagnostic in error.diagnostics:
                where = diagnostic.location
                assert where is not None, diagnostic
                assert where.file == file.name
                assert 1 <= where.line <= lines or b"\r" in data or not data.isascii(), diagnostic
                assert where.column >= 1
                assert "\n" not in diagnostic.message
                assert len(diagnostic.message) < 700, "a message for reading"
            assert len(set(error.diagnostics)) == len(error.diagnostics), "no message comes twice"
            return [d.message for d in error.diagnostics]
        return []


@examples(1000)
@given(seed=st.integers(0, 2**32), which=st.integers(0, len(SEEDS) - 1), count=st.integers(1, 6))
def test_mutated_manifests(seed: int, which: int, count: int, library: Library) -> None:
    chance = random.Random(seed)  # hypothesis shrinks the number of mutations, not their kind
    tokens = _TOKEN.findall(SEEDS[which])
    for _ in range(count):
        i, j = sorted(chance.randrange(len(tokens)) for _ in range(2))
        kind = chance.randrange(6)
        if kind <= 2:
            tokens[i] = chance.choice(ODD)
        elif kind == 3:
            del tokens[i : min(j, i + 20)]
            tokens.append("")
        elif kind == 4:
            tokens[i:i] = tokens[i : min(j, i + 20)]
        else:
            tokens[i], tokens[j] = tokens[j], tokens[i]
    outcome("".join(tokens).encode("utf-8", "surrogatepass"), library)


@pytest.mark.parametrize("text", SEEDS)
def test_what_is_mutated_is_right_before(text: str, library: Library) -> None:
    assert outcome(text.encode(), library) == []


@examples(200)
@given(data=st.binary(max_size=200) | st.text("[]{}:,-?!&*#|>'\"% \n\tab1.~<é", max_size=60).map(str.encode))
def test_any_bytes(data: bytes, library: Library) -> None:
    outcome(data, library)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested deeper than 32 levels"),
        ("{a: " * 100_000, "nested deeper than 32 levels"),
        ("- " * 100_000 + "a", "nested deeper than 32 levels"),
        ("format: " + "1" * 100_000, "a number of 100000 digits is not a figure of a manifest"),
        ("a" * 1_000_000, "expected a mapping"),
        ("format: 1\n" + "x: 1\n" * 3, "key 'x' is already defined"),
    ],
    ids=["lists", "maps", "blocks", "digits", "a long word", "keys"],
)  # fmt: skip
def test_large_and_deep_documents_are_refused_quickly(text: str, message: str, library: Library) -> None:
    assert any(message in m for m in outcome(text.encode(), library))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"format: 1\nname: \xff\n", "2:7: error: byte 0xff is not UTF-8"),
        ("format: 1\nname: é\n".encode("utf-16"), "1:1: error: byte 0xff is not UTF-8"),
        (b"format: 1\nname: a\x07\n", "2:8: error: not YAML: control characters are not allowed"),
        ("# äöü\nname: é\x07\n".encode(), "2:8: error: not YAML: control characters are not allowed"),
        (b"\xef\xbb\xbfformat: 2\n", "1:9: error: format: expected 1, not '2'"),
    ],
    ids=["latin-1", "utf-16", "control character", "control character after others", "byte order mark"],
)
def test_encodings(data: bytes, message: str, library: Library, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_bytes(data)
    with pytest.raises(KernelgenError) as caught:
        manifest.load([file], Catalog([library]))
    assert any(message in str(d) for d in caught.value.diagnostics)
