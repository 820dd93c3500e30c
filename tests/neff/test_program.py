"""Instructions, copies and scratchpad of a NEFF's program."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile

import pytest

from kernelgen.errors import KernelgenError
from kernelgen.hlo import proto
from kernelgen.hlo.estimate import estimate
from kernelgen.hlo.linted import LintedModule
from kernelgen.neff.memory import NeffMemory, estimated_scratchpad_bytes, needed, scratchpad_bytes
from kernelgen.neff.program import program


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
    assert found.all_instructions == 3 + 1 + 9


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


def chain(*opcodes: str) -> bytes:
    """Returns a module whose instructions each make f32[4096,4096], 64 MiB, from the one before."""
    made = LintedModule.MESSAGE(name="made", entry_computation_name="main", entry_computation_id=1)
    computation = made.computations.add(name="main", id=1, root_id=len(opcodes))
    for number, opcode in enumerate(opcodes, start=1):
        i = computation.instructions.add(name=f"{opcode}.{number}", opcode=opcode, id=number)
        i.shape.element_type = 11
        i.shape.dimensions.extend((4096, 4096))
        i.operand_ids.extend(range(number - 1, number) if number > 1 else ())
        i.dimensions.extend([1] if opcode == "sort" else [])
    return proto.serialize(made)


HLO, SPILLING = chain("parameter", "negate"), chain("parameter", "sort", "negate")


def takes(members: dict[str, bytes], *, simulated: bool = False, hlo: bytes = HLO) -> NeffMemory:
    return needed(neff(members), hlo, "trn2", 2, "generic", simulated=simulated)


def test_what_a_program_takes_is_read_from_its_neff() -> None:
    spills = copies("qSPSpillReload0", ([512, 128], [64, 1024]))
    both = {"sg00/PE.bin": bytes(640), "sg01/PE.bin": bytes(1280), "sg01/SP.json": spills}
    placed = {"sg00/def.json": variables(("virtual", 0, 4096)), "sg01/def.json": variables(("virtual", 0, 8))}
    assert takes(both | placed) == NeffMemory(code=640 + 1280, rings=32 * 1024, scratchpad=4104)


def test_what_a_neff_does_not_say_is_estimated() -> None:
    """If the engines make descriptors at run time, a NEFF has no copies."""
    made = estimate(SPILLING, "trn2", 2)
    assert made.ring_bytes > 0
    said = takes({"sg00/PE.bin": bytes(640)}, hlo=SPILLING)
    assert (said.code, said.rings) == (640, made.ring_bytes)
    assert takes({}, hlo=SPILLING).code == made.code_bytes


def test_a_simulated_program_takes_of_the_scratchpad_what_the_state_buffer_does_not_hold() -> None:
    made = estimated_scratchpad_bytes(SPILLING)
    assert made > 2 * 28 << 20
    assert takes({}, simulated=True, hlo=SPILLING).scratchpad == made - (2 * 28 << 20)
    assert takes({}, simulated=True).scratchpad == 0


def test_an_invalid_hlo_is_refused() -> None:
    with pytest.raises(KernelgenError, match="can't be estimated from its HLO"):
        takes({}, hlo=b"no module")


@pytest.mark.parametrize("text", [b"[]", b'{"var": {"v": {"type": "virtual", "size": 1}}}', b"nothing"])
def test_variables_of_another_form_are_refused(text: bytes) -> None:
    with pytest.raises(KernelgenError, match=re.escape("the variables of sg00/def.json cannot be read")):
        scratchpad_bytes(neff({"sg00/def.json": text}))
