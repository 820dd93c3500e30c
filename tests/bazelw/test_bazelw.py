"""`bazelw` finds the right Bazel, gets Debian's only as a last resort, and passes arguments on correctly.

Each test runs the script with its own PATH of fakes; a fake logs its arguments.
"""

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINNED = (ROOT / ".bazelversion").read_text().strip()
TOOLS = (
    "bash",
    "env",
    "timeout",
    "date",
    "mkdir",
    "mv",
    "rm",
    "grep",
    "sort",
    "head",
    "cat",
    "chmod",
    "find",
    "ln",
    "sed",
    "sh",
)
REGISTRY = "https://bcr.bazel.build/bazel_registry.json"


class Machine:
    """A machine from the script's point of view: a checkout, a PATH, a home and some system files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.home = root / "home"
        self.logs = root / "logs"
        self.system = root / "system"
        self.project = root / "project"
        for folder in (self.bin, self.home, self.logs, self.system / "etc", self.project):
            folder.mkdir(parents=True)
        for name in ("bazelw", ".bazelversion", ".bazelrc"):
            shutil.copy(ROOT / name, self.project / name)
        (self.project / "tools").mkdir()
        shutil.copy(ROOT / "tools/debian-unpack", self.project / "tools")
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path, tool
            (self.bin / tool).symlink_to(path)
        self.environment: dict[str, str] = {}
        self.fake("id", "echo 1000")

    def fake(self, name: str, body: str, folder: Path | None = None) -> None:
        """Puts a program on PATH that logs its arguments, one call per line with `|` between them, and then runs `body`."""
        path = (folder or self.bin) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/usr/bin/env bash\nIFS="|"; echo "$*" >>"{self.logs / name}"; unset IFS\n{body}\n')
        path.chmod(0o755)

    def bazel(self, version: str, name: str = "bazel", folder: Path | None = None) -> None:
        self.fake(name, f'if [[ ${{1:-}} == --version ]]; then echo "bazel {version}"; fi', folder)

    def network(self, reached: bool) -> None:
        self.fake("curl", f"exit {0 if reached else 6}")

    def offline_rules(self) -> None:
        for name in ("rules", "tools"):
            (self.system / "usr/share/bazel" / name).mkdir(parents=True)

    def os(self, id: str) -> None:
        (self.system / "etc/os-release").write_text(f'PRETTY_NAME="Some system"\nID={id}\n')

    def calls(self, name: str) -> list[list[str]]:
        log = self.logs / name
        return [line.split("|") for line in log.read_text().splitlines()] if log.exists() else []

    def run(self, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "BAZELW_SYSROOT": str(self.system),
            **self.environment,
        }
        return subprocess.run(
            [str(self.project / "bazelw"), *args],
            env=environment,
            cwd=cwd or self.project,
            start_new_session=True,  # signals of a fake to its process group stay inside, like a terminal's interrupt
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def given(self, *args: str) -> list[str]:
        """Runs the script; returns Bazel's arguments."""
        done = self.run(*args)
        assert done.returncode == 0, done.stderr
        return self.calls("bazel")[-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.environment["NEURON_KERNELGEN_OFFLINE"] = "0"
    return made


# --- which Bazel ----------------------------------------------------------------------------------------------------------


def test_the_pinned_bazel_on_path_is_run_without_a_word(machine: Machine) -> None:
    machine.bazel(PINNED)
    done = machine.run("build", "//a b/c", "--x=y z")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls("bazel") == [["--version"], ["build", "//a b/c", "--x=y z"]]


def test_exit_status_is_bazels(machine: Machine) -> None:
    machine.fake("bazel", f'if [[ $1 == --version ]]; then echo "bazel {PINNED}"; else exit 37; fi')
    assert machine.run("build").returncode == 37


def test_it_works_from_another_folder(machine: Machine) -> None:
    machine.bazel(PINNED)
    assert machine.run("build", cwd=machine.home).returncode == 0


def test_a_later_bazel_on_path_is_found(machine: Machine) -> None:
    later = machine.root / "later"
    machine.bazel("6.5.0")
    machine.bazel(PINNED, folder=later)
    machine.environment["PATH"] = f"{machine.bin}{os.pathsep}{later}"
    done = machine.run("build")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.calls("bazel")[-1] == ["build"]


def test_a_version_with_a_suffix_is_the_version(machine: Machine) -> None:
    machine.bazel(f"{PINNED}- (@non-git)")
    assert machine.run("build").stderr == ""


def test_bazelisk_is_run_where_it_can_download(machine: Machine) -> None:
    machine.network(reached=True)
    machine.fake("bazelisk", 'echo "version $USE_BAZEL_VERSION"')
    done = machine.run("build", "//x")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"version {PINNED}\n", "")
    assert machine.calls("bazelisk") == [["build", "//x"]]


