"""What kernelgen knows of ggml: its tensor types and its ops, as plain tables."""
