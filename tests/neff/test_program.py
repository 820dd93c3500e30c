"""Instructions, copies and scratchpad of a NEFF's program."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile

import pytest

from kernelgen.errors import KernelgenError
from kernelgen.neff.program import program
from kernelgen.neff.scratchpad import scratchpad_bytes


def neff(members: dict[str, bytes]) -> bytes:
    """Returns a NEFF with members."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    payload = gzip.compress(tar.getvalue())
    header = b"".join(n.to_bytes(8, "little") for n in (2, 1024, len(payload), 1, 0))
    return header.ljust(1024, b"\0") + payload


def copies(queue: str, *sizes: tuple[list[int], list[int]]) -> bytes:
    descriptors = [{"from_sizes": source, "to_sizes": target} for source, target in sizes]
    return json.dumps({"dma": [{"queue": queue, "desc": descriptors}]}).encode()


def test_instructions_are_those_of_the_core_that_has_most() -> None:
    found = program(
        neff(
            {
                "sg00/PE.bin": bytes(64 * 3),
                "sg00/SP.bin": bytes(64),
                "sg01/PE0.bin": bytes(64 * 9),
                "sg00/act_info.json": b"{}",
                "sg00/SP.json": copies("qSPSpillReload0", ([512, 128], [64, 1024])),
                "sg00/Pool.json": copies("qPoolIO0", ([4096], [4096]), ([16, 5], [80])),
                "sg01/DVE.json": b"{}",
            }
        )
    )
    assert dict(found.instructions) == {"PE": 9} and found.total == 9
    assert (found.descriptors, found.spills) == (1024 + 1 + 5, 1024)


def test_copies_of_another_form_are_refused() -> None:
    with pytest.raises(KernelgenError, match=re.escape("the copies of sg00/SP.json cannot be read")):
        program(neff({"sg00/SP.json": b'{"dma": [{"desc": 3}]}'}), source="x.neff")


def variables(*placed: tuple[str, int, int]) -> bytes:
    made = {
        f"v{i}": {"type": kind, "backing_variable_off": at, "size": size} for i, (kind, at, size) in enumerate(placed)
    }
    return json.dumps({"var": made | {"input0": {"type": "input", "size": 1 << 30}}}).encode()


def test_the_end_of_the_last_variable_counts_on_each_core() -> None:
    first = variables(("virtual", 0, 4096), ("virtual", 1024, 8192), ("virtual", 2048, 64))
    assert scratchpad_bytes(neff({"sg00/def.json": first})) == 1024 + 8192
    both = {"sg00/def.json": first, "sg01/def.json": variables(("virtual", 512, 512))}
    assert scratchpad_bytes(neff(both)) == 1024 + 8192 + 1024
    assert scratchpad_bytes(neff({"sg00/def.json": variables()})) == 0


@pytest.mark.parametrize("text", [b"[]", b'{"var": {"v": {"type": "virtual", "size": 1}}}', b"nothing"])
def test_variables_of_another_form_are_refused(text: bytes) -> None:
    with pytest.raises(KernelgenError, match=re.escape("the variables of sg00/def.json cannot be read")):
        scratchpad_bytes(neff({"sg00/def.json": text}))
