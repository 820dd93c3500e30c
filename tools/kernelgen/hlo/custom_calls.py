"""The custom call that neuronx-cc replaces by what NKI's own compiler made of a kernel, and its frontend attributes."""

TARGET = "AwsNeuronCustomNativeKernel"
"""The custom call's target."""
COLLECTIVES = "has_collectives"
"""The frontend attribute of a call of a kernel that communicates with others."""
ARTIFACT = "kernelgen_artifact"
"""The frontend attribute that holds the bytes of the file that a call names; neuronx-cc is not given it."""
ATTRIBUTES = (ARTIFACT, COLLECTIVES)
