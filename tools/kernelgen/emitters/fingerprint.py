"""A digest of an emitter's sources that changes with every edit except edits of comments and empty lines.

It hashes texts, not Python's parse of them, so that every version of Python gives the same digest.
"""

from __future__ import annotations

import hashlib
import io
import tokenize

from kernelgen.emitters.dependencies import dependencies
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError
from kernelgen.spec.canonical import canonical_json

_NOTHING = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def of_sources(library: Library, module: str) -> str:
    """Returns the digest of a module and the modules that it imports (`dependencies`), in hexadecimal.

    Raises:
        KernelgenError: one of them can't be read, or is not Python.
    """
    files = dependencies(library, module)
    texts = [[*library.place(file), _bare(file.read_bytes(), str(file))] for file in files]
    return hashlib.sha256(canonical_json(texts).encode()).hexdigest()


def _bare(source: bytes, file: str) -> str:
    """Returns a source without comments and without lines that hold nothing else; lines inside a string stay."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    lines = source.decode(encoding).splitlines(keepends=True)
    empty: set[int] = set()
    try:
        tokens = list(tokenize.tokenize(io.BytesIO(source).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        raise KernelgenError(f"{file}: {error}") from None
    filled = {row for t in tokens if t.type not in _NOTHING for row in range(t.start[0], t.end[0] + 1)}
    for token in tokens:
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
        if token.type in (tokenize.COMMENT, tokenize.NL) and row not in filled:
            empty.add(row)
    return "".join(line for row, line in enumerate(lines, 1) if row not in empty)
