"""Fetches one source distribution by name, version and hash, once per machine.

    python pypi_sdist.py --name NAME --version VERSION --sha256 HEX --backend MODULE [--root DIR]

pip finds it wherever it is set up to look; nothing here names a place. The archive is kept in `DIR`, by default
`neuron-kernelgen/sources` in the user's cache folder; one that is there with the right hash is not fetched again.

pip asks a source distribution for its metadata before it saves it, and would install and run the build system for that. Here
it gets the name and the version from a stand-in, so that no code of a package runs, and only the archive is fetched.

Prints the path of the archive. Runs in an environment that has pip, and uses the standard library beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# A build backend (PEP 517) under the name that the distribution requests; it has the metadata already.
_BACKEND = """\
import pathlib

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = pathlib.Path(metadata_directory, {stem!r} + ".dist-info")
    folder.mkdir()
    folder.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: " + {name!r} + "\\nVersion: " + {version!r} + "\\n")
    return folder.name

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    raise NotImplementedError("only the source distribution is wanted")
"""


def cache_root() -> Path:
    """Returns where archives are kept: NEURON_KERNELGEN_CACHE, XDG_CACHE_HOME or ~/.cache decide."""
    if own := os.environ.get("NEURON_KERNELGEN_CACHE"):
        return Path(own) / "sources"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "neuron-kernelgen" / "sources"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(name: str, version: str, digest: str, backend: str, path: Path) -> None:
    """Downloads the archive to `path`, which appears by rename.

    Args:
        name: the distribution's name.
        version: its version.
        digest: SHA-256 of the archive, in hexadecimal; pip refuses any other.
        backend: the module that the distribution's pyproject.toml names as its build backend.
        path: where the archive is to be.

    Raises:
        SystemExit: pip failed; the message has its last lines.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as name_of_scratch:
        scratch = Path(name_of_scratch)
        module = scratch.joinpath("backend", *backend.split(".")).with_suffix(".py")
        module.parent.mkdir(parents=True)
        stem = f"{name.replace('-', '_')}-{version}"
        module.write_text(_BACKEND.format(stem=stem, name=name, version=version))
        requirements = scratch / "requirements.txt"
        requirements.write_text(f"{name}=={version} --hash=sha256:{digest}\n")
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
            *("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-cache-dir"),
            *("--require-hashes", "--requirement", str(requirements), "--dest", str(scratch / "archives")),
        ]
        environment = {**os.environ, "PYTHONPATH": str(scratch / "backend")}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=environment
        )
        archives = list(scratch.glob("archives/*.tar.gz"))
        if done.returncode or len(archives) != 1:
            tail = "\n".join(done.stdout.splitlines()[-20:])
            raise SystemExit(f"pip download of {name} {version} failed with exit status {done.returncode}:\n{tail}")
        archives[0].rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--sha256", required=True)
    parser.add_argument("--backend", required=True, help="the build backend's module, as pyproject.toml has it")
    parser.add_argument("--root", type=Path, default=cache_root())
    args = parser.parse_args()
    path = args.root / f"{args.name}-{args.version}-{args.sha256[:16]}.tar.gz"
    if not path.exists() or sha256(path) != args.sha256:
        fetch(args.name, args.version, args.sha256, args.backend, path)
    print(path)


if __name__ == "__main__":
    main()