def test_bazelisk_wins_over_another_version(machine: Machine) -> None:
    machine.network(reached=True)
    machine.bazel("8.0.1")
    machine.fake("bazelisk", "")
    assert machine.run("build").returncode == 0
    assert machine.calls("bazelisk") == [["build"]]


def test_bazelisk_that_has_downloaded_needs_no_network(machine: Machine) -> None:
    machine.network(reached=False)
    machine.fake("bazelisk", "")
    downloaded = machine.home / ".cache/bazelisk/downloads/metadata/bazelbuild"
    downloaded.mkdir(parents=True)
    (downloaded / f"bazel-{PINNED}-linux-x86_64").touch()
    assert machine.run("build").returncode == 0
    assert machine.calls("bazelisk") == [["build"]]
    assert machine.calls("curl") == []


def test_bazelisk_is_not_tried_where_it_cannot_download(machine: Machine) -> None:
    machine.network(reached=False)
    machine.bazel("8.0.1")
    machine.fake("bazelisk", "sleep 100")
    done = machine.run("build")
    assert done.returncode == 0
    assert machine.calls("bazelisk") == []
    assert machine.calls("bazel")[-1] == ["build"]


def test_npx_gets_bazelisk_once(machine: Machine) -> None:
    machine.network(reached=True)
    package = machine.root / "package"
    machine.fake("bazelisk", "", folder=package)
    machine.fake("npx", f'echo "{package}/bazelisk"')
    for _ in range(2):
        assert machine.run("build", "//x").returncode == 0
    assert machine.calls("bazelisk") == [["build", "//x"]] * 2
    (call,) = machine.calls("npx")
    assert call[:2] == ["--yes", "--package=@bazel/bazelisk@1.28.1"]


def test_npx_that_fails_is_reported(machine: Machine) -> None:
    machine.network(reached=True)
    machine.fake("npx", "exit 1")
    done = machine.run("build")
    assert done.returncode == 2
    assert "npx can not get @bazel/bazelisk@1.28.1" in done.stderr


@pytest.mark.parametrize("version", ["7.4.0", "7.99.9", "8.5.1", "9.0.0"])
def test_any_bazel_from_7_4_to_9_will_do_with_one_line(machine: Machine, version: str) -> None:
    machine.network(reached=False)
    machine.bazel(version)
    done = machine.run("build")
    assert done.returncode == 0
    assert done.stderr == f"bazelw: Bazel {PINNED} is not available here; running {version} ({machine.bin}/bazel)\n"
    assert machine.calls("bazel")[-1] == ["build"]


@pytest.mark.parametrize("version", ["4.2.3", "7.3.9", "10.0.0", "no_version"])
def test_other_versions_will_not_do(machine: Machine, version: str) -> None:
    machine.network(reached=False)
    machine.bazel(version)
    assert machine.run("build").returncode == 2
    assert machine.calls("bazel") == [["--version"]]


