"""The runs of llama.cpp's programs in the suites `programs` and `server_chats`: how each is called, and what is compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Value = str | float | np.ndarray
Results = dict[str, Value]
"""The results of a run, by name: texts, perplexities, or values of tensors."""


def texts(pattern: str) -> Callable[[str], Results]:
    """Returns a function that reads the texts that match a pattern from a program's output."""
    return lambda printed: {f"text {i}": text for i, text in enumerate(re.findall(pattern, printed, re.MULTILINE))}


def perplexities(printed: str) -> Results:
    """Returns the running perplexities that llama-perplexity prints."""
    return {f"chunk {chunk}": float(value) for chunk, value in re.findall(r"\[(\d+)\]([\d.]+),", printed)}


def tensors(printed: str) -> Results:
    """Returns the values of tensors that llama-eval-callback prints, and their sums, by number, name and op."""
    results: Results = {}
    for i, block in enumerate(re.split(r"^common_debug_cb_eval: ", printed, flags=re.MULTILINE)[1:]):
        head = re.match(r"\s*(\S.*?) = \(\w+\)\s+(\w+)", block)
        if head is None:
            raise RuntimeError(f"llama-eval-callback: {block[:200]!r}")
        values = [float(v) for v in re.findall(r"(?<=[\[, ])-?(?:\d+\.\d+|nan|inf)(?=[, ])", block)]
        results[f"{i} {head[1]} {head[2]}"] = np.array(values)
    return results


def embeddings(printed: str) -> Results:
    """Returns the embeddings that llama-embedding prints as JSON."""
    found = re.findall(r'"embedding": *\[([^\]]*)\]', printed)
    return {f"embedding {i}": np.array([float(v) for v in values.split(",")]) for i, values in enumerate(found)}


def scores(printed: str) -> Results:
    """Returns the scores that llama-embedding prints with a reranker."""
    found = re.findall(r"^rerank score (\d+): *(\S+)", printed, re.MULTILINE)
    return {f"score {i}": np.array([float(v)]) for i, v in found}


def answers_of_pictures(printed: str) -> Results:
    """Returns the answers of llama-mtmd-cli, which prints little else; none if all pictures have the same answer."""
    found = texts(r"^(.+)$")(printed)
    return found if len(set(found.values())) > 1 else {}


def numbers_of_tokens(printed: str) -> Results:
    """Returns the numbers of tokens of llama-bench's tests; its times on a simulated device mean nothing."""
    found = re.findall(r'"n_prompt": (\d+),\s+"n_gen": (\d+)', printed)
    return {f"test {i}": f"{prompt} and {generated} tokens" for i, (prompt, generated) in enumerate(found)}


_TEXT = texts(r"^((?!llama_completion: ).+)$")

CPU_LIMIT = 1e-4
"""The largest allowed difference from the CPU: normalised mean squared error, or relative for perplexities."""
FLASH_LIMIT = 1e-3
"""The same with flash attention, in which the CPU accumulates in F16."""


@dataclass(frozen=True)
class Case:
    """A program and its arguments.

    Attributes:
        name: the name for --only and for the table; one program can have several runs.
        commands: the program and the options of each call, in order. The calls share a folder, `{folder}`; `{text}` is a file
            with a text, `{models}` the folder of the model and of the files used with it.
        what: what is compared, for the table.
        read: reads the results from the calls' output.
        groups: whether some of its calls have as many tokens as a group's kernel.
        limit: the largest allowed difference from the CPU.
        derived: options of `kernelgen model` for its additional kernels.
        fuse: `--fuse` of its additional kernels.
        model: the name of the model that it runs.
        of: the models with an encoder that it runs with; if empty, the others.
        remote: whether the device belongs to another process, as on another machine: llama.cpp's --rpc.
    """

    name: str
    commands: str | tuple[str, ...]
    what: str = "a text"
    read: Callable[[str], Results] = _TEXT
    groups: bool = True
    limit: float = CPU_LIMIT
    derived: str = ""
    fuse: str = "layer"
    model: str = "model"
    of: tuple[str, ...] = ()
    remote: bool = False


# The CPU computes with F16 values in F16. To compare texts exactly, all values are F32, and without flash attention,
# which stores F32 as F16.
F32 = "-fa off -ctk f32 -ctv f32"
FLASH = "-fa on -ctk f16 -ctv f16"
GREEDY = "--temp 0 --seed 1"
GREEDY_CHAIN = "top_k=40,top_p=0.95,min_p=0.05,temperature=0,dist"
"""The samplers on the device for greedy runs."""

