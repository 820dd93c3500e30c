"""Builds as a user runs them: in both modes, with each choice of a compiler, and with mistakes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import scratch

pytestmark = pytest.mark.together("builds")

FAKE = Path(__file__).resolve().parents[1] / "compilers" / "fake_neuronx_cc"


@pytest.fixture(scope="module")
def checkout(checkouts: scratch.Checkouts) -> Iterator[scratch.Checkout]:
    with checkouts.lend("project") as made:
        # Only the basic manifest: these tests do not depend on the number of kernels.
        made.edit("MODULE.bazel", 'neuron.kernels(manifest = ["//manifests:llama3.yaml"])\n', "")
        made.edit("WORKSPACE", '        "//manifests:llama3.yaml",\n', "")
        made.edit("manifests/BUILD.bazel", 'neuron_manifest(name = "llama3")\n', "")
        yield made


def digest(checkout: scratch.Checkout, form: str = "kernels.gguf") -> str:
    packs = checkout.bazel("cquery", "--output=files", "//manifests:basic_trn1.pack").output.splitlines()
    path = next(p for p in packs if p.endswith(form))
    return hashlib.sha256((checkout.path / path).read_bytes()).hexdigest()


@pytest.mark.long
def test_workspace_mode_builds_the_same_bytes(checkout: scratch.Checkout) -> None:
    checkout.bazel("build", "//manifests:basic_trn1")
    bzlmod = digest(checkout)
    result = checkout.bazel("build", "//manifests:basic_trn1", flags=["--config=workspace"])
    assert "basic_trn1" in result.output
    execroot = next((checkout.output_root).glob("*/execroot/neuron_kernelgen"))
    packs = list(execroot.glob("bazel-out/*/bin/external/neuron_kernels/bundles/basic_trn1.kernels.gguf"))
    assert [hashlib.sha256(p.read_bytes()).hexdigest() for p in packs] == [bzlmod]


def workers(checkout: scratch.Checkout) -> list[str]:
    """Returns the command lines of a checkout's workers."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(process.read_text().replace("\0", " "))
    return [line for line in found if str(checkout.output_root) in line and "kernelgen.steps.worker" in line]


@pytest.mark.long
def test_a_build_may_follow_one_that_was_interrupted_at_once(checkout: scratch.Checkout) -> None:
    checkout.bazel("build", "//manifests:basic_trn1")
    whole = digest(checkout)
    checkout.bazel("clean")
    checkout.bazel("build", "--nobuild", "//manifests:basic_trn1")
    # `clean` ended the workers of the first build.
    assert not workers(checkout)
    with checkout.start("build", "--worker_max_instances=NeuronEmit=2", "//manifests:basic_trn1") as build:
        # The first steps have begun, and import JAX.
        while not workers(checkout) and build.poll() is None:
            time.sleep(0.01)
        build.send_signal(signal.SIGINT)
        build.communicate()
    assert build.returncode == 8
    checkout.bazel("build", "//manifests:basic_trn1")
    assert digest(checkout) == whole


def test_the_choice_of_the_simulator_is_reported_once(checkout: scratch.Checkout) -> None:
    # A target that is already analyzed prints nothing.
    checkout.bazel("clean")
    output = checkout.bazel("build", "//manifests:basic_trn1", "//manifests:basic_inf2").output
    assert output.count("the kernels are compiled for the simulator") == 1


def test_a_release_refuses_the_simulator(checkout: scratch.Checkout) -> None:
    output = checkout.bazel("build", "--config=release", "//manifests:basic_trn1", expect=1).output
    assert "neuronx-cc is required and is not installed" in output
    assert "NEURON_SDK" in output


def test_an_unknown_compiler_is_refused_by_name(checkout: scratch.Checkout) -> None:
    output = checkout.bazel("build", "--//rules:compiler=gcc", "//manifests:basic_trn1", expect=1).output
    assert "unknown compiler; it is one of auto, neuronx-cc, simulator" in output


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    """Returns a virtual environment with the double of neuronx-cc."""
    folder = tmp_path / "sdk"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(FAKE, folder / "bin" / "neuronx-cc")
    (folder / "bin" / "neuronx-cc").chmod(0o755)
    return folder


