"""The build steps as Bazel, CMake and `kernelgen build` call them: one module per step, run by `worker`."""
