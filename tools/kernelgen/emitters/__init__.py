"""Emitters: how they are found in a folder's sources, which one computes an op, and how it is imported.

`library` is a folder of them, `scan` reads its modules without importing them, `catalog` says which library computes an op.
`dependencies` and `loading` are what a build needs of one emitter. How an emitter is written is in `kernelgen.emitter`; what its
function makes is the business of `kernelgen.hlo`.
"""
