"""What `kernelgen doctor --device` does on a NeuronCore, or on the simulator: libnrt from Python, and checks of it."""
