"""The checks of `kernelgen doctor --device` on a NeuronCore or the simulator, and libnrt from Python."""