def test_without_any_bazel_each_option_has_a_line(machine: Machine) -> None:
    machine.network(reached=False)
    machine.bazel("4.2.3")
    machine.os("ubuntu")
    done = machine.run("build")
    assert (done.returncode, done.stdout) == (2, "")
    first, *options = done.stderr.splitlines()
    assert first == f"bazelw: there is no Bazel {PINNED} and no way to get it. Any one of these will do:"
    assert len(options) == 3
    assert options[0] == f"  - Bazel 7.4 to 9 on PATH ({machine.bin}/bazel is 4.2.3)"
    assert options[1] == "  - Bazelisk on PATH, or npm's npx, and a network (there is neither bazelisk nor npx)"
    assert options[2] == "  - on Debian: the package bazel-bootstrap of forky, for this user alone (this is not Debian)"


def test_without_a_client_the_network_counts_as_not_reached(machine: Machine) -> None:
    machine.fake("bazelisk", "")
    done = machine.run("build")
    assert done.returncode == 2
    assert "the place it downloads from is not reached" in done.stderr


def test_wget_will_do_for_the_probe(machine: Machine) -> None:
    machine.fake("wget", "exit 0")
    machine.fake("bazelisk", "")
    assert machine.run("build").returncode == 0


@pytest.mark.parametrize("text", ["", "latest\n", "7.7\n"])
def test_a_version_file_that_holds_no_version(machine: Machine, text: str) -> None:
    machine.bazel(PINNED)
    (machine.project / ".bazelversion").write_text(text)
    done = machine.run("build")
    assert done.returncode == 2
    assert ".bazelversion" in done.stderr and f"not '{text.strip()}'" in done.stderr


def test_use_bazel_version_is_honoured(machine: Machine) -> None:
    machine.bazel("8.1.0")
    machine.environment["USE_BAZEL_VERSION"] = "8.1.0"
    assert machine.run("build").stderr == ""


# --- Debian ---------------------------------------------------------------------------------------------------------------

MIRROR, OTHER = "http://mirror.invalid/debian/", "http://other.invalid/apt/"

# The content of the packages, as far as the script reads it: the loader prints the arguments of the program that it
# starts.
PACKAGES = f"""
cd "$3"
program() {{ mkdir -p "${{1%/*}}"; printf '#!/usr/bin/env bash\\n%s\\n' "${{2:-}}" >"$1"; chmod +x "$1"; }}
lib=usr/lib/x86_64-linux-gnu java=usr/lib/jvm/java-25-openjdk-amd64
program $lib/ld-linux-x86-64.so.2 'shift 4; printf "%s\\n" "$@"'
program usr/bin/script true
for name in usr/bin/bazel usr/libexec/x86_64-linux-gnu/bazel/linux-sandbox $java/bin/java $java/lib/jspawnhelper $java/lib/libjvm.so; do
  program "$name"; printf '\\x7fELF\\0' >"$name"
done
ln -s java-25-openjdk-amd64 usr/lib/jvm/java-1.25.0-openjdk-amd64
mkdir -p usr/share/bazel/rules usr/share/bazel/tools usr/share/java etc/bazel etc/java
echo {PINNED} >usr/share/bazel/build-label.txt
echo /usr/share/java/a.jar >usr/share/bazel/bazel_classpath_debian_depends.txt
echo >usr/share/java/b-1.jar; ln -s b-1.jar usr/share/java/b.jar; echo >usr/share/java/a.jar
echo settings >etc/java/settings; ln -s /etc/java/settings $java/settings; ln -s /proc/version $java/elsewhere
printf '%s\\n' 'try-import /etc/bazel.bazelrc' 'startup --install_base=/usr/share/bazel' 'startup --trust_install_base' \\
  'build --sandbox_debug' 'common --override_module=rules_cc=/usr/share/bazel/rules/cc' >etc/bazel/bazelrc
"""


