"""The runs of llama.cpp's programs in `whole_programs.py`: how each program is called, and which results are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from program_models import (
    CONTROL,
    DRAFT,
    EAGLE3,
    FIRST,
    GEMMA4,
    GEMMA4_HEAD,
    MTP,
    PICTURES,
    PROJECTOR,
    SECOND,
    STEADY_MODEL,
)
from program_results import (
    Results,
    answers_of_pictures,
    embeddings,
    numbers_of_tokens,
    perplexities,
    scores,
    tensors,
    texts,
)

CPU_LIMIT = 1e-4
"""The largest allowed difference from the CPU: normalised mean squared error, or relative for perplexities."""
FLASH_LIMIT = 1e-3
"""The same with flash attention, in which the CPU accumulates in F16."""

# The CPU computes with F16 values in F16. To compare texts exactly, all values are F32, and without flash attention,
# which stores F32 as F16.
F32 = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
FLASH = ("-fa", "on", "-ctk", "f16", "-ctv", "f16")
GREEDY = ("--temp", 0, "--seed", 1)
GREEDY_CHAIN = "top_k=40,top_p=0.95,min_p=0.05,temperature=0,dist"
"""The samplers on the device for greedy runs."""


@dataclass(frozen=True)
class WholeProgram:
    """A program and its arguments.

    Attributes:
        name: the name for -p and for the table; one program can have several runs.
        program: its file.
        arguments: the arguments of each call, in order. The calls share a folder; `{text}` is a file with a text,
            `{models}` the folder of the model and of the files used with it.
        read: reads the results from the calls' output.
        what: what is compared, for the table.
        groups: whether some of its calls have as many tokens as a group's kernel.
        limit: the largest allowed difference from the CPU.
        derived: arguments of `kernelgen model` for its additional kernels.
        fuse: whether its additional kernels have layers as groups (`--fuse`).
        model: the file of the model that it runs; the random one by default.
        of: the models of `ENCODERS` that it runs with; if empty, those of `MODELS`.
        remote: whether the device belongs to another process, as on another machine: llama.cpp's --rpc.
    """

    name: str
    program: str
    arguments: tuple[tuple[object, ...], ...]
    read: Callable[[str], Results]
    what: str
    groups: bool = True
    limit: float = CPU_LIMIT
    derived: tuple[str, ...] = ()
    fuse: str = "layer"
    model: str = "{models}/model.gguf"
    of: tuple[str, ...] = ()
    remote: bool = False


def _perplexity(batch: int, ubatch: int, *more: object) -> tuple[object, ...]:
    return ("-f", "{text}", "-c", 128, "-b", batch, "-ub", ubatch, "--chunks", 4, *FLASH, *more)


_COMPLETE = ("-no-cnv", "--ignore-eos", "--no-display-prompt", "-ub", 32, *GREEDY, *F32)
_PARALLEL = ("-ns", 8, "-n", 20, "-c", 2048, "-b", 2048, "-ub", 32, "-kvu", "-pps", "--ignore-eos", *GREEDY, *F32)
_SHORT = ("-p", "abcdef", "-n", 20, "-c", 256, *_COMPLETE)
_SPECULATIVE = (
    "-p",
    "abcdef",
    "-n",
    30,
    "-c",
    256,
    "-ub",
    32,
    "-ngld",
    99,
    *GREEDY,
    *F32,
    "-ctkd",
    "f32",
    "-ctvd",
    "f32",
)
_CHAT = ("-n", 40, "-c", 256, "-ub", 32, "--single-turn", "--simple-io", "--ignore-eos", *GREEDY, *F32)
_SEE = ("-n", 40, "-c", 256, "-ub", 32, "--chat-template", "chatml", "--ignore-eos", *GREEDY, *F32)
_ANSWER = r"^> abcdef\n((?:.|\n)*?)\n+(?:\[ Prompt: .*\n+)?Exiting\.\.\.$"
_RESPONSE = r"Response: (.*?)\x1b\[0m\n"
_TEXT = r"^((?!llama_completion: ).+)$"
_SEVERAL = ("-p", "abcdef\nabc\nabcdefghi", "-c", 256, "-b", 32, "-ub", 32)

CASES = (
    WholeProgram(
        "bench",
        "llama-bench",
        (("-p", "32,8", "-n", 8, "-r", 1, "-ub", 32, "-o", "json", "-fa", 1),),
        numbers_of_tokens,
        "its tests",
    ),
    WholeProgram(
        "perplexity", "llama-perplexity", (_perplexity(128, 32),), perplexities, "-b 128 -ub 32", limit=FLASH_LIMIT
    ),
    WholeProgram(
        "perplexity-odd", "llama-perplexity", (_perplexity(100, 33),), perplexities, "-b 100 -ub 33", False, FLASH_LIMIT
    ),
    WholeProgram(
        "perplexity-short", "llama-perplexity", (_perplexity(77, 13),), perplexities, "-b 77 -ub 13", False, FLASH_LIMIT
    ),
    WholeProgram(
        "eval-callback",
        "llama-eval-callback",
        (("-p", "abcde", "-c", 256, "-ub", 32, *F32),),
        tensors,
        "every tensor",
        groups=False,
    ),
    WholeProgram(
        "parallel",
        "llama-parallel",
        (("-np", 4, *_PARALLEL),),
        texts(_RESPONSE),
        "texts of 8 clients, -np 4",
        groups=False,
    ),
    WholeProgram(
        "completion", "llama-completion", (("-p", "abcdef", "-n", 60, "-c", 256, *_COMPLETE),), texts(_TEXT), "a text"
    ),
    WholeProgram(
        "context-shift",
        "llama-completion",
        (("-p", "abcdef", "-n", 320, "-c", 256, "--context-shift", *_COMPLETE),),
        texts(_TEXT),
        "a text longer than the cache",
        derived=("--context-shift",),
    ),
    WholeProgram(
        "saved-state",
        "llama-completion",
        (
            ("-p", "abcdef", "-n", 40, "-c", 256, "--prompt-cache", "{folder}/state", "--prompt-cache-all", *_COMPLETE),
            ("-p", "abcdef", "-n", 40, "-c", 256, "--prompt-cache", "{folder}/state", "--prompt-cache-ro", *_COMPLETE),
        ),
        texts(_TEXT),
        "texts before and after loading",
    ),
    WholeProgram(
        "save-load-state",
        "test-save-load-state",
        (("-c", 256, "-ub", 32, *FLASH),),
        texts(r"(All tests passed)"),
        "its own checks",
        # one of its contexts has no flash attention
        derived=("--type-k", "f16", "--type-v", "f16"),
    ),
    WholeProgram(
        "adapters",
        "llama-completion",
        (("--lora-scaled", f"{FIRST}:0.5", "--lora", SECOND, *_SHORT),),
        texts(_TEXT),
        "a text with two adapters",
        derived=("--lora", f"{FIRST}:0.5", "--lora", SECOND),
    ),
    WholeProgram(
        "control-vector",
        "llama-completion",
        (("--control-vector", CONTROL, *_SHORT),),
        texts(_TEXT),
        "a text with a control vector",
        derived=("--control-vector",),
    ),
    WholeProgram(
        "yarn",
        "llama-completion",
        (("--rope-scaling", "yarn", "--rope-scale", 4, *_SHORT),),
        texts(_TEXT),
        "a text with scaled positions",
        derived=("--rope-scaling", "yarn", "--rope-scale", "4"),
    ),
    WholeProgram(
        "draft",
        "llama-speculative-simple",
        (("--spec-type", "draft-simple", "--model-draft", DRAFT, "--spec-draft-n-max", 8, *_SPECULATIVE),),
        texts(_TEXT),
        "a text with a draft",
        derived=("--model-draft", DRAFT),
        model=STEADY_MODEL,
    ),
    WholeProgram(
        "mtp",
        "llama-speculative-simple",
        (("--spec-type", "draft-mtp", "--spec-draft-n-max", 4, *_SPECULATIVE),),
        texts(_TEXT),
        "a text with an MTP head",
        derived=("--spec-type", "draft-mtp"),
        model=MTP,
    ),
    WholeProgram(
        "gemma4-mtp",
        "llama-speculative-simple",
        (("--spec-type", "draft-mtp", "--model-draft", GEMMA4_HEAD, "--spec-draft-n-max", 4, *_SPECULATIVE),),
        texts(_TEXT),
        "a text with a head of Gemma 4",
        derived=("--spec-type", "draft-mtp", "--model-draft", GEMMA4_HEAD),
        model=GEMMA4,
    ),
    WholeProgram(
        "eagle3",
        "llama-speculative-simple",
        (("--spec-type", "draft-eagle3", "--model-draft", EAGLE3, "--spec-draft-n-max", 4, *_SPECULATIVE),),
        texts(_TEXT),
        "a text with an Eagle3 draft",
        derived=("--spec-type", "draft-eagle3", "--model-draft", EAGLE3),
        model=STEADY_MODEL,
    ),
    WholeProgram(
        "n-gram",
        "llama-speculative-simple",
        (("--spec-type", "ngram-simple", *_SPECULATIVE),),
        texts(_TEXT),
        "a text with n-grams as a draft",
    ),
    WholeProgram(
        "sampling",
        "llama-completion",
        (("-p", "abcdef", "-n", 60, "-c", 256, "--backend-sampling", *(w for w in _COMPLETE if w != "--ignore-eos")),),
        texts(_TEXT),
        "a text that is sampled on the device",
        derived=("--samplers", GREEDY_CHAIN),
    ),
    WholeProgram("chat", "llama-cli", (("-p", "abcdef", *_CHAT),), texts(_ANSWER), "an answer"),
    WholeProgram(
        "remote", "llama-cli", (("-p", "abcdef", *_CHAT),), texts(_ANSWER), "an answer, with --rpc", remote=True
    ),
    WholeProgram(
        "pictures",
        "llama-mtmd-cli",
        tuple(("--mmproj", PROJECTOR, "--image", picture, "-p", "abcdef", *_SEE) for picture in PICTURES),
        answers_of_pictures,
        "answers about two pictures",
        derived=("--mmproj", PROJECTOR),
    ),
    WholeProgram(
        "embedding",
        "llama-embedding",
        (("-p", "abcdef", "-c", 256, "-ub", 32, "--pooling", "last", "--embd-output-format", "json", *F32),),
        embeddings,
        "an embedding",
        derived=("--embeddings", "--pooling", "last"),
    ),
    WholeProgram(
        "encoder",
        "llama-embedding",
        ((*_SEVERAL, "--embd-output-format", "json", *F32),),
        embeddings,
        "embeddings of three texts",
        of=("bert", "bert-mean"),
    ),
    WholeProgram(
        "encoder-flash",
        "llama-embedding",
        ((*_SEVERAL, "--embd-output-format", "json", *FLASH),),
        embeddings,
        "embeddings of three texts, -fa on",
        limit=FLASH_LIMIT,
        of=("bert", "bert-mean"),
    ),
    WholeProgram(
        "reranker",
        "llama-embedding",
        ((*_SEVERAL, *F32),),
        scores,
        "scores of three texts",
        of=("reranker",),
    ),
    WholeProgram("encoder-decoder", "llama-completion", (_SHORT,), texts(_TEXT), "a text", of=("t5",)),
    WholeProgram(
        "encoder-decoder-long",
        "llama-completion",
        (("-p", "abcdef", "-n", 280, "-c", 512, *_COMPLETE),),
        texts(_TEXT),
        "a text of more than 256 tokens",
        of=("t5",),
    ),
    WholeProgram(
        "encoder-decoder-none", "llama-completion", (_SHORT,), texts(_TEXT), "a text", fuse="none", of=("t5",)
    ),
    WholeProgram(
        "encoder-decoder-long-none",
        "llama-completion",
        (("-p", "abcdef", "-n", 280, "-c", 512, *_COMPLETE),),
        texts(_TEXT),
        "a text of more than 256 tokens",
        fuse="none",
        of=("t5",),
    ),
    WholeProgram(
        "encoder-nodes",
        "llama-eval-callback",
        (("-p", "abc", "-c", 256, "-ub", 32, *F32),),
        tensors,
        "every tensor",
        groups=False,
        of=("bert",),
    ),
    WholeProgram(
        "encoder-nodes-flash",
        "llama-eval-callback",
        (("-p", "abc", "-c", 256, "-ub", 32, *FLASH),),
        tensors,
        "every tensor, -fa on",
        groups=False,
        limit=FLASH_LIMIT,
        of=("bert",),
    ),
    *(
        WholeProgram(name, "llama-completion", ((*options, *_SHORT),), texts(_TEXT), "a text", groups=groups)
        for name, options, groups in (
            ("two-layers", ("-ngl", 2), False),
            ("cache-on-the-cpu", ("--no-kv-offload",), False),
            ("not-mapped", ("--load-mode", "none"), True),
            ("locked", ("--load-mode", "mlock"), True),
            ("tensors-on-the-cpu", ("-ot", "ffn_.*=CPU"), False),
            ("grammar", ("--grammar", "root ::= [a-z]+"), True),
        )
    ),
)
