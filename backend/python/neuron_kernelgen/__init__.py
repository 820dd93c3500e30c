"""The AWS Neuron backend and export-graphs for llama-cpp-python; importing this loads no library."""