_SMALL = "-c 256 -ub 32"
_SAMPLED = f"-no-cnv --no-display-prompt -ub 32 {GREEDY} {F32}"
_COMPLETE = f"--ignore-eos {_SAMPLED}"
_SHORT = f"llama-completion -p abcdef -n 20 -c 256 {_COMPLETE}"
_LONG = f"llama-completion -p abcdef -n 280 -c 512 {_COMPLETE}"
_STATE = f"llama-completion -p abcdef -n 40 -c 256 --prompt-cache {{folder}}/state {_COMPLETE}"
_PARALLEL = f"llama-parallel -np 4 -ns 8 -n 20 -c 2048 -b 2048 -ub 32 -kvu -pps --ignore-eos {GREEDY} {F32}"
_PERPLEXITY = f"llama-perplexity -f {{text}} -c 128 --chunks 4 {FLASH}"
_DRAFTED = f"llama-speculative-simple -p abcdef -n 30 {_SMALL} -ngld 99 {GREEDY} {F32} -ctkd f32 -ctvd f32"
_CHAT = f"llama-cli -p abcdef -n 40 {_SMALL} --single-turn --simple-io --ignore-eos {GREEDY} {F32}"
_PROJECTOR = "--mmproj {models}/projector.gguf"
_SEE = f"llama-mtmd-cli {_PROJECTOR} -p abcdef -n 40 {_SMALL} --chat-template chatml --ignore-eos {GREEDY} {F32}"
_EMBED = f"llama-embedding -p 'abcdef\nabc\nabcdefghi' -b 32 {_SMALL}"
_NODES = f"llama-eval-callback -p abc {_SMALL}"
_ADAPTERS = "--lora-scaled {models}/first-adapter.gguf:0.5 --lora {models}/second-adapter.gguf"
_YARN = "--rope-scaling yarn --rope-scale 4"
_HEAD = "--model-draft {models}/gemma4-head.gguf"
_EAGLE3 = "--spec-type draft-eagle3 --model-draft {models}/eagle3.gguf"
_DRAFT = "--model-draft {models}/draft.gguf"
_ANSWER = texts(r"^> abcdef\n((?:.|\n)*?)\n+(?:\[ Prompt: .*\n+)?Exiting\.\.\.$")
_BERT, _T5 = ("bert", "bert-mean"), ("t5",)


def _drafts(name: str, kind: str, what: str, options: str = "", model: str = "steady", derived: str = "") -> Case:
    return Case(name, f"{_DRAFTED} --spec-type {kind} {options}", what, derived=derived, model=model)


CASES = (
    Case("bench", "llama-bench -p 32,8 -n 8 -r 1 -ub 32 -o json -fa 1", "its tests", numbers_of_tokens),
    Case("perplexity", f"{_PERPLEXITY} -b 128 -ub 32", "-b 128 -ub 32", perplexities, limit=FLASH_LIMIT),
    Case("perplexity-odd", f"{_PERPLEXITY} -b 100 -ub 33", "-b 100 -ub 33", perplexities, False, FLASH_LIMIT),
    Case("perplexity-short", f"{_PERPLEXITY} -b 77 -ub 13", "-b 77 -ub 13", perplexities, False, FLASH_LIMIT),
    Case("eval-callback", f"llama-eval-callback -p abcde {_SMALL} {F32}", "every tensor", tensors, False),
    Case("parallel", _PARALLEL, "texts of 8 clients, -np 4", texts(r"Response: (.*?)\x1b\[0m\n"), False),
    Case("completion", f"llama-completion -p abcdef -n 60 -c 256 {_COMPLETE}"),
    Case(
        "context-shift",
        f"llama-completion -p abcdef -n 320 -c 256 --context-shift {_COMPLETE}",
        "a text longer than the cache",
        derived="--context-shift",
    ),
    Case(
        "saved-state",
        (f"{_STATE} --prompt-cache-all", f"{_STATE} --prompt-cache-ro"),
        "texts before and after loading",
    ),
    Case(
        "save-load-state",
        f"test-save-load-state -c 256 -ub 32 {FLASH}",
        "its own checks",
        texts(r"(All tests passed)"),
        derived="--type-k f16 --type-v f16",  # one of its contexts has no flash attention
    ),
    Case(
        "adapters",
        f"{_SHORT} {_ADAPTERS}",
        "a text with two adapters",
        derived=_ADAPTERS.replace("--lora-scaled", "--lora"),
    ),
    Case(
        "control-vector",
        f"{_SHORT} --control-vector {{models}}/control.gguf",
        "a text with a control vector",
        derived="--control-vector",
    ),
    Case("yarn", f"{_SHORT} {_YARN}", "a text with scaled positions", derived=_YARN),
    _drafts("draft", "draft-simple", "a text with a draft", f"{_DRAFT} --spec-draft-n-max 8", derived=_DRAFT),
    _drafts("mtp", "draft-mtp", "a text with an MTP head", "--spec-draft-n-max 4", "mtp", "--spec-type draft-mtp"),
    _drafts(
        "gemma4-mtp",
        "draft-mtp",
        "a text with a head of Gemma 4",
        f"{_HEAD} --spec-draft-n-max 4",
        "gemma4",
        f"--spec-type draft-mtp {_HEAD}",
    ),
    _drafts(
        "eagle3",
        "draft-eagle3",
        "a text with an Eagle3 draft",
        "--model-draft {models}/eagle3.gguf --spec-draft-n-max 4",
        derived=_EAGLE3,
    ),
    _drafts("n-gram", "ngram-simple", "a text with n-grams as a draft", model="model"),
    Case(
        "sampling",
        f"llama-completion -p abcdef -n 60 -c 256 --backend-sampling {_SAMPLED}",
        "a text that is sampled on the device",
        derived=f"--samplers {GREEDY_CHAIN}",
    ),
    Case("chat", _CHAT, "an answer", _ANSWER),
    Case("remote", _CHAT, "an answer, with --rpc", _ANSWER, remote=True),
    Case(
        "pictures",
        tuple(f"{_SEE} --image {{models}}/{name}.ppm" for name in ("first", "second")),
        "answers about two pictures",
        answers_of_pictures,
        derived=_PROJECTOR,
    ),
    Case(
        "embedding",
        f"llama-embedding -p abcdef {_SMALL} --pooling last --embd-output-format json {F32}",
        "an embedding",
        embeddings,
        derived="--embeddings --pooling last",
    ),
    Case("encoder", f"{_EMBED} --embd-output-format json {F32}", "embeddings of three texts", embeddings, of=_BERT),
    Case(
        "encoder-flash",
        f"{_EMBED} --embd-output-format json {FLASH}",
        "embeddings of three texts, -fa on",
        embeddings,
        limit=FLASH_LIMIT,
        of=_BERT,
    ),
    Case("reranker", f"{_EMBED} {F32}", "scores of three texts", scores, of=("reranker",)),
    Case("encoder-decoder", _SHORT, of=_T5),
    Case("encoder-decoder-long", _LONG, "a text of more than 256 tokens", of=_T5),
    Case("encoder-decoder-none", _SHORT, fuse="none", of=_T5),
    Case("encoder-decoder-long-none", _LONG, "a text of more than 256 tokens", fuse="none", of=_T5),
    Case("encoder-nodes", f"{_NODES} {F32}", "every tensor", tensors, False, of=("bert",)),
    Case("encoder-nodes-flash", f"{_NODES} {FLASH}", "every tensor, -fa on", tensors, False, FLASH_LIMIT, of=("bert",)),
    Case("two-layers", f"{_SHORT} -ngl 2", groups=False),
    Case("cache-on-the-cpu", f"{_SHORT} --no-kv-offload", groups=False),
    Case("not-mapped", f"{_SHORT} --load-mode none"),
    Case("locked", f"{_SHORT} --load-mode mlock"),
    Case("tensors-on-the-cpu", f"{_SHORT} -ot 'ffn_.*=CPU'", groups=False),
    Case("grammar", f"{_SHORT} --grammar 'root ::= [a-z]+'"),
)

