"""Parses headers of GGUF files, damages them in one of many ways, and writes them again."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_KINDS = (*_CODES, _STRING, _ARRAY)

NUMBERS = (0, 1, 2, 3, 7, 31, 255, 2**16 - 1, 2**16, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (b"", b"\0", b"\xff\xfe", b"../../x", b"%s%n", b'"\n- op: evil', b"x" * 5000, b"no_vocab", b"llama", b"gpt2")
ARCHITECTURES = (
    *(b"llama", b"qwen2", b"qwen3moe", b"qwen3next", b"gemma3", b"gemma3n", b"phi3", b"mamba", b"mamba2", b"jamba", b"rwkv6"),
    *(b"rwkv7", b"deepseek2", b"t5", b"t5encoder", b"bert", b"modern-bert", b"gpt-oss", b"falcon-h1", b"lfm2", b"bloom", b"clip"),
)  # fmt: skip
FIELDS = (
    *(b"split.count", b"split.no", b"split.tensors.count", b"general.alignment", b"general.name", b"general.type"),
    *(b"general.file_type", b"tokenizer.ggml.model", b"tokenizer.ggml.tokens", b"tokenizer.ggml.scores"),
    *(b"tokenizer.ggml.merges", b"tokenizer.ggml.token_type", b"tokenizer.ggml.bos_token_id", b"tokenizer.chat_template"),
)  # fmt: skip
HYPERPARAMETERS = (
    *(b"vocab_size", b"context_length", b"embedding_length", b"block_count", b"feed_forward_length", b"expert_count"),
    *(b"expert_used_count", b"expert_group_count", b"expert_group_used_count", b"leading_dense_block_count"),
    *(b"nextn_predict_layers", b"pooling_type", b"attention.head_count", b"attention.head_count_kv"),
    *(b"attention.key_length", b"attention.value_length", b"attention.sliding_window", b"attention.causal"),
    *(b"attention.sliding_window_pattern", b"attention.layer_norm_rms_epsilon", b"attention.max_alibi_bias"),
    *(b"attention.clamp_kqv", b"attention.relative_buckets_count", b"rope.dimension_count", b"rope.freq_base"),
    *(b"rope.scaling.type", b"rope.scaling.factor", b"rope.scaling.original_context_length", b"rope.dimension_sections"),
    *(b"ssm.conv_kernel", b"ssm.inner_size", b"ssm.state_size", b"ssm.time_step_rank", b"ssm.group_count"),
    *(b"wkv.head_size", b"final_logit_softcapping", b"attn_logit_softcapping", b"logit_scale", b"embedding_length_out"),
)  # fmt: skip


@dataclass(frozen=True)
class MetadataEntry:
    """A metadata value.

    Attributes:
        key: its name.
        kind: GGUF's type number.
        data: the bytes after the type in the file.
    """

    key: bytes
    kind: int
    data: bytes


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a header: name, dimensions, type and offset; `n_dims` is the number of dimensions that the header claims."""

    name: bytes
    ne: tuple[int, ...]
    kind: int
    offset: int
    n_dims: int | None = None


@dataclass(frozen=True)
class Parts:
    """A header. The counts are the lengths of the lists unless they are wrong on purpose."""

    entries: tuple[MetadataEntry, ...]
    tensors: tuple[TensorInfo, ...]
    version: int = 3
    n_entries: int | None = None
    n_tensors: int | None = None
    magic: bytes = b"GGUF"


@dataclass
class _Cursor:
    data: bytes
    at: int = field(default=0)

    def take(self, count: int) -> bytes:
        self.at += count
        assert self.at <= len(self.data)
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0])

    def text(self) -> bytes:
        return self.take(self.number("Q"))

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.text()
        elif kind == _ARRAY:
            element = self.number("I")
            for _ in range(self.number("Q")):
                self.value(element)
        else:
            self.take(_SIZES[kind])


def parts(data: bytes) -> Parts:
    """Parses a complete header."""
    cursor = _Cursor(data)
    magic, version = cursor.take(4), cursor.number("I")
    n_tensors, n_entries = cursor.number("Q"), cursor.number("Q")
    entries = []
    for _ in range(n_entries):
        key, kind = cursor.text(), cursor.number("I")
        start = cursor.at
        cursor.value(kind)
        entries.append(MetadataEntry(key, kind, data[start : cursor.at]))
    tensors = []
    for _ in range(n_tensors):
        name = cursor.text()
        ne = tuple(cursor.number("Q") for _ in range(cursor.number("I")))
        tensors.append(TensorInfo(name, ne, cursor.number("I"), cursor.number("Q")))
    return Parts(tuple(entries), tuple(tensors), version, magic=magic)


def put_together(header: Parts) -> bytes:
    """Returns the bytes of a header; the file ends with the header."""
    out = [header.magic, struct.pack("<I", header.version)]
    for told, real in ((header.n_tensors, header.tensors), (header.n_entries, header.entries)):
        out.append(struct.pack("<Q", len(real) if told is None else told))
    for entry in header.entries:
        out += [_text(entry.key), struct.pack("<I", entry.kind), entry.data]
    for tensor in header.tensors:
        out += [_text(tensor.name), struct.pack("<I", len(tensor.ne) if tensor.n_dims is None else tensor.n_dims)]
        out += [struct.pack("<Q", n % 2**64) for n in tensor.ne]
        out.append(struct.pack("<IQ", tensor.kind % 2**32, tensor.offset % 2**64))
    return b"".join(out)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


