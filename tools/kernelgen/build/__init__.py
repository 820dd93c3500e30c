"""A build as a list of steps, and what runs it without Bazel: ninja (`kernelgen build`), or CMake's generator."""