N_SLOTS, N_CHATS = 4, 6
SERVER_CTX = 512
N_LONGEST = 24
"""The most tokens of an answer."""


@dataclass(frozen=True)
class ServerCase:
    """A configuration of llama-server.

    Attributes:
        name: the name for --only and for the table.
        options: options of the server; `{models}` is the folder of the files.
        only: options for the device only: drafting does not change an answer, so the CPU runs without it.
        derived: options of `kernelgen model`.
        model: the name of its model.
        drafts: whether tokens are drafted.
        pictures: whether each question has a picture.
        n_ctx: the cells of the cache.
        story: the tokens of the longest answer; if the cache can't hold them, the server shifts it.
    """

    name: str
    options: str
    only: str
    derived: str
    model: str = "model"
    drafts: bool = False
    pictures: bool = False
    n_ctx: int = SERVER_CTX
    story: int = N_LONGEST


_MTP = f"--spec-type draft-mtp --n-seq-max {N_SLOTS}"
SERVER_CASES = (
    ServerCase(
        "draft-and-adapter",
        "--lora-scaled {models}/adapter.gguf:0.5",
        f"--spec-type draft-simple {_DRAFT} -ngld 99 --spec-draft-n-max 8",
        f"{_DRAFT} --lora {{models}}/adapter.gguf:0.5",
        drafts=True,
    ),
    ServerCase("mtp", "", "--spec-type draft-mtp --spec-draft-n-max 4", _MTP, "mtp", drafts=True),
    ServerCase(
        "gemma4-mtp",
        "",
        f"--spec-type draft-mtp {_HEAD} -ngld 99 --spec-draft-n-max 4",
        f"{_MTP} {_HEAD}",
        "gemma4",
        drafts=True,
    ),
    ServerCase(
        "eagle3", "", f"{_EAGLE3} -ngld 99 --spec-draft-n-max 4", f"{_EAGLE3} --n-seq-max {N_SLOTS}", drafts=True
    ),
    ServerCase(
        "sampling",
        "",
        "--backend-sampling",
        f"--samplers {GREEDY_CHAIN} --samplers none --n-seq-max {N_SLOTS}",
    ),
    ServerCase(
        "longer",
        "--context-shift --ignore-eos",
        "",
        f"--context-shift --n-seq-max {N_SLOTS}",
        story=SERVER_CTX + N_LONGEST,
    ),
    ServerCase(
        "pictures",
        _PROJECTOR,
        "",
        _PROJECTOR,
        pictures=True,
        n_ctx=2 * SERVER_CTX,
    ),
)