# --- the kinds of damage --------------------------------------------------------------------------------------------------

Damage = Callable[[random.Random, Parts], Parts]


def _number(rng: random.Random, kind: int) -> bytes:
    if kind in (6, 12):
        value = rng.choice(FLOATS) if rng.random() < 0.8 else rng.uniform(-1e6, 1e6)
        return struct.pack("<" + _CODES[kind], value)
    size = _SIZES[kind]
    value = rng.choice(NUMBERS) if rng.random() < 0.6 else rng.randrange(1, 600)
    return (value % 256**size).to_bytes(size, "little")


def _value(rng: random.Random, kind: int, depth: int = 0) -> bytes:
    """Returns a value of a type; the length of a text or an array may be wrong."""
    if kind == _STRING:
        text = rng.choice(TEXTS)
        return _text(text) if rng.random() < 0.9 else struct.pack("<Q", rng.choice(NUMBERS)) + text
    if kind != _ARRAY:
        return _number(rng, kind)
    element = rng.choice(_KINDS) if depth < 3 else 4
    count = rng.choice((0, 1, 2, 3, 4, 64, 600))
    values = b"".join(_value(rng, element, depth + 1) for _ in range(min(count, 3) if element == _ARRAY else count))
    told = count if rng.random() < 0.8 else rng.choice(NUMBERS)
    return struct.pack("<IQ", element, told) + values


def _set(header: Parts, index: int, entry: MetadataEntry) -> Parts:
    return replace(header, entries=(*header.entries[:index], entry, *header.entries[index + 1 :]))


def _set_tensor(header: Parts, index: int, tensor: TensorInfo) -> Parts:
    return replace(header, tensors=(*header.tensors[:index], tensor, *header.tensors[index + 1 :]))


def absurd_value(rng: random.Random, header: Parts) -> Parts:
    """Writes a value of the right type that no model has."""
    index = rng.randrange(len(header.entries))
    entry = header.entries[index]
    return _set(header, index, replace(entry, data=_value(rng, entry.kind)))


def other_type(rng: random.Random, header: Parts) -> Parts:
    """Writes a value of another type, or of a type that does not exist."""
    index = rng.randrange(len(header.entries))
    kind = rng.choice((*_KINDS, 13, 2**31, 2**32 - 1))
    data = _value(rng, kind) if kind in _KINDS else rng.randbytes(rng.randrange(16))
    return _set(header, index, replace(header.entries[index], kind=kind, data=data))


def one_per_layer(rng: random.Random, header: Parts) -> Parts:
    """Replaces a number with an array, as some hyperparameters are, with too few, too many, or absurd elements."""
    indices = [i for i, entry in enumerate(header.entries) if entry.kind == 4]
    if not indices:
        return header
    index = rng.choice(indices)
    (usual,) = struct.unpack("<I", header.entries[index].data)
    values = [
        usual if rng.random() < 0.7 else rng.choice(NUMBERS) % 2**32 for _ in range(rng.choice((0, 1, 2, 3, 600)))
    ]
    data = struct.pack(f"<IQ{len(values)}I", rng.choice((4, 5)), len(values), *values)
    return _set(header, index, replace(header.entries[index], kind=_ARRAY, data=data))


def missing_value(rng: random.Random, header: Parts) -> Parts:
    index = rng.randrange(len(header.entries))
    return replace(header, entries=(*header.entries[:index], *header.entries[index + 1 :]))


def twice(rng: random.Random, header: Parts) -> Parts:
    """Duplicates a key or a tensor."""
    if rng.random() < 0.5 or not header.tensors:
        return replace(header, entries=(*header.entries, rng.choice(header.entries)))
    return replace(header, tensors=(*header.tensors, rng.choice(header.tensors)))


def another_value(rng: random.Random, header: Parts) -> Parts:
    """Adds a value that the file did not have: of the tokenizer, of a split, of llama.cpp's hyperparameters, or unknown."""
    key = rng.choice((*FIELDS, rng.choice(TEXTS)))
    if rng.random() < 0.6:
        key = _architecture(header) + b"." + rng.choice(HYPERPARAMETERS)
    kind = rng.choice((2, 4, 4, 4, 6, 6, 7, _STRING, _ARRAY))
    entries = tuple(entry for entry in header.entries if entry.key != key)
    return replace(header, entries=(*entries, MetadataEntry(key, kind, _value(rng, kind))))


def _architecture(header: Parts) -> bytes:
    for entry in header.entries:
        if entry.key == b"general.architecture" and entry.kind == _STRING:
            return entry.data[8:]
    return b""


