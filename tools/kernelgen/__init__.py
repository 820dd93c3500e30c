"""kernelgen: builds NEFF bundles for AWS Neuron from manifests of GGML kernels.

The package has layers: `manifest` and `plan` describe kernels and never import JAX; `render` turns a plan into build files; `hlo`,
`compilers` and `bundle` are the three build steps; only `cli` reads arguments and prints. docs/reference/architecture.md has the
levels, which define the allowed imports.
"""

__version__ = "0.1.0"
