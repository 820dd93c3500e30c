"""NKI without an SDK: kernels are run as Python code, recorded, and lowered through JAX to plain HLO.

`loading` finds kernels in files, `kernel` records them, `program` and `tensors` are what is recorded, `checks` the limits of the
hardware, `isa` the instructions by engine, `language` the rest of what kernels import, `roll` makes loops of what was recorded,
`access` plans how views become slices, and `lower` and `memory` turn the record into JAX operations. Only these two need JAX.
"""
