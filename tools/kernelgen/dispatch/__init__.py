"""Which kernels compute a node or a group: lengths, costs and grouping, by the rules of the backend (backend/ggml-neuron)."""
