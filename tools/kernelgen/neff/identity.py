"""The identity of a NEFF: the bytes of its HLO, the compiler's name and version, and the compiler's flags, including the target.

A NEFF depends only on these, however it is built. The caches find it by the digest of a `NeffKey`. `kernelgen build` and CMake
compile HLO that has no NEFF with that key. Bazel's compile actions have these parts, and the driver that runs the compiler, as
inputs. A simulated NEFF and a bundle record them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.spec.canonical import canonical_json

FORMAT = 1
"""Version of the digest of a key; part of every name, so that no version of the cache reads another's entries."""


def flag(flags: Sequence[str], name: str) -> str | None:
    """Returns the value of one of neuronx-cc's flags (`--target`), as its own parser does: the last occurrence counts."""
    value = None
    for word, following in zip(flags, [*flags[1:], ""], strict=True):
        if word == name:
            value = following
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
    return value


@dataclass(frozen=True, slots=True)
class NeffKey:
    """All inputs of a NEFF.

    Attributes:
        hlo_sha256: digest of the canonical HLO's bytes, in hex.
        compiler: the compiler's identity: name and version.
        flags: the compiler's arguments, every one explicit, including the target.
    """

    hlo_sha256: str
    compiler: str
    flags: tuple[str, ...]

    @staticmethod
    def make(hlo: bytes, compiler: str, flags: Sequence[str]) -> NeffKey:
        """Returns the key of a NEFF.

        Args:
            hlo: the serialized HLO.
            compiler: the compiler's identity.
            flags: the compiler's arguments (`CompileConfig.flags`).
        """
        return NeffKey(hashlib.sha256(hlo).hexdigest(), compiler, tuple(flags))

    @property
    def target(self) -> str:
        """The target of the compile."""
        return flag(self.flags, "--target") or ""

    @property
    def name(self) -> str:
        """The digest of the parts: 64 hex digits."""
        return hashlib.sha256(canonical_json([FORMAT, self.to_json()]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "compiler": self.compiler,
            "flags": list(self.flags),
            "hlo_sha256": self.hlo_sha256,
            "target": self.target,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> NeffKey:
        """Returns the key that `to_json` wrote. The target is optional, since the flags have it.

        Raises:
            ValueError, KeyError, TypeError: `value` is not such a key.
        """
        flags = value["flags"]
        texts = [value["hlo_sha256"], value["compiler"], *flags]
        if not isinstance(flags, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("its parts are not text")
        key = NeffKey(value["hlo_sha256"], value["compiler"], tuple(flags))
        if value.get("target", key.target) != key.target:
            raise ValueError("its target is not the flags'")
        return key
