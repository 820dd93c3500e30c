"""Selects the kernels that compute a node or a group: lengths, costs and grouping, by the backend's rules (backend/ggml-neuron)."""
