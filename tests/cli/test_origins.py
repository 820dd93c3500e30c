"""The record that a compile step writes about its NEFF, and the bundle step's check of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.neff import provenance


@pytest.fixture
def made(tmp_path: Path) -> dict[str, dict[str, Path]]:
    """Returns the origin, HLO and NEFF of one kernel, `k`, as arguments of `check`."""
    files = {name: tmp_path / f"k.{name}" for name in ("origin", "hlo", "neff")}
    files["hlo"].write_bytes(b"HLO")
    files["neff"].write_bytes(b"NEFF")
    provenance.write(files["origin"], files["hlo"], "compiled", hashlib.sha256(b"NEFF").hexdigest())
    return {name: {"k": path} for name, path in files.items()}


def check(made: dict[str, dict[str, Path]]) -> dict[str, provenance.NeffOrigin]:
    return provenance.check(made["origin"], made["hlo"], made["neff"])


def test_a_neff_is_as_made_when_it_has_the_digest_that_was_recorded(made: dict[str, dict[str, Path]]) -> None:
    path = made["neff"]["k"]
    known = check(made)["k"]
    assert known.source == "compiled" and provenance.is_as_made(path, known)
    assert not provenance.is_as_made(path, None)
    path.write_bytes(b"NEFf")
    assert not provenance.is_as_made(path, known)
    path.unlink()
    assert not provenance.is_as_made(path, known)


@pytest.mark.parametrize(
    "which, reason", [("neff", "changed after it was compiled"), ("hlo", "was not compiled from the current HLO")]
)
def test_what_changed_is_refused_and_removed(made: dict[str, dict[str, Path]], which: str, reason: str) -> None:
    made[which]["k"].write_bytes(b"another")
    with pytest.raises(KernelgenError, match=f"kernel k: .*k.neff {reason}") as caught:
        check(made)
    assert caught.value.exit_code == EXIT_FAILED and "build again" in str(caught.value)
    assert not made["neff"]["k"].exists(), "so that the next build makes it"


def test_an_unreadable_origin_counts_as_none(made: dict[str, dict[str, Path]]) -> None:
    path = made["origin"]["k"]
    for text in ("", "[]", "{}", "7"):
        path.write_text(text)
        assert provenance.read(path) is None