@pytest.fixture(params=["0", "1000"], ids=["root", "user"])
def debian(machine: Machine, request: pytest.FixtureRequest) -> Machine:
    """Returns a Debian machine whose apt can download Bazel; a file fail-STEP makes that step fail."""
    machine.os("debian")
    machine.network(reached=False)
    machine.fake("id", f"echo {request.param}")
    for name in ("etc/apt/sources.list.d/debian.list", "usr/share/keyrings/debian-archive-keyring.gpg"):
        path = machine.system / name
        path.parent.mkdir(parents=True)
        path.write_text("as it was\n")
    machine.fake("dpkg", "echo amd64")
    machine.fake("dpkg-deb", PACKAGES)
    machine.fake(
        "apt-get",
        f"""
        case "$*" in
          *--no-release-info*) echo {OTHER}; echo {MIRROR}; exit ;;
          indextargets*) exit ;;
          *"--download-only install"*) step=download; echo >"${{4%/*}}/archives/bazel.deb" ;;
          *install*) echo "installs: $*" >&2; exit 100 ;;
          *update*) step=update ;;
        esac
        if [[ -e {machine.root}/kill-$step ]]; then kill -s "$(<{machine.root}/kill-$step)" 0; fi
        if [[ -e {machine.root}/fail-$step ]]; then exit 100; fi
        """,
    )
    machine.fake(
        "apt-cache",
        f'if grep -q "signed-by=.* {MIRROR} forky main" "${{2%/*}}/sources.list"; then echo " bazel-bootstrap | {PINNED}"; fi',
    )
    return machine


def place(machine: Machine) -> Path:
    """Returns the place of the copy of Debian's Bazel."""
    return machine.home / ".cache/neuron-kernelgen" / f"debian-bazel-{os.uname().machine}"


