"""Options for how a model is run, under llama.cpp's names, and for the program that exports llama.cpp's graphs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.ggml.types import TYPES
from kernelgen.model import exporter
from kernelgen.model.projector import Projector
from kernelgen.model.sizes import FEW, Settings, few, few_encoded, pad

_FLASH_ATTN = {"auto": (True,), "on": (True,), "off": (False,), "both": (True, False)}
"""llama.cpp's `auto` enables flash attention if the device computes it, which it does with these kernels."""

MAX_CTX = 1 << 24
"""Maximum cells of a context: above any model's training length."""

_TENSOR = "tensor"

MAX_DEVICES = 16
"""Maximum devices over which llama.cpp splits tensors (`GGML_BACKEND_META_MAX_DEVICES`)."""

MAX_SIDE = 1 << 14
"""Maximum pixels per side of an image."""

MAX_SECONDS = 3600
"""Maximum seconds of sound."""

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


_POOLINGS = ("none", "mean", "cls", "last", "rank")

_ANY = "any"
"""The value of --n-ctx for kernels that work with caches of any length."""

_N_CTX = 4096
"""Default maximum of cells in use without --n-kv, and default length of a cache that kernels depend on."""

_DEFAULT_CHAIN = "top_k=40,top_p=0.95,min_p=0.05,temperature=0.8,dist"
_CHAINS = {"none": "", "default": _DEFAULT_CHAIN}
"""Names of chains of samplers."""


_POSITIVE = click.FloatRange(min=0, min_open=True)
_ROPE = (
    ("--rope-scaling", click.Choice(["none", "linear", "yarn"]), "the model file's"),
    ("--rope-scale", _POSITIVE, "the model file's"),
    ("--rope-freq-base", _POSITIVE, "the model file's"),
    ("--rope-freq-scale", _POSITIVE, "the model file's"),
    ("--yarn-orig-ctx", click.IntRange(1, MAX_CTX), "the model file's"),
    ("--yarn-ext-factor", click.FLOAT, "1 for yarn"),
    ("--yarn-attn-factor", click.FLOAT, "llama.cpp's"),
    ("--yarn-beta-slow", click.FLOAT, "llama.cpp's"),
    ("--yarn-beta-fast", click.FLOAT, "llama.cpp's"),
)
"""llama.cpp's options of RoPE, the type of their values, and their defaults."""


class IntegerList(click.ParamType[tuple[int, ...]]):
    """Numbers separated by commas, as `tuple[int, ...]`; each once, in ascending order.

    Args:
        least: minimum of each number.
    """

    name = "numbers"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        for part in parts:
            if not re.fullmatch("[0-9]{1,9}", part.strip()) or int(part) < self._least:
                self.fail(f"expected numbers from {self._least}, separated by commas, not '{value}'", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


class Contexts(IntegerList):
    """Like `IntegerList`, with `any` as an empty value."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        return () if value == _ANY else super().convert(value, param, ctx)


class Adapter(click.ParamType[tuple[Path, float]]):
    """An adapter's file, with its scale after a colon: `FILE` or `FILE:SCALE`, as `tuple[Path, float]`."""

    name = "adapter"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Path, float]:
        text = str(value)
        file, colon, scale = text.rpartition(":")
        if not colon or Path(text).exists():
            return Path(text), 1.0
        try:
            number = float(scale)
        except ValueError:
            return Path(text), 1.0
        if not math.isfinite(number) or not number:
            self.fail(f"an adapter is multiplied by a finite number other than 0, not by {scale}", param, ctx)
        return Path(file), number


class ImageSizes(click.ParamType[tuple[tuple[int, int], ...]]):
    """Widths and heights of images, separated by commas: `640x480,1024x768`; each once."""

    name = "sizes"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        found = []
        for part in str(value).split(","):
            match = re.fullmatch("([0-9]{1,5})x([0-9]{1,5})", part.strip())
            width, height = map(int, match.groups()) if match else (0, 0)
            if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
                self.fail(f"expected sizes such as 640x480, of at most {MAX_SIDE} pixels, not '{value}'", param, ctx)
            found.append((width, height))
        return tuple(dict.fromkeys(found))


