"""`kernelgen inspect --check` reports each bundle of tests/data/broken-bundles.json; tests/backend tests the C++ library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_bundles
from click.testing import CliRunner

from kernelgen.cli import inspect as inspect_command
from kernelgen.errors import EXIT_USAGE, KernelgenError


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundles.write_right(tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("row", tiny_bundles.ROWS, ids=lambda row: row["broken"])
def test_check(row: dict[str, Any], right: Path, tmp_path: Path) -> None:
    for form in tiny_bundles.forms(row):
        path = tiny_bundles.write(row, form, right, tmp_path / form)
        error = CliRunner().invoke(inspect_command.command, [str(path), "--check"]).exception
        if "check" not in row:
            assert error is None, f"{form}: {error}"
            continue
        assert isinstance(error, KernelgenError) and error.exit_code == EXIT_USAGE, f"{form}: {error!r}"
        assert row["check"] in str(error) and str(path) in str(error), f"{form}: {error}"


def test_every_pack_that_only_kernelgen_refuses_says_why() -> None:
    for row in tiny_bundles.ROWS:
        is_pack = "pack" in tiny_bundles.forms(row)
        assert ("why" in row) == (is_pack and "check" in row and "library" not in row), row["broken"]
        assert "library" not in row or "check" in row, row["broken"]
