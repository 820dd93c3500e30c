"""Manifests: what a person writes, checked and turned into kernel specs.

`load` is the way in. The form of a manifest is in manifest.schema.json, its reference in docs/reference/manifest.md.
"""

from kernelgen.manifest.loader import load

__all__ = ["load"]
