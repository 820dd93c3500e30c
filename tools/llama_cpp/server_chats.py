"""Compares the answers of six simultaneous chats with llama-server with those on the CPU; docs/reference/llama-cpp-tests.md is the manual.

All answers consist of the likeliest tokens. Random models are in F32, and their answers must equal the CPU's, token by
token; the CPU does not draft. Answers of quantized weights are only counted, because the CPU rounds the activations that
it multiplies with them.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import calls
import gguf
import harness
import llama_programs
import numpy as np
import random_llama
import random_projector
from llama_programs import N_TOKENS, SIZE, STEADY
from program_cases import N_CHATS, N_LONGEST, N_SLOTS, SERVER_CASES, ServerCase

LEAVES = 5
"""The chat whose client disconnects."""
STORY = 4
"""The chat with the longest answer."""
QUESTIONS = ("Hello!", "What is the capital of France?", "Count to ten.", "Why?", "Tell me a story.", "abc")
TIMEOUT = 1800


@dataclass(frozen=True)
class Answer:
    """The answer that a client received.

    Attributes:
        tokens: all tokens, or those received before the client disconnected.
        pieces: the number of pieces in the stream.
        n_tokens: the server's number of tokens of the whole answer; pieces omit the tokens of incomplete characters.
        drafted, accepted: the number of drafted tokens, and of those accepted into the answer; 0 if the client disconnected.
    """

    tokens: tuple[int, ...]
    pieces: int
    n_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Chats:
    """The results of chats with a server: the answer of each chat, and the server's log."""

    answers: list[Answer]
    log: str

    @property
    def accepted(self) -> tuple[int, int]:
        """The numbers of accepted and of drafted tokens."""
        return sum(a.accepted for a in self.answers), sum(a.drafted for a in self.answers)


# --- a client --------------------------------------------------------------------------------------------------------------


def is_healthy(port: int) -> bool:
    """Whether the server has loaded its model."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _post(port: int, path: str, body: object) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"llama-server: {response.status}: {response.read().decode(errors='replace')[:500]}")
    return connection, response


def ask(port: int, question: str, leave_after: int | None, picture: bytes | None, longest: int) -> Answer:
    """Requests the likeliest answer and reads its pieces as they arrive.

    Args:
        port: the server's port.
        question: the user's message.
        leave_after: the number of pieces after which the client disconnects; None to read all.
        picture: an image file for the question, or None.
        longest: the most tokens of the answer.
    """
    content: object = question
    encoded = base64.b64encode(picture).decode() if picture else ""
    if picture:
        url = {"type": "image_url", "image_url": {"url": f"data:image/x-portable-pixmap;base64,{encoded}"}}
        content = [url, {"type": "text", "text": question}]
    chat = {"messages": [{"role": "user", "content": content}]}
    prompt = json.loads(_post(port, "/apply-template", chat)[1].read())["prompt"]
    if picture:
        prompt = {"prompt_string": prompt, "multimodal_data": [encoded]}
    body = {"prompt": prompt, "stream": True, "return_tokens": True, "n_predict": longest, "temperature": 0, "seed": 1}
    connection, response = _post(port, "/completion", body)
    tokens: list[int] = []
    pieces = predicted = 0
    timings: Mapping[str, int] = {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "content" not in event:
            raise RuntimeError(f"llama-server: {event}")
        timings = event.get("timings", timings)
        predicted = event.get("tokens_predicted", predicted)
        if not event["stop"]:
            tokens += event["tokens"]
            pieces += 1
        if pieces == leave_after:
            break
    connection.close()
    return Answer(tuple(tokens), pieces, predicted, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


# --- a case ----------------------------------------------------------------------------------------------------------------


def write_random(folder: Path) -> None:
    """Writes the models of all cases."""
    llama_programs.write_models(folder, seed=2, gemma4_added=5 * STEADY)
    (folder / "steady.gguf").rename(folder / "model.gguf")
    targets, adapter = ("attn_q", "attn_v", "ffn_down"), folder / "adapter.gguf"
    random_llama.write_adapter(adapter, SIZE, rank=4, targets=targets, weights=np.float32, added=STEADY)


def write_beside(folder: Path, model: Path, n_layer: int, f32: bool) -> None:
    """Writes a draft of a model's first layers, and a random adapter for it; with `f32`, all weights in F32."""
    if f32:
        random_llama.write_f32(folder / "model.gguf", model)
        model = folder / "model.gguf"
    else:
        (folder / "model.gguf").symlink_to(model.absolute())
    random_llama.write_shorter(folder / "draft.gguf", model, n_layer)
    fields = gguf.GGUFReader(model).fields

    def number(name: str) -> int:
        return int(fields[f"{fields['general.architecture'].contents()}.{name}"].contents())

    size = random_llama.Size(
        n_embd=number("embedding_length"),
        n_head=number("attention.head_count"),
        n_head_kv=number("attention.head_count_kv"),
        n_ff=number("feed_forward_length"),
        n_layer=number("block_count"),
    )
    weights, targets = np.float32 if f32 else np.float16, ("attn_q", "attn_v")
    random_llama.write_adapter(folder / "adapter.gguf", size, rank=8, targets=targets, weights=weights, added=0.02)


