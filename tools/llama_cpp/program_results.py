"""Reads comparable results from the output of llama.cpp's programs: texts, perplexities and values of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Value = str | float | np.ndarray
Results = dict[str, Value]
"""The results of a run, by name: texts, perplexities, or values of tensors."""


def texts(pattern: str) -> Callable[[str], Results]:
    """Returns a function that reads the texts that match a pattern from a program's output."""

    def read(printed: str) -> Results:
        return {f"text {i}": text for i, text in enumerate(re.findall(pattern, printed, re.MULTILINE))}

    return read


def perplexities(printed: str) -> Results:
    """Returns the running perplexities that llama-perplexity prints."""
    return {f"chunk {chunk}": float(value) for chunk, value in re.findall(r"\[(\d+)\]([\d.]+),", printed)}


def tensors(printed: str) -> Results:
    """Returns the values of tensors that llama-eval-callback prints, and their sums, by number, name and op."""
    found: Results = {}
    for i, block in enumerate(re.split(r"^common_debug_cb_eval: ", printed, flags=re.MULTILINE)[1:]):
        head = re.match(r"\s*(\S.*?) = \(\w+\)\s+(\w+)", block)
        if head is None:
            raise RuntimeError(f"llama-eval-callback: {block[:200]!r}")
        values = [float(v) for v in re.findall(r"(?<=[\[, ])-?(?:\d+\.\d+|nan|inf)(?=[, ])", block)]
        found[f"{i} {head[1]} {head[2]}"] = np.array(values)
    return found


def embeddings(printed: str) -> Results:
    """Returns the embeddings that llama-embedding prints as JSON."""
    found = re.findall(r'"embedding": *\[([^\]]*)\]', printed)
    return {f"embedding {i}": np.array([float(v) for v in values.split(",")]) for i, values in enumerate(found)}


def scores(printed: str) -> Results:
    """Returns the scores that llama-embedding prints with a reranker."""
    return {
        f"score {i}": np.array([float(v)]) for i, v in re.findall(r"^rerank score (\d+): *(\S+)", printed, re.MULTILINE)
    }


def answers_of_pictures(printed: str) -> Results:
    """Returns the answers of llama-mtmd-cli, which prints little else; none if all pictures have the same answer."""
    found = texts(r"^(.+)$")(printed)
    return found if len(set(found.values())) > 1 else {}


def numbers_of_tokens(printed: str) -> Results:
    """Returns the numbers of tokens of llama-bench's tests; its times on a simulated device mean nothing."""
    found = re.findall(r'"n_prompt": (\d+),\s+"n_gen": (\d+)', printed)
    return {f"test {i}": f"{prompt} and {generated} tokens" for i, (prompt, generated) in enumerate(found)}


@dataclass(frozen=True)
class RunDifference:
    """The difference between two runs.

    Attributes:
        size: the largest error; infinite if the results have different names, or if texts differ.
        where: the result with the largest error.
    """

    size: float = 0.0
    where: str = ""

    def __str__(self) -> str:
        return "equal" if self.size == 0 else f"differs: {self.where}" if math.isinf(self.size) else f"{self.size:.1e}"


def compare(one: Results, other: Results) -> RunDifference:
    """Returns the largest difference between two runs."""
    if one.keys() != other.keys():
        return RunDifference(math.inf, f"{len(one)} and {len(other)} results")
    worst = RunDifference()
    for name, value in one.items():
        size = _error(value, other[name])
        if size > worst.size or math.isnan(size):
            worst = RunDifference(math.inf if math.isnan(size) else size, name)
    return worst


def _error(a: Value, b: Value) -> float:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape:
            return math.inf
        finite = np.isfinite(a) & np.isfinite(b)  # masked elements are -inf
        if not np.array_equal(a[~finite], b[~finite]):
            return math.inf
        difference = a[finite] - b[finite]
        # The program prints four decimals, so a difference of one in the last does not count.
        if np.all(np.abs(difference) <= 1.01e-4):
            return 0.0
        return float((difference**2).sum() / (b[finite] ** 2).sum())
    if isinstance(a, float) and isinstance(b, float):
        return abs(a / b - 1)
    return 0.0 if a == b else math.inf
