"""Writes small checkpoints with random weights, with a Python that has torch and transformers: `make_checkpoints.py
FOLDER`.

Each has a tokenizer made of random words, because llama.cpp's converter refuses a model without one.
"""

import random
import sys
from pathlib import Path

import sentencepiece
import torch
import transformers

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 320,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2}
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama31": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA_3_1}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 128, "dtype": "float16"}),
    "gemma2": ("Gemma2", {"head_dim": 64, "sliding_window": 256}),
    "gemma3": ("Gemma3", {"head_dim": 64, "sliding_window": 256}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **EXPERTS}),
}


def main() -> None:
    out = Path(sys.argv[1])
    tokenizer = write_tokenizer(out)
    for name, (family, more) in MODELS.items():
        kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
        config = getattr(transformers, kind)(**{**SIZES, "dtype": "bfloat16", **more})
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        model.to(torch.float16 if "dtype" in more else torch.bfloat16).save_pretrained(out / name)
        (out / name / "tokenizer.model").write_bytes(tokenizer)


def write_tokenizer(out: Path) -> bytes:
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 7))) for _ in range(20000)]
    text = out / "words.txt"
    text.write_text("\n".join(" ".join(words[i : i + 10]) for i in range(0, len(words), 10)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(out / "words"),
        vocab_size=SIZES["vocab_size"],
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
    )
    return (out / "words.model").read_bytes()


if __name__ == "__main__":
    main()
