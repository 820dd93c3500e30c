"""ggml's tensor types and ops, as plain tables."""