def kept(machine: Machine) -> list[str]:
    """Returns the names of the copies in the cache folder, whole or not."""
    return sorted(path.name for path in place(machine).parent.iterdir() if path.is_dir())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_debians_bazel_is_unpacked_for_the_user_alone(debian: Machine) -> None:
    before = tree(debian.system)
    done = debian.run("build", "//x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["build", "//x"]
    assert kept(debian) == [place(debian).name]
    assert tree(debian.system) == before
    for call in debian.calls("apt-get"):
        assert call[0] == "indextargets" or call[:3] == ["-q", "-y", "-c"], "apt's own configuration is used"
        assert ("install" in call) == ("--download-only" in call)
        assert not any("force" in word for word in call)
    assert {call[0] for call in debian.calls("dpkg")} == {"--print-architecture"}
    assert {call[0] for call in debian.calls("dpkg-deb")} == {"--extract"}


def test_debian_is_announced_with_what_prevents_and_undoes_it(debian: Machine) -> None:
    (debian.root / "kill-update").write_text("KILL")  # the message comes first
    done = debian.run("build")
    first, second = done.stderr.splitlines()[:2]
    assert "getting Debian's" in first and "200 MB" in first and str(place(debian)) in first
    assert "NEURON_KERNELGEN_INSTALL=0 prevents this" in second and f"'rm -r {place(debian)}' undoes it" in second


def test_debians_bazel_is_got_once(debian: Machine) -> None:
    assert debian.run("build").returncode == 0
    calls = debian.calls("apt-get")
    again = debian.run("build")
    assert (again.returncode, again.stderr) == (0, "")
    assert debian.calls("apt-get") == calls
    assert debian.run("--version").stdout == f"bazel {PINNED}\n"


@pytest.mark.parametrize(("pinned", "runs"), [(PINNED, True), ("7.5.0", True), ("", False)])
def test_debians_bazel_comes_before_bazelisk_only_when_it_is_the_pinned_one(
    debian: Machine, pinned: str, runs: bool
) -> None:
    assert debian.run("build").returncode == 0
    debian.environment["USE_BAZEL_VERSION"] = pinned or "7.6.0"
    debian.fake("bazelisk", "")
    debian.network(reached=not pinned)
    (debian.home / ".cache/neuron-kernelgen/reached-bazelisk").unlink(missing_ok=True)
    done = debian.run("build", "//y")
    assert done.returncode == 0
    assert done.stdout.endswith("build\n//y\n") == runs
    assert (debian.calls("bazelisk") == [["build", "//y"]]) != runs
    assert (f"Bazel {pinned} is not available here; running {PINNED}" in done.stderr) == (runs and pinned != PINNED)


def test_debians_bazel_runs_from_its_place(debian: Machine) -> None:
    done = debian.run("build")
    copy = place(debian)
    assert done.stdout.splitlines() == [
        f"--install_base={copy}/usr/share/bazel",
        "--trust_install_base",
        f"--server_javabase={copy}/usr/lib/jvm/java-25-openjdk-amd64",
        f"--bazelrc={copy}/bazelrc",
        f"--host_jvm_args=-Djavax.net.ssl.trustStore={copy}/cacerts",
        "build",
    ]
    jars = (copy / "usr/share/bazel/bazel_classpath_debian_depends.txt").read_text().split()
    assert jars == [f"{copy}/usr/share/java/{jar}" for jar in ("a.jar", "a.jar", "b-1.jar")]
    java = copy / "usr/lib/jvm/java-25-openjdk-amd64"
    assert (java / "settings").read_text() == "settings\n"
    assert (java / "elsewhere").readlink() == Path("/proc/version")
    sandbox = copy / "usr/libexec/x86_64-linux-gnu/bazel/linux-sandbox"
    libraries = f"{copy}/usr/lib/x86_64-linux-gnu"
    assert sandbox.read_text().endswith(
        f'exec {libraries}/ld-linux-x86-64.so.2 --inhibit-cache --library-path {libraries} {sandbox}.elf "$@"\n'
    )
    assert sorted(path.name for path in copy.rglob("*.elf")) == [
        "bazel.elf",
        "java.elf",
        "jspawnhelper.elf",
        "linux-sandbox.elf",
    ]


def test_debians_bazel_takes_its_own_rulesets(debian: Machine) -> None:
    del debian.environment["NEURON_KERNELGEN_OFFLINE"]
    assert debian.run("build", "//x").stdout.splitlines()[-3:] == ["build", "--config=offline", "//x"]
    copy = place(debian)
    lines = (copy / "bazelrc").read_text().splitlines()
    assert lines[0] == f"common --override_module=rules_cc={copy}/usr/share/bazel/rules/cc"
    named = re.findall(
        r"^common:offline --override_(?:module|repository)=\w+=(/usr/share/bazel/.*)$",
        (ROOT / ".bazelrc").read_text(),
        re.M,
    )
    assert len(named) > 10
    assert [line.partition("=")[2].partition("=")[2] for line in lines[1:]] == [f"{copy}{path}" for path in named]
    # Another checkout, or a later state of this one, may name others.
    (debian.project / ".bazelrc").write_text(
        "common:offline --override_module=a=/usr/share/bazel/a\ncommon:offline --noenable_workspace\n"
    )
    debian.run("build")
    assert (copy / "bazelrc").read_text().splitlines() == [
        lines[0],
        f"common:offline --override_module=a={copy}/usr/share/bazel/a",
    ]


def test_debians_bazel_trusts_the_machines_certificates(debian: Machine) -> None:
    def certificates(count: int) -> None:
        path = debian.system / "etc/ssl/certs/ca-certificates.crt"
        path.parent.mkdir(parents=True, exist_ok=True)
        one = "-----BEGIN CERTIFICATE-----\nAAEC\n-----END CERTIFICATE-----\n"
        path.write_text(one * count)
        os.utime(path, (time.time() + count, time.time() + count))

    def trusted() -> int:
        store = (place(debian) / "cacerts").read_bytes()
        magic, version, count = struct.unpack(">III", store[:12])
        assert (magic, version) == (0xFEEDFEED, 2)
        assert store[-20:] == hashlib.sha1("changeit".encode("utf-16-be") + b"Mighty Aphrodite" + store[:-20]).digest()
        assert store[:-20].endswith(b"\0\x05X.509\0\0\0\x03\0\x01\x02")
        return int(count)

    (debian.bin / "python3").symlink_to(sys.executable)
    certificates(2)
    assert debian.run("build").returncode == 0
    assert trusted() == 2
    certificates(3)
    debian.run("build")
    assert trusted() == 3


def test_debian_asks_each_mirror_once(debian: Machine) -> None:
    debian.run("build")
    assert [call[-1] for call in debian.calls("apt-get")].count("update") == 2
    debian.fake("apt-cache", "")
    shutil.rmtree(place(debian))
    done = debian.run("build")
    assert done.returncode == 2
    assert "no mirror of apt's configuration has a bazel-bootstrap of forky" in done.stderr


def test_debian_without_its_keys_trusts_no_mirror(debian: Machine) -> None:
    shutil.rmtree(debian.system / "usr/share/keyrings")
    done = debian.run("build")
    assert done.returncode == 2
    assert "debian-archive-keyring.gpg, which Debian's signatures are checked with" in done.stderr
    assert debian.calls("apt-get") == []


def test_debian_that_fails_leaves_nothing_but_the_log(debian: Machine) -> None:
    (debian.root / "fail-download").touch()
    done = debian.run("build")
    assert done.returncode == 2
    assert "apt-get can not get the packages" in done.stderr
    assert kept(debian) == []


@pytest.mark.parametrize(("signal", "status"), [("INT", 130), ("TERM", 143), ("HUP", 143)])
def test_debian_that_is_interrupted_leaves_nothing_but_the_log(debian: Machine, signal: str, status: int) -> None:
    (debian.root / "kill-download").write_text(signal)
    assert debian.run("build").returncode == status
    assert kept(debian) == []


def test_debian_that_was_killed_is_tidied_up_a_day_later(debian: Machine) -> None:
    old, young = (place(debian).with_name(f"{place(debian).name}.new.{number}") for number in (1, 2))
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 90000, time.time() - 90000))
    assert debian.run("build").returncode == 0
    assert kept(debian) == [place(debian).name, young.name]


