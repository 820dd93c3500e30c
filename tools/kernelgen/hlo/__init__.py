"""HLO: the canonical module that a compiler is given, and what is known about such a module.

`lint` says what neuronx-cc is known to refuse; `describe` reads a module for people; `execute` runs one with XLA on the CPU. Which
compiler follows is not known here. JAX is imported by the functions that need it.
"""
