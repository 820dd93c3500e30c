"""The custom call that neuronx-cc replaces by a kernel's output of NKI's compiler, and its frontend attributes."""

TARGET = "AwsNeuronCustomNativeKernel"
"""The custom call's target."""
COLLECTIVES = "has_collectives"
"""The frontend attribute of a call of a kernel that communicates with other cores."""
ARTIFACT = "kernelgen_artifact"
"""The frontend attribute with the bytes of the file that a call names; neuronx-cc does not receive it."""
ATTRIBUTES = (ARTIFACT, COLLECTIVES)