def test_debians_packages_that_are_not_as_expected_are_refused(debian: Machine) -> None:
    debian.fake("dpkg-deb", f"{PACKAGES}\nrm usr/bin/bazel*")
    done = debian.run("build")
    assert done.returncode == 2
    assert "the packages have no usr/bin/bazel" in done.stderr
    assert kept(debian) == []


@pytest.mark.parametrize(
    ("cache", "reason"),
    [("a b", "letters, digits"), ("relative", "from the root on"), ("/dev/null/x", "can not be written")],
)
def test_debians_bazel_needs_a_place(debian: Machine, cache: str, reason: str) -> None:
    debian.environment["NEURON_KERNELGEN_CACHE"] = f"{debian.home}/a b" if " " in cache else cache
    done = debian.run("build")
    assert done.returncode == 2
    assert reason in done.stderr
    assert debian.calls("apt-get") == []


def test_debians_bazel_can_be_forbidden(debian: Machine) -> None:
    debian.environment["NEURON_KERNELGEN_INSTALL"] = "0"
    done = debian.run("build")
    assert done.returncode == 2
    assert "NEURON_KERNELGEN_INSTALL=0 forbids it" in done.stderr
    assert debian.calls("apt-get") == []


def test_debian_is_not_asked_where_a_bazel_will_do(debian: Machine) -> None:
    debian.bazel("8.2.0")
    assert debian.run("build").returncode == 0
    assert debian.calls("apt-get") == []


# --- the offline configuration --------------------------------------------------------------------------------------------


@pytest.fixture
def offline(machine: Machine) -> Machine:
    machine.bazel(PINNED)
    machine.network(reached=False)
    machine.offline_rules()
    del machine.environment["NEURON_KERNELGEN_OFFLINE"]
    return machine


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("build //x", "build --config=offline //x"),
        ("test --config=release //...", "test --config=offline --config=release //..."),
        ("run //x -- build --config=offline", "run --config=offline //x -- build --config=offline"),
        ("--output_base=/o build //x", "--output_base=/o build --config=offline //x"),
        ("--output_base build query //x", "--output_base build query --config=offline //x"),
        ("--batch --max_idle_secs 5 info", "--batch --max_idle_secs 5 info --config=offline"),
        ("--nohome_rc cquery x", "--nohome_rc cquery --config=offline x"),
        *((f"{c} x", f"{c} --config=offline x") for c in ("aquery", "coverage", "fetch", "mod", "sync", "vendor")),
        *((c, c) for c in ("version", "help build", "shutdown", "clean --expunge", "dump --rules", "license")),
        ("build --config=offline //x", "build --config=offline //x"),
        ("build --registry=file:///r //x", "build --registry=file:///r //x"),
        ("--ignore_all_rc_files build //x", "--ignore_all_rc_files build //x"),
        ("--noworkspace_rc build //x", "--noworkspace_rc build //x"),
        ("", ""),
        ("--output_base", "--output_base"),
    ],
)
def test_offline_is_put_after_the_command(offline: Machine, given: str, expected: str) -> None:
    assert offline.given(*given.split()) == (expected.split() or [""])


