"""The process that computes for the simulated NeuronCores: `python -m kernelgen.simulator`, started by the simulator's libnrt.

The library (backend/simulator) has libnrt's functions, the tensors and all checks of the client's calls; this package has only the
parts that need XLA. Client and helper share the tensors' memory, so their messages are small (`protocol`). `device` loads and runs
NEFFs, `server` answers requests. No other package of kernelgen imports this one.
"""
