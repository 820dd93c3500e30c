"""kernelgen: from a manifest of GGML kernels to NEFF bundles for AWS Neuron.

The package is layered one way: `manifest` and `plan` describe kernels and never import JAX; `render` turns a plan into build
files; `hlo`, `compilers` and `bundle` are the three build steps; `cli` is the only place that reads arguments and prints.
"""

__version__ = "0.1.0"
