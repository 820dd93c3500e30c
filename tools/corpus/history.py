"""Extracts the files that `survey.py` reads from a git repository's whole history: later commits often remove compiled files.

    python3 tools/corpus/history.py REPOSITORY FOLDER

REPOSITORY is a clone, bare or not. A file with one version in all commits is written to its own path below FOLDER, so
that a module stays beside its NEFF. If a file has several versions, each goes to `versions/<number>/<path>`. Files that
a partial clone lacks are skipped and counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parent))

import survey


def versions(repository: Path) -> dict[str, list[str]]:
    """Returns the blobs of every path in a repository's commits, in order of their names.

    Raises:
        subprocess.CalledProcessError: git fails.
    """
    command = ["git", "-C", str(repository), "-c", "core.quotePath=false", "log", "--all", "--raw", "-z", "--format="]
    text = subprocess.run(
        [*command, "--no-renames", "--no-abbrev", "-m", "--root"], capture_output=True, check=True
    ).stdout
    found: dict[str, set[str]] = {}
    words = text.decode(errors="surrogateescape").split("\0")
    for state, path in pairwise(words):
        # :100644 100644 OLD NEW M
        parts = state.strip().split(" ")
        if state.lstrip().startswith(":") and len(parts) == 5 and parts[1].startswith("100"):
            found.setdefault(path, set()).add(parts[3])
    return {path: sorted(blobs) for path, blobs in sorted(found.items())}


def blobs(repository: Path, names: Sequence[str]) -> Iterator[bytes | None]:
    """Yields the content of blobs, None for a missing blob.

    Raises:
        OSError: git ends early, as it does if it can't complete a partial clone.
    """
    command = ["git", "-C", str(repository), "cat-file", "--batch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as git:
        assert git.stdin and git.stdout
        for name in names:
            git.stdin.write(f"{name}\n".encode())
            git.stdin.flush()
            head = git.stdout.readline().split()
            if len(head) != 3:
                if not head:
                    raise OSError(f"{repository}: git ended before it gave {name}")
                yield None
                continue
            content = git.stdout.read(int(head[2]))
            git.stdout.read(1)
            yield content


def unpack(repository: Path, folder: Path) -> tuple[int, int]:
    """Writes the files; returns the number of files, and the number that the clone lacks."""
    wanted = [(path, blob, len(found) > 1) for path, found in versions(repository).items() for blob in found]
    written = missing = 0
    for (path, blob, several), content in zip(wanted, blobs(repository, [blob for _, blob, _ in wanted]), strict=False):
        if content is None:
            missing += survey.is_named(PurePosixPath(path).name)
        elif survey.is_named(PurePosixPath(path).name) or survey.is_neff(content):
            parts = [part for part in PurePosixPath(path).parts if part not in ("..", "/")]
            target = folder.joinpath(*(["versions", blob[:12]] if several else []), *parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            written += 1
    return written, missing


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    try:
        written, missing = unpack(arguments.repository, arguments.folder)
    except subprocess.CalledProcessError as error:
        print(f"error: {error.stderr.decode(errors='replace').strip()}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{written} files written, {missing} are not in the clone")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
