"""Messages about a cache: a build prints each once, though it has many processes.

The processes of a build share a folder. A file in it records that a message was printed, or that something fails. The folder
belongs to this build, so no message repeats and no record of an earlier build counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

RETRY_SECONDS = 60.0
"""Seconds before a failed operation is tried again."""


class Notices:
    """Prints each message once; see the module.

    Args:
        say: function that prints a text.
        folder: the folder that the build's processes share; None when there is only this one.
        build: identifies the build among builds that use the same folder one after the other.
    """

    def __init__(self, say: Callable[[str], None], folder: Path | None = None, build: str = "") -> None:
        self._say = say
        self._folder = folder
        self._build = build
        self._said: set[str] = set()
        self._down: dict[str, float] = {}

    def once(self, kind: str, text: str) -> None:
        """Prints a text, unless this build has already printed one of this kind."""
        if kind not in self._said:
            self._said.add(kind)
            if self._first(kind):
                self._say(text)

    def fail(self, kind: str, text: str) -> None:
        """Records a failure: until `RETRY_SECONDS` have passed it counts as `down`, for every process of the build."""
        self._down[kind] = time.monotonic()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file(f"{kind}-down").touch()
        self.once(kind, text)

    def down(self, kind: str) -> bool:
        """Returns whether something failed so recently that the build does not try it again yet."""
        if kind in self._down and time.monotonic() - self._down[kind] < RETRY_SECONDS:
            return True
        if self._folder is None:
            return False
        try:
            age = time.time() - self._file(f"{kind}-down").stat().st_mtime
        except OSError:
            return False
        return abs(age) < RETRY_SECONDS  # a clock that was set back must not keep it down for long

    def _file(self, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._build}.{kind}"

    def _first(self, kind: str) -> bool:
        if self._folder is None:
            return True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file(kind).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # printing twice is better than never
            return True
        with contextlib.suppress(OSError):
            for old in self._folder.iterdir():
                if not old.name.startswith(f"{self._build}."):
                    old.unlink(missing_ok=True)
        return True
