"""`kernelgen model --mmproj`: the kernels of projectors of images and sound, from their headers."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_llama
import random_projector

from kernelgen import cli
from kernelgen.model.exporter import Exporter
from kernelgen.spec.kernel import KernelSpec

from .conftest import Derive, specs

SIZE = random_projector.Size(n_layer=3)


def header(folder: Path, kind: str) -> Path:
    """Writes the header of a projector, without its weights."""
    file = folder / f"{kind}.gguf"
    random_projector.write(file, kind, size=SIZE)
    file.write_bytes(file.read_bytes()[: -(file.stat().st_size // 2)])
    return file


def run(exporter: Exporter, output: Path, *arguments: object) -> int:
    where = ("--exporter", exporter.program, "--llama-cpp", exporter.libraries)
    return cli.run(list(map(str, ("model", "-o", output, *where, *arguments))))


def shapes(found: set[KernelSpec], op: str) -> set[str]:
    """Returns the last inputs of the kernels of an op."""
    return {str(spec.inputs[-1]) for spec in found if spec.op == op}


@pytest.mark.parametrize(
    ("kind", "said", "ops"),
    [
        ("gemma3", "an image of 112x112, flash attention on: 87 nodes, none without a kernel", {"im2col", "pool_2d"}),
        ("idefics3", "an image of 112x112, flash attention on: 83 nodes, none without a kernel", {"im2col", "gelu"}),
        ("qwen2vl_merger", "an image of 1288x1288, flash attention on: 95 nodes, none without a kernel", {"rope"}),
        ("ultravox", "sound of 3000 frames, flash attention on: 89 nodes, none without a kernel", {"gelu_erf"}),
    ],
)
def test_a_projector_alone(
    exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, said: str, ops: set[str]
) -> None:
    """The header alone gives the kernels of llama.cpp's warm-up, with each layer as one kernel."""
    output = tmp_path / "projector.yaml"
    assert run(exporter, output, "--mmproj", header(tmp_path, kind)) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1] == f"  {said}"
    assert f"{kind}.gguf: {kind}, " in out
    found = specs(output)
    assert ops | {"norm", "mul_mat", "flash_attn_ext"} <= {spec.op for spec in found if isinstance(spec, KernelSpec)}
    assert f"#   kernelgen model --mmproj {kind}.gguf --flash-attn on\n" in output.read_text()
    layers = [line for line in out.splitlines() if "groups of nodes as one kernel each" in line]
    assert layers, out


def test_images_of_sizes_that_are_named(exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any size is allowed: llama.cpp scales images to multiples of a token's patch."""
    output = tmp_path / "projector.yaml"
    file = header(tmp_path, "qwen2vl_merger")
    assert run(exporter, output, "--mmproj", file, "--fuse", "none", "--image-size", "300x200,640x480,301x201") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines[1:4]] == [
        "  an image of 1288x1288",
        "  an image of 308x196",
        "  an image of 644x476",
    ]
    assert shapes(specs(output), "im2col") == {"(1288,1288,3,1)/f32", "(308,196,3,1)/f32", "(644,476,3,1)/f32"}


def test_tokens_that_an_image_has(exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "projector.yaml"
    limits = ("--image-min-tokens", 64, "--image-max-tokens", 256)
    given = ("--mmproj", header(tmp_path, "qwen2vl_merger"), "--fuse", "none", "--image-size", "28x28,640x480", *limits)
    assert run(exporter, output, *given) == 0
    sizes = [line.split(",")[0].split()[-1].split("x") for line in capsys.readouterr().out.splitlines()[2:4]]
    small, large = (int(width) * int(height) // 28**2 for width, height in sizes)
    assert small == 64
    assert 200 <= large <= 256
    made = output.read_text().replace(" \\\n#      ", "")
    assert "--image-size 28x28,640x480 --image-min-tokens 64 --image-max-tokens 256 " in made


def test_numbers_that_graphs_depend_on(exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Gemma 4 stores the limits of its activations in tensors: they are read, and a file without them is refused."""
    output = tmp_path / "projector.yaml"
    file = tmp_path / "gemma4v.gguf"
    random_projector.write(file, "gemma4v", size=SIZE)
    assert run(exporter, output, "--mmproj", file, "--fuse", "none") == 0
    most = random_projector.CLAMP
    found = {tuple(dict(spec.params)[end] for end in ("min", "max")) for spec in specs(output) if spec.op == "clamp"}
    assert {(-most, most), (-2 * most, 2 * most)} <= found
    assert run(exporter, tmp_path / "none.yaml", "--mmproj", header(tmp_path, "gemma4v")) == 2
    assert "gemma4v.gguf: the file ends before the number v.blk." in capsys.readouterr().err


def test_what_is_cut_has_one_size(exporter: Exporter, tmp_path: Path) -> None:
    """If llama.cpp cuts images for a projector, all parts have one size, for any size of the image."""
    output = tmp_path / "projector.yaml"
    file = header(tmp_path, "idefics3")
    assert run(exporter, output, "--mmproj", file, "--fuse", "none", "--image-size", "2000x100") == 0
    assert shapes(specs(output), "im2col") == {"(112,112,3,1)/f32"}


def test_without_flash_attention(exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "projector.yaml"
    file = header(tmp_path, "gemma3")
    assert run(exporter, output, "--mmproj", file, "--fuse", "none", "--flash-attn", "both") == 0
    assert "  an image of 112x112, flash attention off: 93 nodes, none without a kernel\n" in capsys.readouterr().out
    assert {"flash_attn_ext", "soft_max"} <= {spec.op for spec in specs(output)}


def test_a_manifest_has_a_model_and_its_projector(derive: Derive, exporter: Exporter, tmp_path: Path) -> None:
    """The manifest has each kernel once, and the projector's weights in ggml's layout."""
    model = tmp_path / "model.gguf"
    random_llama.write(model, size=random_llama.Size(n_embd=SIZE.n_out, n_layer=1), sparse=True)
    file = header(tmp_path, "gemma3")
    call = ("--n-tokens", 1, "--n-kv", 256)
    assert run(exporter, tmp_path / "alone.yaml", "--mmproj", file, "--fuse", "none") == 0
    alone = specs(tmp_path / "alone.yaml")
    without = derive(model, *call, "--weights", "none")
    assert derive(model, *call, "--weights", "none", "--mmproj", file) == without | alone
    assert "weights:" not in (tmp_path / "derived.yaml").read_text()
    assert alone <= derive(model, *call, "--weights", "transposed", "--mmproj", file)
    assert f" --mmproj {file.name} " in (tmp_path / "derived.yaml").read_text().replace(" \\\n#      ", "")
