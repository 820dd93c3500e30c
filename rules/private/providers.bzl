"""What the rules tell each other."""

NeuronHloInfo = provider(
    doc = "One kernel's canonical HLO.",
    fields = {
        "id": "string: the kernel's id.",
        "spec": "string: the kernel's canonical JSON.",
        "hlo": "File: a serialized HloModuleProto.",
    },
)

NeuronNeffInfo = provider(
    doc = "One kernel compiled for one target.",
    fields = {
        "kernel": "NeuronHloInfo of what was compiled.",
        "config": "string: compile settings as JSON.",
        "identity": "string: the compiler's name and version.",
        "neff": "File: the NEFF.",
    },
)

NeuronBundleInfo = provider(
    doc = "The kernels of one manifest for one target.",
    fields = {
        "name": "string: the bundle's, `<manifest>_<target>`.",
        "pack": "File: the GGUF pack.",
        "tree": "File: the tree, a directory.",
        "lookups": "File: a text table of every kernel's description, for tests.",
    },
)

NeuronToolchainInfo = provider(
    doc = "A compiler from HLO to NEFF.",
    fields = {
        "compiler": "string: `neuronx-cc` or `simulator`.",
        "disabled": "string: why nothing can be compiled, or empty.",
        "executable": "File: neuronx-cc, or None.",
        "identity": "string: name and version; part of every compile's key.",
        "tool": "KernelgenToolInfo of the driver.",
    },
)
