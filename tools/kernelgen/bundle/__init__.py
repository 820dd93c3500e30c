"""Bundles: the NEFFs of one manifest for one target, with an index that finds a kernel by what it computes.

`build` writes them, `reader` reads them; `contents` is what is in common to their forms `pack`, `tree` and `embed`.
"""