_SETTINGS = (
    click.option(
        "--n-ctx",
        type=Contexts(),
        metavar="N,…",
        help="llama.cpp's -c; several numbers for programs with several contexts. With any, the kernels depend only on the "
        f"cells in use, up to the longest --n-kv ({_N_CTX} by default), and serve every -c.  [default: any; {_N_CTX} without flash "
        "attention]",
    ),
    click.option(
        "--n-tokens",
        type=IntegerList(),
        metavar="N,…",
        help="Numbers of tokens per call to build kernels for; these kernels compute other numbers, too.  "
        f"[default: {','.join(map(str, FEW))}, up to --n-ubatch]",
    ),
    click.option(
        "--n-outputs",
        type=IntegerList(least=0),
        metavar="N,…",
        help="Numbers of tokens per call whose logits a program reads.  "
        "[default: 1 and all; with --split-mode tensor also none of --n-ubatch]",
    ),
    click.option(
        "--n-kv",
        type=IntegerList(),
        metavar="N,…",
        help="Lengths of the KV cache in use.  [default: powers of two from 256; all multiples of 256 with an --n-ctx and "
        "a cache for each sequence]",
    ),
    click.option(
        "--n-ubatch", type=click.IntRange(1, 1 << 20), default=512, show_default=True, help="llama.cpp's -ub."
    ),
    click.option("--n-seq-max", type=click.IntRange(1, 64), default=1, show_default=True, help="llama.cpp's -np."),
    click.option(
        "--type-k", type=click.Choice(_CACHE_TYPES), default="f16", show_default=True, help="llama.cpp's -ctk."
    ),
    click.option(
        "--type-v", type=click.Choice(_CACHE_TYPES), default="f16", show_default=True, help="llama.cpp's -ctv."
    ),
    click.option(
        "--flash-attn",
        type=click.Choice([*_FLASH_ATTN]),
        default="auto",
        show_default=True,
        help="llama.cpp's -fa; both is for programs that run with -fa on and with -fa off.",
    ),
    click.option(
        "--type-k-draft",
        type=click.Choice(_CACHE_TYPES),
        default="f16",
        show_default=True,
        help="llama.cpp's -ctkd: the type of a draft's keys.",
    ),
    click.option(
        "--type-v-draft",
        type=click.Choice(_CACHE_TYPES),
        default="f16",
        show_default=True,
        help="llama.cpp's -ctvd: the type of a draft's values.",
    ),
    *(
        click.option(option, type=kind, help=f"llama.cpp's option of that name.  [default: {default}]")
        for option, kind, default in _ROPE
    ),
    click.option(
        "--override-kv",
        multiple=True,
        metavar="KEY=TYPE:VALUE,…",
        help="llama.cpp's --override-kv: other metadata than the file's; TYPE is int, float, bool or str. May be given "
        "several times.",
    ),
    click.option("--kv-unified", is_flag=True, help="llama.cpp's --kv-unified: sequences share one cache."),
    click.option("--swa-full", is_flag=True, help="llama.cpp's --swa-full."),
    click.option(
        "--control-vector",
        is_flag=True,
        help="llama.cpp's --control-vector: the layers from the second to the last add a vector of any values.",
    ),
    click.option(
        "--encoder",
        is_flag=True,
        help="For a model with an encoder and a decoder: the kernels of its encoder instead of its decoder.",
    ),
    click.option(
        "--n-encoded",
        type=IntegerList(),
        metavar="N,…",
        help="For a model with an encoder and a decoder: numbers of tokens that the encoder computes and the decoder attends to; "
        "the kernels compute other numbers, too.  "
        f"[default: {','.join(map(str, FEW[1:]))}, up to --n-ubatch]",
    ),
    click.option(
        "--embeddings",
        is_flag=True,
        help="llama.cpp's --embeddings, --rerank and llama-embedding: each call computes the embeddings of all its tokens.",
    ),
    click.option(
        "--pooling",
        type=click.Choice(_POOLINGS),
        help="llama.cpp's --pooling: how embeddings are pooled; rank for --rerank.  [default: the model file's]",
    ),
    click.option(
        "--ftype",
        metavar="NAME",
        help="Derive for the types of another quantization, such as Q4_K_M, before llama-quantize has made it.  "
        "[default: the file's types]",
    ),
    click.option(
        "--lora",
        multiple=True,
        type=Adapter(),
        metavar="FILE[:SCALE]",
        help="llama.cpp's --lora and --lora-scaled: an adapter that the kernels apply; the header of its file is enough. May be "
        "given several times, in llama.cpp's order.",
    ),
    click.option(
        "--split-mode",
        type=click.Choice(["none", _TENSOR]),
        default="none",
        show_default=True,
        help="llama.cpp's -sm: with tensor each device holds slices of the weights and the cache, and computes "
        "a part of each layer.",
    ),
    click.option(
        "--devices",
        type=IntegerList(),
        metavar="N,…",
        help=f"Numbers of devices over which --split-mode {_TENSOR} splits; 1 is without a split.",
    ),
    click.option(
        "--samplers",
        multiple=True,
        metavar=f"[{'|'.join(_CHAINS)}|CHAIN]",
        help="The samplers that llama.cpp runs on the device (its -bs), such as top_k=40,temperature=0.8,dist; may be given "
        f"several times. default is the chain that llama.cpp's programs use by default: {_DEFAULT_CHAIN}; with none, the "
        "CPU samples.  [default: none]",
    ),
)

