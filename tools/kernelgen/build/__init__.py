"""A complete build on one machine without Bazel or CMake: `kernelgen build` runs it.

`pool` keeps worker processes; `executor` decides when each step runs and what is up to date. The steps are those of
`kernelgen.steps.worker`, which Bazel runs too.
"""
