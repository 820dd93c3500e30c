"""From a model file to a manifest: which kernels a model needs, as formulas of the sizes of a call.

    sources     what a source is, told by its content
    checkpoint  the header of a Hugging Face model, by llama.cpp's converter
    exporter    finds and runs export-graphs, which asks llama.cpp for a model's graphs
    graphs      reads what it prints
    sizes       which calls a context can meet, and which of them are looked at
    formulas    integers as formulas of sizes
    derive      graphs to kernels with formulas, each checked at every size that was looked at
    listed      kernels of sources that list them: exports of graphs, recorded files
    hsa         configurations of ggml-hsa-gen-kernels
    writing     kernels with formulas to the text of a manifest

Nothing here knows an architecture: what a model computes is what llama.cpp says.
"""
