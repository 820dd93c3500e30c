"""The ready manifests, `<model>_<file type>.yaml`. MODULE.bazel has the same lists, because it cannot load this file."""

FILE_TYPES = [
    "f16",
    "q4_k_m",
]

MODELS = [
    "gemma_2_2b",
    "gemma_3_4b",
    "gpt_oss_20b",
    "llama_3_2_1b",
    "llama_3_8b",
    "mistral_7b_v0_3",
    "mixtral_8x7b",
    "phi_3_mini_4k",
    "qwen2_5_7b",
    "qwen3_8b",
]