_EXPORTER = (
    click.option(
        "--exporter",
        "program",
        metavar="PROGRAM",
        type=click.Path(path_type=Path),
        help=f"The program {exporter.PROGRAM}.  [default: {exporter.VARIABLE}]",
    ),
    click.option(
        "--llama-cpp",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help=f"A build of llama.cpp, for its libraries and the {exporter.PROGRAM} in it; or llama.cpp's source tree.",
    ),
)


_PROJECTOR = (
    click.option(
        "--mmproj",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="llama.cpp's --mmproj: the GGUF file of a projector of images or sound; its header is enough. The manifest gets its "
        "kernels, for the sizes of llama.cpp's warm-up. (Many projectors have no others.) Without a SOURCE, it has only these.",
    ),
    click.option(
        "--image-size",
        "images",
        type=ImageSizes(),
        metavar="WxH,…",
        help="More sizes of images, in pixels, to build kernels of the projector for: the sizes "
        "after llama.cpp scales and cuts them.",
    ),
    click.option(
        "--image-min-tokens",
        type=click.IntRange(1, 1 << 20),
        help="llama.cpp's option of that name: the minimum number of tokens of an image.",
    ),
    click.option(
        "--image-max-tokens",
        type=click.IntRange(1, 1 << 20),
        help="llama.cpp's option of that name: the maximum number of tokens of an image.",
    ),
    click.option(
        "--audio-seconds",
        "seconds",
        type=IntegerList(),
        metavar="N,…",
        help="More lengths of sound to build kernels of the projector for.",
    ),
)

_ROPE_NAMES = {option: option.removeprefix("--").replace("-", "_") for option, *_ in _ROPE}

NAMES = frozenset(
    (*Settings.__dataclass_fields__, *_ROPE_NAMES.values(), "override_kv", "split_mode", "program", "llama_cpp")
)
"""The parameters of commands with these options."""


def settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options for how a model is run, as one parameter `settings: Settings`.

    Raises:
        KernelgenError: when the command runs: no context of llama.cpp can have such settings.
    """

    @functools.wraps(function)
    def wrapper(
        *args: Any,
        flash_attn: str,
        n_tokens: tuple[int, ...] | None,
        split_mode: str,
        devices: tuple[int, ...] | None,
        samplers: tuple[str, ...],
        override_kv: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        rope = [(option, kwargs.pop(name)) for option, name in _ROPE_NAMES.items()]
        given = {name: kwargs.pop(name) for name in Settings.__dataclass_fields__ if name in kwargs}
        if devices is None and split_mode == _TENSOR and kwargs.get("cores", 1) > 1:
            devices = (kwargs["cores"],)
        flash = _flash_attn(flash_attn, given["type_v"])
        if given["n_ctx"] is None:
            given["n_ctx"] = () if True in flash else (_N_CTX,)
        given["any_ctx"] = not given["n_ctx"]
        if given["any_ctx"]:
            caches = 1 if given["kv_unified"] else given["n_seq_max"]
            given["n_ctx"] = (max(given["n_kv"] or (_N_CTX,)) * caches,)
        settings = Settings(
            **given,
            n_tokens=n_tokens or (1,),
            flash_attn=flash,
            devices=_devices(split_mode, devices, flash_attn),
            samplers=tuple(dict.fromkeys(_CHAINS.get(chain, chain) for chain in samplers)) or ("",),
            llama_options=(
                *((option, str(value)) for option, value in rope if value is not None),
                *(("--override-kv", override) for override in override_kv),
            ),
        )
        if n_tokens is None:
            settings = replace(settings, n_tokens=few(settings.most_tokens))
        settings = replace(settings, n_encoded=settings.n_encoded or few_encoded(settings))
        _check(settings)
        return function(*args, settings=settings, **kwargs)

    return _with(wrapper, _SETTINGS)


def projector_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a projector, as one parameter `projector: Projector | None`.

    Raises:
        KernelgenError: when the command runs: there are sizes but no projector, or sound beyond its limit.
    """

    @functools.wraps(function)
    def wrapper(
        *args: Any,
        mmproj: Path | None,
        images: tuple[tuple[int, int], ...] | None,
        image_min_tokens: int | None,
        image_max_tokens: int | None,
        seconds: tuple[int, ...] | None,
        **kwargs: Any,
    ) -> Any:
        tokens = (image_min_tokens, image_max_tokens)
        if mmproj is None and (images or seconds):
            raise KernelgenError(
                f"{'--image-size' if images else '--audio-seconds'} is for a projector: give --mmproj too"
            )
        if seconds and seconds[-1] > MAX_SECONDS:
            raise KernelgenError(f"--audio-seconds {seconds[-1]}: sound of at most {MAX_SECONDS} s")
        projector = None if mmproj is None else Projector(mmproj, images or (), seconds or (), tokens)
        return function(*args, projector=projector, **kwargs)

    return _with(wrapper, _PROJECTOR)


