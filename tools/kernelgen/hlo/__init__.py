"""HLO: the canonical module for the compiler, and analyses of such a module.

`lint` finds HLO that neuronx-cc is known to refuse; `describe` describes a module for people; `execute` runs one with XLA on the
CPU. This package does not depend on the choice of compiler. Functions that need JAX import it.
"""
