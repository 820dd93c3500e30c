"""Execution properties of actions that require the SDK."""

load("@neuron_sdk//:identity.bzl", "IDENTITY")

def _properties(compiler, target):
    return {"neuron-compiler": compiler, "neuron-target": target}

def routed_to(target):
    """Returns the execution properties with which a cluster chooses a worker that has the compiler.

    Args:
        target: neuronx-cc's `--target`.

    Returns:
        a select; empty without `--@neuron_kernelgen//rules:route_compiles`.
    """
    return select({
        Label("//rules:routed_to_auto"): _properties(IDENTITY or "simulator", target),
        Label("//rules:routed_to_neuronx-cc"): _properties(IDENTITY, target),
        Label("//rules:routed_to_simulator"): _properties("simulator", target),
        "//conditions:default": {},
    })
