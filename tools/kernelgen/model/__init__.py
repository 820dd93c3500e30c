"""Derives a manifest from a model file: the kernels that the model needs, as formulas of the sizes of a call.

    sources     recognizes a source by its content
    checkpoint  converts a Hugging Face model's header with llama.cpp's converter
    exporter    finds and runs export-graphs, which exports a model's graphs with llama.cpp
    graphs      reads the output of export-graphs
    sizes       the possible calls in a context, and the calls for which graphs are exported
    formulas    fits formulas of sizes to integers
    derive      graphs to kernels with formulas, each checked at every exported size
    listed      reads sources that list kernels: exports of graphs, recorded files
    hsa         reads configurations of ggml-hsa-gen-kernels
    writing     writes kernels with formulas as a manifest

The package has no code for single architectures: llama.cpp's graphs define what a model computes.
"""
