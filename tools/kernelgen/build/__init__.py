"""The whole job on one machine without Bazel or CMake: what `kernelgen build` runs.

`pool` keeps worker processes; `job` decides which step runs when, and what is up to date. The steps themselves are
`kernelgen.steps.worker`'s, the same that Bazel runs.
"""
