"""Where a cluster runs what needs the SDK."""

load("@neuron_sdk//:identity.bzl", "IDENTITY")

def _properties(compiler, target):
    return {"neuron-compiler": compiler, "neuron-target": target}

def routed_to(target):
    """Returns the execution properties by which a cluster gives an action to a worker that has the compiler.

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
