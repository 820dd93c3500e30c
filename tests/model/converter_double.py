"""A double of llama.cpp's convert_hf_to_gguf.py. It has the methods that kernelgen replaces, and converts a checkpoint
whose tensors already have GGUF's names.

The checkpoint's configuration controls it: `fields` are the keys of the header, and it first runs the Python code in
`do`.
"""

import json
import logging
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

SIZES = {"F16": 2, "F32": 4, "BF16": 2}


class ModelBase:
    def __init__(self, folder, output):
        self.folder, self.output = folder, output
        self.hparams = json.loads((folder / "config.json").read_text())
        self.gguf_writer = gguf.GGUFWriter(None, self.hparams["model_type"])

    def set_vocab(self):
        self.gguf_writer.add_tokenizer_model("damaged")
        tokens = json.loads((self.folder / "tokenizer.json").read_text())
        if tokens is None:
            sys.exit("no tokens")
        assert isinstance(tokens, list)
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre("gpt-2")
        self.gguf_writer.add_token_list(tokens)
        self.gguf_writer.add_token_types([1] * len(tokens))
        self.gguf_writer.add_token_merges(["a b"])

    def write(self):
        for key, value in self.hparams["fields"].items():
            add = self.gguf_writer.add_uint32 if isinstance(value, int) else self.gguf_writer.add_float32
            add(f"{self.hparams['model_type']}.{key}", value)
        for part in sorted(self.folder.glob("*.safetensors")):
            data = part.open("rb").read(8)
            (length,) = struct.unpack("<Q", data)
            with part.open("rb") as file:
                header = json.loads(file.read(8 + length)[8:])
            ends = [0]
            for name, tensor in header.items():
                if name == "__metadata__":
                    continue
                kind = np.float32 if tensor["dtype"] == "F32" else np.float16
                # as lazy as the converter's own tensors: without memory until it is written
                self.gguf_writer.add_tensor(name, np.broadcast_to(np.zeros(1, kind), tensor["shape"]))
                ends.append(tensor["data_offsets"][1])
            if part.stat().st_size != 8 + length + max(ends):
                raise ValueError(f"{part.name} is cut off")
        self.set_vocab()
        self.gguf_writer.write_header_to_file(path=self.output)
        self.gguf_writer.write_kv_data_to_file()
        self.gguf_writer.write_tensors_to_file(progress=True)
        self.gguf_writer.close()


def main():
    folder, option, output = sys.argv[1:]
    assert option == "--outfile"
    model = ModelBase(Path(folder), Path(output))
    names = {path.name for path in Path(folder).iterdir()}
    assert not {name for name in names if name.endswith((".py", ".bin"))}, names
    exec(model.hparams.get("do", ""), {"logging": logging, "sys": sys, "folder": Path(folder)})
    model.write()
