"""The providers of the rules."""

NeuronHloInfo = provider(
    doc = "One kernel's canonical HLO.",
    fields = {
        "id": "string: the kernel's id.",
        "spec": "string: what the kernel computes, as JSON.",
        "hlo": "File: a serialized HloModuleProto.",
        "native": "bool: whether it calls what NKI's own compiler made of the kernel.",
        "notes": "File: what was noted about the kernel, as JSON, or None.",
    },
)

NeuronNeffInfo = provider(
    doc = "One kernel compiled for one target.",
    fields = {
        "kernel": "NeuronHloInfo of what was compiled.",
        "flags": "list of string: neuronx-cc's arguments, all of them but those for files.",
        "identity": "string: the compiler's name and version.",
        "log": "File: what neuronx-cc printed, or None; differs from run to run, so only a report takes it as an input.",
        "neff": "File: the NEFF.",
        "target": "string: what it is compiled for.",
    },
)

NeuronBundleInfo = provider(
    doc = "The kernels of one manifest for one target.",
    fields = {
        "logs": "depset of File: what neuronx-cc printed of its kernels.",
        "name": "string: the bundle's, `<manifest>_<target>`.",
        "pack": "File: the GGUF pack.",
        "tree": "File: the tree, a directory.",
    },
)

NeuronToolchainInfo = provider(
    doc = "A compiler from HLO to NEFF.",
    fields = {
        "compiler": "string: `neuronx-cc` or `simulator`.",
        "disabled": "string: why nothing can be compiled, or empty.",
        "driver": "File: the program that runs neuronx-cc, or None.",
        "executable": "File: neuronx-cc, or None.",
        "identity": "string: name and version; part of every compile's key.",
        "native": "File: a program that runs neuronx-cc on HLO of native kernels, or None.",
        "native_tools": "depset of File: what that program runs.",
        "nki": "File: the Python that has NKI's own compiler, or None.",
        "nki_absence": "string: why there is none, or empty.",
        "nki_driver": "File: the program that runs it.",
        "nki_identity": "string: name and version of NKI's own compiler; empty where there is none.",
        "python": "File: the Python that runs the driver, or None.",
        "simulator": "KernelgenToolInfo of the simulator, or None.",
    },
)
