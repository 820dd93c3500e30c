"""Makes the Python environment of the build steps, once per machine and lock file.

    python3 python_env.py --lock requirements.txt [--base ENV] [--root DIR]

The environment is a venv in `DIR/<key>`, where the key is a digest of the lock file, the interpreter's version and the platform; an
environment that is there is used as it is. DIR is `neuron-kernelgen/python` in the user's cache folder by default. Several
processes may make the same environment at once: each works in a folder of its own, and the first to rename it wins.

With `--base`, packages of that environment are importable too, so that development tools do not bring a second JAX.

Prints one line of JSON: {"key", "path", "version"}; exits with 3 when this Python is older than 3.11 or has no venv.
Uses the standard library alone, since it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

MINIMUM = (3, 11)

UNFIT = 3
"""The exit status when the Python that runs this is too old or has no venv: the caller tries another."""


def cache_root() -> Path:
    """Returns where environments are kept: NEURON_KERNELGEN_CACHE, XDG_CACHE_HOME or ~/.cache decide."""
    if own := os.environ.get("NEURON_KERNELGEN_CACHE"):
        return Path(own) / "python"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "neuron-kernelgen" / "python"


def key(lock: bytes, base: str) -> str:
    """Returns the environment's name: it changes with the lock file, the interpreter and the platform, and with nothing else."""
    parts = (lock, sys.version.encode(), sysconfig.get_platform().encode(), base.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def make(path: Path, lock: Path, base: Path | None) -> None:
    """Creates the environment at `path` by rename.

    Raises:
        SystemExit: venv or pip failed; the message has pip's last lines.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        run([sys.executable, "-m", "venv", str(scratch)], "python3 -m venv (on Debian: apt-get install python3-venv)")
        python = scratch / "bin" / "python"
        run(
            [
                *(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"),
                *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--requirement", str(lock)),
            ],
            "pip install",
        )
        if base:
            packages = sorted((base / "lib").glob("python*/site-packages"))
            own = sorted((scratch / "lib").glob("python*/site-packages"))
            (own[0] / "base-environment.pth").write_text(f"{packages[0]}\n")
        (scratch / "complete").write_text(f"{platform.python_version()}\n")
        try:
            scratch.rename(path)
        except OSError:
            if not (path / "complete").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run(command: list[str], what: str) -> None:
    """Runs a command; on failure exits with its last lines."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        raise SystemExit(f"{what} failed with exit status {done.returncode}:\n{tail}\ncommand: {' '.join(command)}")


def main() -> None:
    if sys.version_info < MINIMUM or importlib.util.find_spec("venv") is None:
        print(f"{sys.executable} is Python {platform.python_version()}, or has no venv module", file=sys.stderr)
        sys.exit(UNFIT)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--root", type=Path, default=cache_root())
    args = parser.parse_args()
    base = args.base.resolve() if args.base else None
    name = key(args.lock.read_bytes(), base.name if base else "")
    path = args.root / name
    if not (path / "complete").exists():
        make(path, args.lock, base)
    print(json.dumps({"key": name, "path": str(path), "version": platform.python_version()}))


if __name__ == "__main__":
    main()
