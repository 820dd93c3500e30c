"""A complete build on one machine without Bazel or CMake: `kernelgen build` runs it.

`pool` keeps worker processes; `executor` decides when each step runs and what is up to date. `kernelgen.steps.worker` has the
steps, which Bazel runs too.
"""
