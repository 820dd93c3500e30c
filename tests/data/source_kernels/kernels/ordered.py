import numpy as np


def less(x, y):
    return np.exp(x) - y
