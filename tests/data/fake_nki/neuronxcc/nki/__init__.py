"""A double of the NKI that is part of neuronx-cc: it is installed, and no kernel of it is compiled."""


def jit(function):
    return function