def exporter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--exporter` and `--llama-cpp` as `program: Path | None` and `llama_cpp: Path | None`, for `exporter.find`."""
    return _with(function, _EXPORTER)


def refuse(context: click.Context, reason: str, *more: str) -> None:
    """Refuses options that need a model, if a command runs without one: this module's options, and the parameters `more`.

    Raises:
        click.UsageError: such an option was given; the message has its name and the reason.
    """
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name in (*NAMES, *more):
            raise click.UsageError(f"{parameter.opts[0]} {reason}")


def _with(function: Callable[..., Any], added: tuple[Callable[[Any], Any], ...]) -> Callable[..., Any]:
    for option in reversed(added):
        function = option(function)
    return function


def _flash_attn(chosen: str, type_v: str) -> tuple[bool, ...]:
    if TYPES[type_v].quantized and chosen in ("off", "both"):
        raise KernelgenError(
            f"--flash-attn {chosen}: llama.cpp has a {type_v} cache of values only with flash attention"
        )
    return _FLASH_ATTN[chosen]


def _devices(split_mode: str, devices: tuple[int, ...] | None, flash_attn: str) -> tuple[int, ...]:
    if split_mode != _TENSOR:
        if devices is not None:
            raise KernelgenError(
                f"--devices says over how many devices tensors are split: give --split-mode {_TENSOR} too"
            )
        return (1,)
    if devices is None or devices[-1] == 1:
        raise KernelgenError(f"--split-mode {_TENSOR}: say over how many devices, --devices 2")
    if devices[-1] > MAX_DEVICES:
        raise KernelgenError(f"--devices {devices[-1]}: llama.cpp splits tensors over at most {MAX_DEVICES} devices")
    if flash_attn in ("off", "both"):
        raise KernelgenError(f"--flash-attn {flash_attn}: llama.cpp splits tensors only with flash attention")
    return devices


FIXED_CTX = "without flash attention a cache's length is in the strides of its values"


def _check(settings: Settings) -> None:
    if {"--rope-scale", "--rope-freq-scale"} <= {option for option, _ in settings.llama_options}:
        raise KernelgenError("--rope-scale is 1 / --rope-freq-scale: give one of them")
    if settings.split and any(settings.samplers):
        raise KernelgenError(f"--samplers: llama.cpp samples on the CPU with --split-mode {_TENSOR}")
    if settings.whole and any(settings.samplers):
        raise KernelgenError("--samplers with --embeddings or --encoder: no token is sampled from an embedding")
    if settings.pooling and not settings.embeddings:
        raise KernelgenError(f"--pooling {settings.pooling}: embeddings are pooled; give --embeddings too")
    if settings.whole and settings.n_outputs:
        raise KernelgenError("--n-outputs with --embeddings or --encoder: a call has the embeddings of all its tokens")
    if settings.lora and settings.split:
        hint = "derive without --lora, or for one device"
        raise KernelgenError(Diagnostic("--lora with --split-mode tensor: llama.cpp splits no adapters", hint=hint))
    if settings.any_ctx and True not in settings.flash_attn:
        hint = f"leave --n-ctx out for -c {_N_CTX}, or give the sizes of the contexts"
        raise KernelgenError(Diagnostic(f"--n-ctx {_ANY}: {FIXED_CTX}", hint=hint))
    if settings.n_ctx[-1] > MAX_CTX:
        raise KernelgenError(f"--n-ctx {settings.n_ctx[-1]}: a context has at most {MAX_CTX} cells")
    most = settings.most_tokens
    cells = settings.cells(settings.n_ctx[-1])
    if settings.n_tokens[-1] > most:
        raise KernelgenError(
            f"--n-tokens {settings.n_tokens[-1]}: a call has at most {most} tokens with --n-ubatch {settings.n_ubatch}, "
            f"{settings.n_ctx[-1]} cells and --n-seq-max {settings.n_seq_max}"
        )
    for n in settings.n_kv or ():
        if n % pad(1) or n > cells:
            most_cells = "" if settings.any_ctx else f" up to {cells}"
            raise KernelgenError(f"--n-kv {n}: lengths of the cache are multiples of {pad(1)}{most_cells}")
