"""How long kernels take on a device, by a model: from a kernel's HLO and the table of the chips, without a device.

`work` counts what a program moves and computes, `time` makes microseconds of it for a target, and `call` adds up the launches of a
call. Nothing here is a measurement; docs/results/forecast-judged.md says how far others' measurements are from it.
"""
