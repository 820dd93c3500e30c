"""Makes the Python environment of the build steps, once per machine and lock file.

    python3 python_env.py --lock requirements.txt [--base ENV] [--fallback DIR]

The environment is a venv in `DIR/<key>`, where the key is a digest of the lock file, the interpreter's version and the platform; an
environment that is there is used as it is. DIR is `neuron-kernelgen/python` in the user's cache folder, or --fallback where that
can't be written. Several processes may make the same environment at once: each works in a folder of its own, and the first to
rename it wins.

Of the user's settings of pip, only those count that say where packages come from.

With `--base`, packages of that environment are importable too, so that development tools do not bring a second JAX.

Prints one line of JSON: {"key", "path", "version"}; exits with 3 when this Python is older than 3.11 or has no venv.
Uses the standard library alone, since it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import ast
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

CHECK_PACKAGES = Path(__file__).resolve().parents[2] / "cmake" / "check_packages.py"

UNFIT = 3
"""The exit status when the Python that runs this is too old or has no venv: the caller tries another."""


SOURCES = frozenset(
    "cache-dir cert client-cert default-timeout extra-index-url find-links index-url keyring-provider no-index proxy retries "
    "timeout trusted-host".split()
)
"""The settings of pip that say where packages come from."""


def cache_root(fallback: Path | None) -> Path:
    """Returns where environments are kept: NEURON_KERNELGEN_CACHE, XDG_CACHE_HOME or ~/.cache decide.

    Raises:
        SystemExit: the folder can't be written, and there is no other.
    """
    if cache := os.environ.get("NEURON_KERNELGEN_CACHE"):
        root = Path(cache)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "neuron-kernelgen"
    try:
        root = root.expanduser()
        (root / "python").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root / "python").close()
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        if fallback is None:
            raise SystemExit(f"NEURON_KERNELGEN_CACHE may name a folder for the environment: {error}") from None
        return fallback
    return root / "python"


def key(lock: bytes, base: str) -> str:
    """Returns the environment's name: it changes with the lock file, the interpreter and the platform, and with nothing else."""
    parts = (lock, sys.version.encode(), sysconfig.get_platform().encode(), base.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def pip_environment(python: Path) -> dict[str, str]:
    """Returns the environment variables of pip: the user's, without settings of pip that say anything but `SOURCES`."""
    config = subprocess.run([python, "-I", "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    lines = config.stdout.splitlines()
    settings = {"PIP_CONFIG_FILE": os.devnull}
    for section in ("global.", "install.", ":env:."):  # the later ones take precedence
        for name, _, value in (line.removeprefix(section).partition("=") for line in lines if line.startswith(section)):
            if name in SOURCES:
                settings[f"PIP_{name.upper().replace('-', '_')}"] = ast.literal_eval(value)
    return {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | settings


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
                *(str(python), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"),
                *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--requirement", str(lock)),
            ],
            "pip install",
            pip_environment(python),
        )
        run([str(python), "-I", str(CHECK_PACKAGES), str(lock)], "pip install, which left packages out,")
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


def run(command: list[str], what: str, env: dict[str, str] | None = None) -> None:
    """Runs a command; on failure exits with its last lines."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=env)
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
    parser.add_argument("--fallback", type=Path)
    args = parser.parse_args()
    base = args.base.resolve() if args.base else None
    name = key(args.lock.read_bytes(), base.name if base else "")
    path = cache_root(args.fallback) / name
    if not (path / "complete").exists():
        make(path, args.lock, base)
    print(json.dumps({"key": name, "path": str(path), "version": platform.python_version()}))


if __name__ == "__main__":
    main()