def chat(case: ServerCase, folder: Path, environment: dict[str, str], options: list[str], log: Path) -> Chats:
    """Runs the server of a case with the models in a folder, and the chats with it.

    Raises:
        RuntimeError: the server fails.
    """
    server = llama_programs.server_program()
    command = [server, "-m", folder / f"{case.model}.gguf", "-ngl", 99, "-t", 1, "-np", N_SLOTS, "-c", case.n_ctx]
    command += ["--kv-unified", "--temp", 0, "-ub", max(N_TOKENS), "-b", 512, *options]
    environment = {**environment, "LD_LIBRARY_PATH": str(server.parent), "OMP_NUM_THREADS": "1"}

    def ask_one(port: int, i: int) -> Answer:
        picture = random_projector.picture(100, 80, seed=i) if case.pictures else None
        return ask(port, QUESTIONS[i], 3 if i == LEAVES else None, picture, case.story if i == STORY else N_LONGEST)

    with (
        llama_programs.serving(command, environment, server.parent, log, is_healthy) as port,
        ThreadPoolExecutor(N_CHATS) as clients,
    ):
        answers = list(clients.map(lambda i: ask_one(port, i), range(N_CHATS)))
    return Chats(answers, log.read_text(errors="replace"))


def check(case: ServerCase, device: Chats, cpu: Chats, exact: bool) -> list[str]:
    """Returns the errors in the chats of a case."""
    wrong = []
    whole = [i for i in range(N_CHATS) if i != LEAVES]
    for i in whole if exact else ():
        if device.answers[i].tokens != cpu.answers[i].tokens:
            wrong.append(f"{QUESTIONS[i]!r}: {device.answers[i].tokens!r}, on the CPU {cpu.answers[i].tokens!r}")
    ran = harness.ran(device.log)
    errors = {
        "answers are alike": exact and len({device.answers[i].tokens for i in whole}) < 2,
        "the client that goes away reads nothing": not device.answers[LEAVES].pieces,
        f"on the CPU: {ran.on_cpu}": ran.cpu or " 0 ops ran on the CPU instead of a NeuronCore" not in device.log,
        "an op has no kernel": "because no kernel computes them" in device.log,
        "no group ran": not ran.launches,
        "the longest answer is cut": case.story > case.n_ctx and device.answers[STORY].n_tokens != case.story,
        f"of {device.accepted[1]} drafted tokens none is accepted": case.drafts and not device.accepted[0],
        "llama.cpp samples on the CPU": "does not have support" in device.log,
    }
    return [f"{case.name}: {what}" for what in [*wrong, *(text for text, is_wrong in errors.items() if is_wrong)]]


def run(programs: harness.Programs, case: ServerCase, folder: Path, *, exact: bool = True) -> tuple[str, list[str]]:
    """Returns a row of the table, and the errors of a case whose models are in a folder.

    Raises:
        RuntimeError: kernels can't be derived or built, or the server fails.
    """
    # The CPU computes with F16 values in F16, so random models and their caches are in F32. Flash attention would store
    # F16.
    cache, flash = ("f32", "off") if exact else ("f16", "on")
    n_kv = ",".join(str(n) for n in (256, 512, 1024) if n <= case.n_ctx)
    more = ["--flash-attn", flash, "--kv-unified", "--n-kv", n_kv, *llama_programs.split(case.derived, folder)]
    model, kernels = folder / f"{case.model}.gguf", folder / f"kernels-{case.name}"
    n_ctx = (case.n_ctx,) if exact else None
    harness.derive(programs, model, kernels, *more, n_tokens=N_TOKENS, n_ctx=n_ctx, cache=cache, fuse="layer")
    environment = programs.environment(kernels=kernels, log=True)
    options = ["-fa", flash, *(word for option in ("k", "v", "kd", "vd") for word in (f"-ct{option}", cache))]
    options += llama_programs.split(case.options, folder)
    only = llama_programs.split(case.only, folder)
    device = chat(case, folder, environment, [*options, *only], folder / f"{case.name}-device.log")
    cpu = chat(case, folder, harness.without_device(environment), options, folder / f"{case.name}-cpu.log")
    pairs = list(zip(device.answers, cpu.answers, strict=True))
    equal = sum(a.tokens == b.tokens for i, (a, b) in enumerate(pairs) if i != LEAVES)
    accepted, drafted = device.accepted
    ran = harness.ran(device.log)
    drafts = f"{accepted} of {drafted}" if case.drafts else "–"
    cells = (case.name, f"{equal} of {N_CHATS - 1}", drafts, ran.launches, ran.device.total(), ran.on_cpu)
    return harness.row(*cells), check(case, device, cpu, exact)


HEAD = """\
| llama-server | answers as the CPU's | drafted tokens that are accepted | launches of groups | nodes on the device | ran on the CPU |
|---|--:|--:|--:|--:|--:|"""


def main(programs: harness.Programs, args: argparse.Namespace) -> bool:
    """Runs the suite; returns whether nothing is wrong."""
    cases = calls.chosen(SERVER_CASES, args.only)
    if args.file:  # a file has no head, no Eagle3 draft and no projector
        cases = [case for case in cases if case.model == "model" and case.name not in ("eagle3", "pictures")]
    wrong: list[str] = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.file:
            write_beside(folder, args.file, args.layers, args.f32)
        else:
            write_random(folder)
        for case in cases:
            row, errors = run(programs, case, folder, exact=args.file is None or args.f32)
            print(row, flush=True)
            wrong += errors
    for error in wrong:
        print(f"WRONG: {error}")
    return bool(cases) and not wrong
