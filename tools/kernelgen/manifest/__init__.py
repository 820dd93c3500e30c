"""Manifests: reads and checks them, and turns them into kernel specs.

`load` is the entry point. manifest.schema.json defines the form of a manifest; docs/reference/manifest.md is its reference.
"""

from kernelgen.manifest.loader import load

__all__ = ["load"]
