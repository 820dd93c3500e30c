"""The compiler's options."""

from dataclasses import dataclass


@dataclass
class CompileOptions:
    target: str
    lnc: int
    artifacts_dir: str
    output_path: str
