"""The enumerations of nki.isa, of both generations."""

from __future__ import annotations

from enum import Enum

from nki_interpreter.checks import GENERATIONS as GENERATIONS
from nki_interpreter.checks import needs as needs
from nki_interpreter.devices import nc_version as nc_version
from nki_interpreter.isa.common import ReduceCmd


class engine(Enum):
    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class oob_mode(Enum):
    error = 0
    skip = 1


class older_dge_mode(Enum):
    none = 0
    swdge = 1
    hwdge = 2
    unknown = 3


class newer_dge_mode(Enum):
    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class matmul_perf_mode(Enum):
    none = "none"
    double_row = "double_row"
    double_row_gen3 = "double_row_gen3"
    double_column = "double_column"
    double_pixel = "double_pixel"


class dma_engine(Enum):
    dma = 1
    gpsimd_dma = 2


reduce_cmd = ReduceCmd