def other_architecture(rng: random.Random, header: Parts) -> Parts:
    """Renames the architecture, and keeps values and tensors."""
    old, new = _architecture(header) + b".", rng.choice((*ARCHITECTURES, rng.choice(TEXTS)))
    entries = []
    for entry in header.entries:
        if entry.key == b"general.architecture":
            entries.append(MetadataEntry(entry.key, _STRING, _text(new)))
        elif entry.key.startswith(old):
            entries.append(replace(entry, key=new + b"." + entry.key.removeprefix(old)))
        else:
            entries.append(entry)
    return replace(header, entries=tuple(entries))


def lying_count(rng: random.Random, header: Parts) -> Parts:
    told = rng.choice(NUMBERS)
    return replace(header, n_entries=told) if rng.random() < 0.5 else replace(header, n_tensors=told)


def other_version(rng: random.Random, header: Parts) -> Parts:
    if rng.random() < 0.2:
        return replace(header, magic=rng.choice((b"GGUX", b"FUGG", b"ggml")))
    return replace(header, version=rng.choice((0, 1, 2, 4, 2**16, 3 << 24, 2**32 - 1)))


def other_tensor(rng: random.Random, header: Parts) -> Parts:
    """Changes a tensor's shape, type, name or offset, or removes a tensor."""
    if not header.tensors:
        return header
    index = rng.randrange(len(header.tensors))
    tensor = header.tensors[index]
    match rng.randrange(8):
        case 0:
            ne = list(tensor.ne)
            ne[rng.randrange(len(ne))] = rng.choice(NUMBERS)
            tensor = replace(tensor, ne=tuple(ne))
        case 1:
            tensor = replace(tensor, ne=tuple(rng.choice(NUMBERS) for _ in range(rng.randrange(6))))
        case 2:
            tensor = replace(tensor, n_dims=rng.choice(NUMBERS) % 2**32)
        case 3:
            tensor = replace(tensor, kind=rng.choice((*range(45), *NUMBERS)))
        case 4:
            tensor = replace(tensor, offset=rng.choice((0, 32, *NUMBERS)))
        case 5:
            tensor = replace(tensor, name=rng.choice((*TEXTS, b"x" * 63, b"x" * 64, b"blk.99999999999.attn_q.weight")))
        case 6:
            return replace(header, tensors=(*header.tensors[:index], *header.tensors[index + 1 :]))
        case _:
            tensor = replace(tensor, ne=tensor.ne[::-1])
    return _set_tensor(header, index, tensor)


def scaled(rng: random.Random, header: Parts) -> Parts:
    """Replaces a number with another one everywhere, so that hyperparameters and shapes still agree."""
    sizes = [n for tensor in header.tensors for n in tensor.ne]
    if not sizes:
        return header
    old, new = rng.choice(sizes), rng.choice((*NUMBERS[:14], 33, 48, 96, 1000))
    packed, wanted = struct.pack("<I", old % 2**32), struct.pack("<I", new % 2**32)
    entries = tuple(replace(e, data=wanted) if e.kind in (4, 5) and e.data == packed else e for e in header.entries)
    shaped = [replace(t, ne=tuple(new if n == old else n for n in t.ne)) for t in header.tensors]
    return replace(header, entries=entries, tensors=tuple(shaped))


def placed(tensors: Iterable[TensorInfo]) -> tuple[TensorInfo, ...]:
    """Returns the tensors with consecutive offsets, as a reader expects them; right for f32, f16 and bf16."""
    at, found = 0, []
    for tensor in tensors:
        found.append(replace(tensor, offset=at))
        size = {0: 4, 1: 2, 30: 2}.get(tensor.kind, 1)
        for n in tensor.ne:
            size *= n
        at = (at + -(-size // 32) * 32) % 2**64
    return tuple(found)


DAMAGES: tuple[Damage, ...] = (
    *(absurd_value, absurd_value, other_type, one_per_layer, missing_value, twice, another_value, another_value),
    *(other_architecture, lying_count, other_version, other_tensor, other_tensor, scaled, scaled, scaled),
)  # fmt: skip
"""The kinds of damage; a kind that is listed twice occurs more often."""


def damage(rng: random.Random, good: bytes) -> tuple[bytes, str]:
    """Returns a damaged header, and a description of the damage."""
    header, done = parts(good), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        chosen = rng.choice(DAMAGES)
        header = chosen(rng, header)
        done.append(chosen.__name__)
        if not header.entries:
            break
    if rng.random() < 0.8:  # otherwise the offsets of later tensors keep the values for the old shape or type
        header = replace(header, tensors=placed(header.tensors))
    data = put_together(header)
    if rng.random() < 0.15:
        data = data[: rng.randrange(4, len(data))]
        done.append("cut off")
    elif rng.random() < 0.15:
        at, size = rng.randrange(4, len(data) - 8), rng.choice((1, 2, 4, 8))
        value = (rng.choice(NUMBERS) % 256**size).to_bytes(size, "little")
        data = data[:at] + value + data[at + size :]
        done.append(f"{size} bytes at {at}")
    # A reader requires padding of the header to its alignment.
    return data + bytes(-len(data) % 32) * (rng.random() < 0.8), ", ".join(done)
