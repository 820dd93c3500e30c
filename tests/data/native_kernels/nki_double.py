"""A double of NKI's own compiler, for kernels with the lowering `native`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelgen.compilers.nki_driver import Config


class Double:
    """A toolchain that writes its arguments into the artifact.

    Args:
        in_file: whether the configuration names a file (as from NKI 0.4); if not, the configuration itself is the artifact.
        results: the number of results.
        salt: a string in the artifact.
        **more: fields of `Config`.
    """

    name = "nki 0.0 (a double)"

    def __init__(self, in_file: bool, results: int = 1, salt: str = "", **more: Any) -> None:
        self.in_file = in_file
        self.results = results
        self.salt = salt
        self.more = more

    def config(
        self,
        function: Callable[..., Any],
        arrays: Sequence[Any],
        keywords: Mapping[str, Any],
        grid: tuple[int, ...],
        target: str,
        folder: Path,
    ) -> Config:
        shapes = [(list(a.shape), a.dtype.name) for a in arrays]
        made = json.dumps(
            {"arrays": shapes, "grid": grid, "target": target, "of": function.__name__, "salt": self.salt}
        )
        results = ((tuple(arrays[0].shape), arrays[0].dtype.name),) * self.results
        if not self.in_file:
            return Config(made, results, **self.more)
        file = folder / "kernel.bir"
        file.write_text(made)
        text = base64.b64encode(json.dumps({"path": str(file), "nir": str(file), "version": 4}).encode()).decode()
        return Config(text, results, file=file, **self.more)
