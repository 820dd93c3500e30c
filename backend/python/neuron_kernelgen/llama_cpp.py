"""llama-cpp-python on AWS Neuron.

    import neuron_kernelgen.llama_cpp            # before the first llama_cpp.Llama(...)
    from llama_cpp import Llama

    Llama("MODEL.gguf", n_gpu_layers=-1)

Importing this module loads the backend into llama-cpp-python's llama.cpp. GGML_NEURON_KERNEL_DIR names the kernels, as for every
program with the backend. If the backend finds no kernels or no NeuronCore, it prints why, and llama.cpp computes on the CPU.

The package also has export-graphs, so that `kernelgen model` needs no build of llama.cpp.
"""

from __future__ import annotations

from neuron_kernelgen.files import load

load()
