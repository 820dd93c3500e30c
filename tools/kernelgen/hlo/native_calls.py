"""Calls of what NKI's own compiler made of a kernel: the part of HLO that names files, and how these are named by their content.

In a canonical module a call's configuration names its file as `sha256:<digest>`, and the file's bytes are an attribute of the call,
in base64. So the module's bytes say all that the NEFF depends on, and no path. `materialized` makes of it what neuronx-cc is given.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.hlo import proto

TARGET = "AwsNeuronCustomNativeKernel"
"""The custom call's target."""
COLLECTIVES = "has_collectives"
"""The frontend attribute of a call of a kernel that communicates with others."""
ARTIFACT = "kernelgen_artifact"
"""The frontend attribute that holds the bytes of the file that a call names; neuronx-cc is not given it."""
ATTRIBUTES = (ARTIFACT, COLLECTIVES)


def by_content(text: str, file: Path) -> tuple[str, str]:
    """Returns a configuration that names a file by its content, and the content in base64.

    Raises:
        KernelgenError: the configuration does not name the file.
        OSError: the file can't be read.
    """
    content = file.read_bytes()
    return _renamed(text, str(file), _name(content)), base64.b64encode(content).decode()


def materialized(hlo: bytes, folder: Path) -> bytes:
    """Returns a module as neuronx-cc is given it: the files that it needs are in a folder, and its calls name them there.

    Args:
        hlo: a canonical module; one without such calls is returned as it is.
        folder: where the files are written.

    Raises:
        KernelgenError: a call's file is not the one that it names.
        OSError: the folder can't be written.
    """
    if ARTIFACT.encode() not in hlo:
        return hlo
    module = proto.parse(hlo)
    for computation in module.computations:
        for call in computation.instructions:
            for attribute in [a for a in call.frontend_attributes.map if a.key == ARTIFACT]:
                content = base64.b64decode(attribute.value)
                path = folder / f"{hashlib.sha256(content).hexdigest()}.nki"
                path.write_bytes(content)
                call.backend_config = _renamed(call.backend_config.decode(), _name(content), str(path)).encode()
                call.frontend_attributes.map.remove(attribute)
    return proto.serialize(module)


def _name(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _renamed(text: str, old: str, new: str) -> str:
    """Returns a configuration, which is in base64 or plain, with another name of a file."""
    try:
        plain, coded = base64.b64decode(text, validate=True), True
    except ValueError:
        plain, coded = text.encode(), False
    if old.encode() not in plain:
        raise KernelgenError(f"the configuration of a native kernel does not name {old}", exit_code=EXIT_FAILED)
    plain = plain.replace(old.encode(), new.encode())
    return base64.b64encode(plain).decode() if coded else plain.decode()
