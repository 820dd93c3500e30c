"""Calls to the output of NKI's compiler in HLO: files that the calls reference, named by their content.

In a canonical module a call's configuration names its file as `sha256:<digest>`, and an attribute of the call holds the file's
bytes in base64. So the module's bytes determine the NEFF, and contain no path. `materialized` turns the module into neuronx-cc's
input.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from kernelgen.compilers.nki_driver import NkiFailure, content_name, renamed
from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.hlo import proto
from kernelgen.hlo.custom_calls import ARTIFACT


def materialized(hlo: bytes, folder: Path) -> bytes:
    """Returns a module as input for neuronx-cc: writes its files to a folder and points its calls to them.

    Args:
        hlo: a canonical module; one without such calls is returned as it is.
        folder: the output folder of the files.

    Raises:
        KernelgenError: a call's configuration does not name its file.
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
                try:
                    call.backend_config = renamed(
                        call.backend_config.decode(), content_name(content), str(path)
                    ).encode()
                except NkiFailure as error:
                    raise KernelgenError(str(error), exit_code=EXIT_FAILED) from error
                call.frontend_attributes.map.remove(attribute)
    return proto.serialize(module)
