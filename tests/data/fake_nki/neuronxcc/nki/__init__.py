"""A double of the NKI that is part of neuronx-cc: it is installed, but compiles no kernel."""


def jit(function):
    return function