def test_auto_takes_the_sdk_when_it_is_there_and_releases_build_with_it(checkout: scratch.Checkout, sdk: Path) -> None:
    checkout.env = {"NEURON_SDK": str(sdk)}
    try:
        automatic = checkout.bazel("build", "//manifests:basic_trn1")
        assert automatic.compiles == 10
        assert "simulator" not in automatic.output
        assert checkout.bazel("build", "--config=release", "//manifests:basic_trn1").compiles == 0
    finally:
        checkout.env = {}


def test_reports_show_the_logs_of_compiles_and_no_bundle_depends_on_one(checkout: scratch.Checkout, sdk: Path) -> None:
    (sdk / "bin" / "neuronx-cc.json").write_text(json.dumps({"print": "estimated cost 7 in {cwd}", "seconds": 0}))
    checkout.env = {"NEURON_SDK": str(sdk)}
    try:
        checkout.bazel("build", "//manifests:basic_inf2.report", "//manifests:basic_inf2", "--output_groups=+log")
        logs = checkout.bazel("cquery", "--output=files", "//manifests:basic_inf2", "--output_groups=log").output
        made = checkout.bazel("cquery", "--output=files", "//manifests:basic_inf2.report").output
        inputs = checkout.bazel("aquery", "inputs('.*[.]log', deps(//manifests:basic_inf2.report))").output
    finally:
        checkout.env = {}
    kept = [checkout.path / line for line in logs.splitlines() if line.endswith(".log")]
    assert len(kept) == 10
    for log in kept:
        first, *rest = log.read_text().splitlines()
        assert first.startswith("$ neuronx-cc compile hlo_module.pb ")
        assert rest == ["Compiler status PASS", "estimated cost 7 in ."]
    assert set(re.findall(r"^  Mnemonic: (\w+)$", inputs, re.MULTILINE)) == {"NeuronReport"}
    (folder,) = (checkout.path / line for line in made.splitlines() if line.endswith(".report.kernels"))
    pages = list(folder.glob("*.html"))
    assert len(pages) == 10 and all("estimated cost 7 in ." in page.read_text() for page in pages)


def test_a_failed_compile_names_the_kernel_and_keeps_its_log(checkout: scratch.Checkout, sdk: Path) -> None:
    failure = {"print": "[F134] no room in SBUF", "output": "none", "exit": 70}
    (sdk / "bin" / "neuronx-cc.json").write_text(json.dumps(failure))
    checkout.env = {"NEURON_SDK": str(sdk)}
    try:
        # Bazel 7.7.1 may crash if a failure interrupts the start of another action with stated resources.
        output = checkout.bazel("build", "--keep_going", "//manifests:basic_trn2", expect=1).output
    finally:
        checkout.env = {}
    assert "[F134] no room in SBUF" in output
    assert re.search(r"error: \S+-[0-9a-f]{12}\.trn2: neuronx-cc ended with status 70", output)
    assert "to run it again: cd " in output
    log = re.search(r"the whole log: (\S+)", output)
    assert log and "no room in SBUF" in Path(log[1]).read_text()
    assert "Traceback" not in output


def test_compiles_wait_for_the_memory_that_they_reserve(checkout: scratch.Checkout, sdk: Path) -> None:
    checkout.env = {"NEURON_SDK": str(sdk)}
    path = checkout.path / "manifests/basic.yaml"
    good = path.read_text()
    try:
        path.write_text(good.replace("\nkernels:", "\ncompiler: {memory_per_compile: 16G, optlevel: 1}\nkernels:"))
        flags = ["--local_resources=memory=20000", "--jobs=8", "--profile=" + str(sdk / "profile.json")]
        assert checkout.bazel("build", "//manifests:basic_trn1", flags=flags).compiles == 10
    finally:
        path.write_text(good)
        checkout.env = {}
    events = json.loads((sdk / "profile.json").read_text())["traceEvents"]
    running = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "Local execution process wall time" and e["name"] == "NeuronCompile"
    )
    assert len(running) == 10
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(running))


