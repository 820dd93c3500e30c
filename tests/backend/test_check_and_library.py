"""`kernelgen inspect --check` and the C++ library agree about bundles: the broken ones of tests/data, and mutated ones."""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_bundles

from kernelgen.bundle import describe, pack
from kernelgen.bundle.key import MIN_SLOTS, key
from kernelgen.errors import KernelgenError
from kernelgen.spec.kernel import MAX_INPUTS, Spec

ROOT = Path(__file__).parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]

STRICTER = {
    # Patterns of messages for mistakes that only kernelgen refuses, each with the part that the library does not read.
    r"its key does not match its spec|its spec belongs to|no key can be made of its spec|spec.* (cannot be read|is missing)|kernel\.specs": "specs",
    r"notes has|the notes of": "notes",
    r"kernel\.flags": "flags of single kernels",
    r"cannot be the name of a file": "names of an embedded bundle's files",
    r"no machine is a|, unlike its bundle": "the device, which the backend compares with its own",
    r"not UTF-8": "the encoding of text",
    r"not a NEFF|damaged NEFF|compiled (for|by)": "what a NEFF is",
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundles.write_right(tmp_path_factory.mktemp("right"))


def library_says(run: Run, paths: Sequence[Path]) -> list[str]:
    """Returns the library's error for each bundle, or ""."""
    done = run("opens", stdin="".join(f"{path}\n" for path in paths))
    assert done.returncode == 0, done.stderr
    lines = ["" if line == "ok" else line for line in done.stdout.splitlines()]
    assert len(lines) == len(paths)
    return lines


def check_says(path: Path) -> str:
    """Returns kernelgen's error for a bundle, or ""."""
    try:
        describe.text(describe.describe(path, check=True))
    except KernelgenError as error:
        return str(error)
    return ""


def test_the_library_says_what_the_table_says(run: Run, right: Path, tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], Path]] = []
    for number, row in enumerate(tiny_bundles.ROWS):
        if "pack" in tiny_bundles.forms(row):
            rows.append((row, tiny_bundles.write(row, "pack", right, tmp_path / f"{number}")))
    wrong = []
    for (row, path), said in zip(rows, library_says(run, [path for _, path in rows]), strict=True):
        expected = row.get("library")
        if bool(said) != (expected is not None) or (said and (expected not in said or str(path) not in said)):
            wrong.append(f"{row['broken']}: {said or 'it opens'}; expected {expected!r}")
    assert not wrong, "\n".join(wrong)


