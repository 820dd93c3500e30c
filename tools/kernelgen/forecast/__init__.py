"""Forecasts how long kernels take on a device, from a kernel's HLO and the table of the chips, without a device.

`work` counts a program's memory traffic and computation, `time` turns them into microseconds for a target, and `call` adds up the
launches of a call. These are not measurements; docs/results/forecast-judged.md compares them with published ones.
"""
