"""The ready manifests, `<model>_<file type>.yaml`. MODULE.bazel has the same lists, because it cannot load this file."""

FILE_TYPES = [
    "f16",
    "q4_k_m",
]

MODELS = [
    "gemma_3_4b",
    "gpt_oss_20b",
    "llama_3_8b",
    "qwen3_8b",
]
