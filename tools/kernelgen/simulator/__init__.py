"""The process that computes for the simulated NeuronCores: `python -m kernelgen.simulator`, started by the simulator's libnrt.

The library (backend/simulator) has libnrt's functions, the tensors and all checks of what a client does; here is only what needs
XLA. Client and helper share the tensors' memory, so that what they say to each other is small (`protocol`). `device` loads and runs
NEFFs, `server` answers requests. Nothing else of kernelgen imports this package.
"""
