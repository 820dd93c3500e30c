"""Bundles: the NEFFs of one manifest for one target, with an index from a kernel's spec to its NEFF.

`build` writes bundles and `reader` reads them; `contents` is the common content of the forms `pack`, `tree` and `embed`.
"""