def test_a_mistake_in_a_manifest_is_shown_with_its_place(checkout: scratch.Checkout) -> None:
    path = checkout.path / "manifests/basic.yaml"
    good = path.read_text()
    try:
        checkout.edit("manifests/basic.yaml", "op: soft_max", "op: softmax")
        output = checkout.bazel("build", "//manifests:basic_trn1", expect=None).output
        assert "manifests/basic.yaml:" in output
        assert "did you mean 'soft_max'?" in output
        assert ".py" not in output.partition("kernels can't be planned")[2].partition("\n\n")[2].partition("ERROR")[0]
    finally:
        path.write_text(good)
    checkout.bazel("build", "//manifests:basic_trn1")


def test_a_new_emitter_is_found_without_being_named(checkout: scratch.Checkout) -> None:
    checkout.bazel("build", "//manifests:basic_trn1")
    (checkout.path / "kernels/cubes.py").write_text(
        '"""Cubes."""\n\nfrom kernelgen.emitters import emitter\n\n\n@emitter("cube")\ndef cube(x):\n    return x * x * x\n'
    )
    entry = '  - op: cube\n    inputs: ["(4,1,1,1)/f32"]\n    output: "(4,1,1,1)/f32"\n'
    checkout.append("manifests/basic.yaml", entry)
    result = checkout.bazel("build", "//manifests:basic_trn1")
    assert (result.emits, result.compiles) == (1, 1)


STATED = "2.24.5133.0+58f8de22"
"""The version that the double prints."""


@pytest.fixture
def launcher(checkout: scratch.Checkout, tmp_path: Path) -> Path:
    """Returns a copy, without the files beside it, of the program that a worker runs as neuronx-cc if the version is
    stated and this machine has no SDK.
    """
    checkout.env = {"NEURON_SDK_VERSION": STATED}
    try:
        # Bazel 7.7.1 may crash when the first failure stops the other compiles.
        output = checkout.bazel("build", "--keep_going", "--config=release", "//manifests:basic_trn1", expect=1).output
    finally:
        checkout.env = {}
    # This machine has no SDK, so the compile reports what it searched, and where.
    assert f"neuronx-cc {STATED} is not on this machine" in output
    (made,) = checkout.output_root.glob("*/external/*neuron_sdk/neuronx-cc")
    return Path(shutil.copy(made, tmp_path / "launcher"))


def test_a_stated_compiler_is_run_where_it_is_and_only_in_that_version(launcher: Path, sdk: Path) -> None:
    def version() -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "NEURON_SDK": str(sdk)}
        return subprocess.run([launcher, "--version"], env=env, capture_output=True, text=True, check=False)

    assert STATED in version().stdout
    manners = sdk / "bin" / "neuronx-cc.json"
    # A longer version with the same beginning is another version.
    for other in ("2.11.0.1+aaaaaaaaa", STATED + "0", STATED + "a", STATED + "-rc1"):
        manners.write_text(json.dumps({"version": f"NeuronX Compiler version {other}\n"}))
        refused = version()
        assert refused.returncode == 127
        assert f"neuronx-cc {STATED} is not on this machine" in refused.stderr


def test_a_stated_version_that_the_sdk_has_not_is_refused(checkout: scratch.Checkout, sdk: Path) -> None:
    checkout.env = {"NEURON_SDK": str(sdk), "NEURON_SDK_VERSION": "9.9.9"}
    try:
        output = checkout.bazel("build", "//manifests:basic_trn1", expect=None).output
    finally:
        checkout.env = {}
    assert f"NEURON_SDK_VERSION=9.9.9: {sdk}/bin/neuronx-cc is version {STATED}" in output


NOT_OURS = ("incompatible_no_rule_outputs_param", "incompatible_stop_exporting_language_modules")
"""Flags that Bazel 7's own cc_binary and Debian's rules_cc do not support."""


def test_flags_for_later_versions_of_bazel(checkouts: scratch.Checkouts) -> None:
    """Every `--incompatible_*` flag that is off by default; one of them renames the folders of repositories."""
    with checkouts.lend("flags", folder="e2e/smoke") as checkout:
        text = checkout.bazel("help", "build", "--long").output
        names = re.findall(r'^  --\[no\](incompatible_\w+) \(a boolean; default: "false"\)', text, re.MULTILINE)
        assert names
        flags = [f"--{name}" for name in names if name not in NOT_OURS]
        checkout.bazel("build", "--nobuild", *flags, "//...", "//:tiny_trn1.report", count=False)
