"""Writes a model with its weights in F32: llama.cpp's CPU backend rounds what it multiplies with quantized weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def write_f32(model: Path, path: Path) -> None:
    """Writes a model with all weights in F32."""
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    left_out = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in left_out:
            of = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
