"""A double of NKI 0.4, as far as kernels' files and the call of its compiler need it: what it compiles is not looked at."""


def jit(function):
    return function
