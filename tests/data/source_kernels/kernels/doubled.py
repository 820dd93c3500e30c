"""A kernel that reads an environment variable and records a note."""

import os

import numpy as np

from kernelgen.languages.numpy import knob


def doubled(x, *, label, factor, on, none):
    assert (label, on, none) == ('it\'s "quoted"', True, None)
    x[:] = x + np.float32(factor) * np.float32(os.environ["FACTOR"].split()[1])
    return knob(x, mem_space="Hbm")