def _mutated_bytes(data: bytes, end: int, chance: random.Random) -> bytes:
    """Returns bytes with some changes before `end`: flipped bits, other bytes, lost parts, repeated parts."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 3))):
        at = chance.randrange(end)
        match chance.randrange(5):
            case 0:
                made[at] ^= 1 << chance.randrange(8)
            case 1:
                made[at] = chance.choice((0, 1, 2, 0x22, 0x30, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 2:
                del made[at : at + chance.choice((1, 1, 8, 40))]
            case 3:
                other = chance.randrange(end)
                made[at:at] = data[other : other + chance.choice((1, 8, 40))]
            case 4:
                other = chance.randrange(end)
                made[at : at + 8] = data[other : other + 8]
    return bytes(made)


def _mutated_values(made: Any, chance: random.Random) -> None:
    """Changes a value in an index: swaps two of its values, sets a dangerous one or a word of a key, or deletes one."""
    places: list[tuple[Any, Any]] = []
    waiting = [made]
    while waiting:
        at = waiting.pop()
        names = at if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        places += [(at, name) for name in names]
        waiting += [at[name] for name in names]
    at, name = chance.choice(places)
    other, its = chance.choice(places)
    if isinstance(at[name], str) and len(at[name]) % 16 == 0 and len(at[name]) >= 16 and chance.random() < 0.7:
        word = 16 * chance.randrange(len(at[name]) // 16)
        value = chance.choice((0, 1, 2, 17, 2**32, 2**63, 2**64 - 1, chance.getrandbits(64)))
        at[name] = f"{at[name][:word]}{value:016x}{at[name][word + 16 :]}"
    elif chance.random() < 0.3:
        at[name] = chance.choice((0, -1, 1.5, 2**32, 2**64, "", "x", "\0", "\ud800", None, True, [], {}, [[[]]]))
    elif chance.random() < 0.2:
        del at[name]
    else:
        at[name], other[its] = other[its], at[name]


def _derived(made: dict[str, Any], chance: random.Random) -> None:
    """Changes a number or a name in a kernel's spec, and updates the values that follow from it: kernelgen accepts only
    right keys.
    """
    kernel = chance.choice(made["kernels"])
    text = json.dumps(kernel["spec"])
    for _ in range(chance.choice((1, 1, 2))):
        found = chance.choice([*re.finditer(r"-?\d+|(?<=\")[a-z_]+(?=\")|null|false|true", text)])
        numbers = (0, 1, 2, 3, 4, 32, 64, 128, 1024, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, -1)
        other = chance.choice(("add", "relu", "cpy", "set_rows", "null", "true", *map(str, numbers)))
        text = f"{text[: found.start()]}{other}{text[found.end() :]}"
    if chance.random() < 0.2:  # more inputs, absent ones, strides
        text = text.replace('"inputs": [', '"inputs": [' + chance.choice(("null, ", '"(64,4,1,1)/f32", ' * 15)))
    if chance.random() < 0.3:
        text = text.replace("/f32", f"/f32/(4,{chance.choice((4, 256, 512, 2**60, 2**62))},1024,1024)", 1)
    try:
        spec = Spec.from_json(json.loads(text))
        kernel |= {"spec": spec.to_json(), "id": spec.id, "key": "".join(f"{word:016x}" for word in key(spec))}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return  # no kernel has such a spec
    made["kernels"].sort(key=lambda kernel: str(kernel["id"]).encode())


def mutated(right: Path, folder: Path, chance: random.Random, count: int) -> Iterator[Path]:
    """Yields packs with changes."""
    whole = tiny_bundles.pack_bytes(tiny_bundles.Draft(right, json.loads((right / "index.json").read_text())))
    (folder / "whole.gguf").write_bytes(whole)
    end = pack.read(folder / "whole.gguf").data_offset
    text = (right / "index.json").read_bytes()
    for number in range(count):
        path = folder / f"{number}.kernels.gguf"
        kind = chance.random()
        by_value = kind < 0.7
        value = json.loads(text)
        if kind < 0.4:
            _derived(value, chance)
        elif by_value:
            for _ in range(chance.choice((1, 1, 2))):
                _mutated_values(value, chance)
        try:
            data = tiny_bundles.pack_bytes(tiny_bundles.Draft(right, value)) if by_value else whole
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            OSError,
            OverflowError,
            KernelgenError,
            struct.error,
        ):
            continue  # a pack can't contain it
        path.write_bytes(data if by_value else _mutated_bytes(data, end, chance))
        yield path


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 300), *(pytest.param(seed, 3000, marks=pytest.mark.long) for seed in range(2, 6))]
)
def test_what_check_takes_the_library_opens_and_the_reverse(
    run: Run, right: Path, tmp_path: Path, seed: int, count: int
) -> None:
    chance = random.Random(seed)
    paths = list(mutated(right, tmp_path, chance, count))
    outcomes: Counter[tuple[bool, bool]] = Counter()
    wrong = []
    for path, library in zip(paths, library_says(run, paths), strict=True):
        check = check_says(path)
        outcomes[bool(check), bool(library)] += 1
        if library and not check:
            wrong.append(f"{path}: kernelgen finds nothing, the library: {library}")
        elif check and not library and not any(re.search(pattern, check) for pattern in STRICTER):
            wrong.append(f"{path}: the library opens it, kernelgen: {check}")
        path.unlink()
    assert not wrong, "\n".join(wrong)
    # The mutations reach each outcome except the wrong one.
    assert all(outcomes[each] > count // 100 for each in ((True, True), (True, False), (False, False))), outcomes
    assert outcomes[False, True] == 0


def test_both_have_the_same_limits() -> None:
    def number(file: str, name: str) -> str:
        found = re.search(rf"\b{name}\s*(?:=\s*)?(\d+)", (ROOT / "backend/bundle" / file).read_text())
        assert found is not None
        return found[1]

    assert int(number("include/neuron_kernels.h", "NEURON_KERNELS_MAX_INPUTS")) == MAX_INPUTS
    assert int(number("src/key.h", "MIN_SLOTS")) == MIN_SLOTS
