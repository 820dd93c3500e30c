"""The ready manifests of slices, and the targets with this number of cores per chip. MODULE.bazel has the same names."""

DEVICES = {
    "llama_3_8b_f16_2_devices": [
        "trn1",
        "trn1n",
        "inf2",
    ],
    "llama_3_8b_f16_4_devices": [
        "trn2",
    ],
    "llama_3_8b_f16_8_devices": [
        "trn2",
    ],
}