def test_version_flag_is_bazels_own(offline: Machine) -> None:
    done = offline.run("--version")
    assert done.stdout == f"bazel {PINNED}\n"
    assert offline.calls("curl") == []


def test_arguments_with_spaces_survive(offline: Machine) -> None:
    assert offline.given("build", "--define=a=b c", "") == ["build", "--config=offline", "--define=a=b c", ""]


def test_online_adds_nothing_and_is_remembered(offline: Machine) -> None:
    offline.network(reached=True)
    for _ in range(3):
        assert offline.given("build") == ["build"]
    (call,) = offline.calls("curl")
    assert call[-1] == REGISTRY


def test_offline_is_remembered_too_but_not_for_ever(offline: Machine) -> None:
    for _ in range(2):
        assert offline.given("build") == ["build", "--config=offline"]
    assert len(offline.calls("curl")) == 1
    remembered = offline.home / ".cache/neuron-kernelgen/reached-registry"
    then, url, answer = remembered.read_text().split()
    assert (url, answer) == (REGISTRY, "no") and abs(int(then) - time.time()) < 60
    remembered.write_text(f"{int(then) - 3601} {url} {answer}\n")
    offline.network(reached=True)
    assert offline.given("build") == ["build"]


@pytest.mark.parametrize("text", ["", "nonsense\n", "12x y\n", f"99999999999999999999 {REGISTRY} maybe\n"])
def test_a_damaged_memory_is_made_anew(offline: Machine, text: str) -> None:
    cache = offline.home / ".cache/neuron-kernelgen"
    cache.mkdir(parents=True)
    (cache / "reached-registry").write_text(text)
    assert offline.given("build") == ["build", "--config=offline"]
    assert len(offline.calls("curl")) == 1


def test_a_home_that_cannot_be_written_is_done_without(offline: Machine) -> None:
    offline.environment["NEURON_KERNELGEN_CACHE"] = "/dev/null/cache"
    assert offline.given("build") == ["build", "--config=offline"]
    assert offline.run("build").stderr == ""


def test_a_registry_of_the_users_own_is_asked_instead(offline: Machine) -> None:
    (offline.project / ".user.bazelrc").write_text("build -c opt\ncommon --registry=https://registry.invalid/r/\n")
    offline.fake("curl", "for url; do :; done; [[ $url == https://registry.invalid/r/bazel_registry.json ]]")
    assert offline.given("build") == ["build"]


def test_force_offline(offline: Machine) -> None:
    offline.network(reached=True)
    offline.environment["NEURON_KERNELGEN_OFFLINE"] = "1"
    assert offline.given("build") == ["build", "--config=offline"]
    assert offline.calls("curl") == []


def test_force_online(offline: Machine) -> None:
    offline.environment["NEURON_KERNELGEN_OFFLINE"] = "0"
    assert offline.given("build") == ["build"]
    assert offline.calls("curl") == []


def test_a_force_that_is_neither(offline: Machine) -> None:
    offline.environment["NEURON_KERNELGEN_OFFLINE"] = "yes"
    done = offline.run("build")
    assert done.returncode == 2
    assert "NEURON_KERNELGEN_OFFLINE is 1 or 0, not 'yes'" in done.stderr


def test_offline_without_the_packaged_rules_is_reported(offline: Machine) -> None:
    shutil.rmtree(offline.system / "usr")
    done = offline.run("build")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "is not reached, and /usr/share/bazel" in done.stderr
    assert offline.calls("bazel")[-1] == ["build"]
