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
    "mkdir",
    "mktemp",
    "mv",
    "rm",
    "grep",
    "sort",
    "cat",
    "chmod",
    "find",
    "ln",
    "sed",
    "sh",
)


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
        for name in ("debian-bazel", "debian-unpack"):
            shutil.copy(ROOT / "tools" / name, self.project / "tools")
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

    def bazel_arguments(self, *args: str) -> list[str]:
        """Runs the script; returns Bazel's arguments."""
        completed = self.run(*args)
        assert completed.returncode == 0, completed.stderr
        return self.calls("bazel")[-1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.environment["NEURON_KERNELGEN_OFFLINE"] = "0"
    return machine


# --- which Bazel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_usable"),
    [("7.4.0", True), ("7.10.1", True), ("9.0.0", True), ("7.3.9", False), ("10.0.0", False), ("no_version", False)],
)
def test_bazel_on_path_runs_if_its_version_is_supported(machine: Machine, version: str, is_usable: bool) -> None:
    machine.bazel(version)
    completed = machine.run("build", "--define=a=b c", "")
    assert (completed.returncode, completed.stderr == "") == ((0, True) if is_usable else (2, False))
    assert (machine.calls("bazel")[-1] == ["build", "--define=a=b c", ""]) is is_usable


def test_exit_status_and_folder_are_bazels(machine: Machine) -> None:
    machine.fake("bazel", 'if [[ $1 == --version ]]; then echo "bazel 8.0.0"; else pwd; exit 37; fi')
    completed = machine.run("build", cwd=machine.home)
    assert (completed.returncode, completed.stdout) == (37, f"{machine.home}\n")


def test_bazelisk_runs_if_bazel_is_missing(machine: Machine) -> None:
    machine.fake("bazelisk", "")
    assert machine.run("build", "//x").returncode == 0
    assert machine.calls("bazelisk") == [["build", "//x"]]


def test_npx_finds_bazelisk_once(machine: Machine) -> None:
    machine.network(reached=True)
    machine.fake("npx", f"echo {machine.root}/npm/bazelisk")
    machine.fake("bazelisk", "", machine.root / "npm")
    for _ in range(2):
        assert machine.run("build").returncode == 0
    assert machine.calls("bazelisk") == [["build"]] * 2
    assert len(machine.calls("npx")) == len(machine.calls("curl")) == 1


def test_error_without_any_bazel_lists_the_remedies(machine: Machine) -> None:
    machine.bazel("4.2.3")
    completed = machine.run("build")
    assert completed.returncode == 2
    first, *remedies = completed.stderr.splitlines()
    assert first == "bazelw: there is no Bazel here and no way to get it. Any one of these will do:"
    assert [line.split()[1] for line in remedies] == ["Bazel", "Bazelisk", "Debian"]
    assert "bazel is bazel 4.2.3" in remedies[0]


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


@pytest.fixture
def debian(machine: Machine) -> Machine:
    """Returns a Debian machine whose apt can download Bazel; a file fail-STEP makes that step fail."""
    machine.os("debian")
    machine.network(reached=False)
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


def copy_folder(machine: Machine) -> Path:
    """Returns the folder of the copy of Debian's Bazel."""
    return machine.home / ".cache/neuron-kernelgen" / f"debian-bazel-{os.uname().machine}"


def folders_in_cache(machine: Machine) -> list[str]:
    """Returns the names of the folders in the cache: copies, and parts of them."""
    return sorted(path.name for path in copy_folder(machine).parent.iterdir() if path.is_dir())


def test_debians_bazel_is_downloaded_once_and_runs_from_its_folder(debian: Machine) -> None:
    system = {path: path.read_bytes() for path in debian.system.rglob("*") if path.is_file()}
    completed = debian.run("build", "//x")
    copy = copy_folder(debian)
    assert completed.stdout.splitlines() == [
        f"--install_base={copy}/usr/share/bazel",
        "--trust_install_base",
        f"--server_javabase={copy}/usr/lib/jvm/java-25-openjdk-amd64",
        f"--bazelrc={copy}/bazelrc",
        f"--host_jvm_args=-Djavax.net.ssl.trustStore={copy}/cacerts",
        "build",
        "//x",
    ]
    first, second = completed.stderr.splitlines()[:2]
    assert "getting Debian's" in first and "200 MB" in first and str(copy) in first
    assert "NEURON_KERNELGEN_INSTALL=0 prevents this" in second and f"'rm -r {copy}' undoes it" in second
    assert folders_in_cache(debian) == [copy.name]
    assert {path: path.read_bytes() for path in debian.system.rglob("*") if path.is_file()} == system
    jars = (copy / "usr/share/bazel/bazel_classpath_debian_depends.txt").read_text().split()
    assert jars == [f"{copy}/usr/share/java/{jar}" for jar in ("a.jar", "a.jar", "b-1.jar")]
    sandbox = copy / "usr/libexec/x86_64-linux-gnu/bazel/linux-sandbox"
    libraries = f"{copy}/usr/lib/x86_64-linux-gnu"
    loader = f"{libraries}/ld-linux-x86-64.so.2 --inhibit-cache --library-path {libraries}"
    assert sandbox.read_text().endswith(f'exec {loader} {sandbox}.elf "$@"\n')
    for call in debian.calls("apt-get"):
        assert call[0] == "indextargets" or call[:3] == ["-q", "-y", "-c"], "apt's own configuration is used"
        assert ("install" in call) == ("--download-only" in call)
    calls = debian.calls("apt-get")
    again = debian.run("build")
    assert (again.returncode, again.stderr, debian.calls("apt-get")) == (0, "", calls)
    assert debian.run("--version").stdout == f"bazel {PINNED}\n"


def test_debians_bazel_takes_its_own_rulesets(debian: Machine) -> None:
    del debian.environment["NEURON_KERNELGEN_OFFLINE"]
    flag, *rest = debian.run("build", "//x").stdout.splitlines()[-3:]
    assert rest == ["build", "//x"]
    lines = Path(flag.removeprefix("--bazelrc=")).read_text().splitlines()
    configuration = re.findall(r"^common:offline (.*)$", (ROOT / ".bazelrc").read_text(), re.M)
    rulesets = f"{copy_folder(debian)}/usr/share/bazel/"
    assert lines == [
        'common "{}"'.format(flag.replace("%workspace%", str(debian.project)).replace("/usr/share/bazel/", rulesets))
        for flag in configuration
    ]
    assert sum(rulesets in line for line in lines) > 10
    assert (copy_folder(debian) / "bazelrc").read_text() == (f"common --override_module=rules_cc={rulesets}rules/cc\n")


def test_debians_bazel_trusts_the_machines_certificates(debian: Machine) -> None:
    path = debian.system / "etc/ssl/certs/ca-certificates.crt"
    path.parent.mkdir(parents=True)
    path.write_text("-----BEGIN CERTIFICATE-----\nAAEC\n-----END CERTIFICATE-----\n" * 2)
    (debian.bin / "python3").symlink_to(sys.executable)
    assert debian.run("build").returncode == 0
    store = (copy_folder(debian) / "cacerts").read_bytes()
    assert struct.unpack(">III", store[:12]) == (0xFEEDFEED, 2, 2)
    assert store[-20:] == hashlib.sha1("changeit".encode("utf-16-be") + b"Mighty Aphrodite" + store[:-20]).digest()
    assert store[:-20].endswith(b"\0\x05X.509\0\0\0\x03\0\x01\x02")


def test_debian_without_its_keys_trusts_no_mirror(debian: Machine) -> None:
    shutil.rmtree(debian.system / "usr/share/keyrings")
    completed = debian.run("build")
    assert completed.returncode == 2
    assert "debian-archive-keyring.gpg, which Debian's signatures are checked with" in completed.stderr
    assert debian.calls("apt-get") == []


def test_failed_download_leaves_only_the_log(debian: Machine) -> None:
    (debian.root / "fail-download").touch()
    completed = debian.run("build")
    assert completed.returncode == 2
    assert "apt-get can not get the packages" in completed.stderr
    assert folders_in_cache(debian) == []


def test_interrupted_download_leaves_only_the_log(debian: Machine) -> None:
    (debian.root / "kill-download").write_text("INT")
    assert debian.run("build").returncode == 130
    assert folders_in_cache(debian) == []


def test_debians_packages_without_bazel_are_refused(debian: Machine) -> None:
    debian.fake("dpkg-deb", f"{PACKAGES}\nrm usr/bin/bazel*")
    completed = debian.run("build")
    assert completed.returncode == 2
    assert "the packages have no usr/bin/bazel" in completed.stderr
    assert folders_in_cache(debian) == []


def test_debians_packages_can_be_forbidden(debian: Machine) -> None:
    debian.environment["NEURON_KERNELGEN_INSTALL"] = "0"
    completed = debian.run("build")
    assert completed.returncode == 2
    assert "without NEURON_KERNELGEN_INSTALL=0" in completed.stderr
    assert debian.calls("apt-get") == []


# --- the offline configuration --------------------------------------------------------------------------------------------


@pytest.fixture
def offline(machine: Machine) -> Machine:
    """Returns a machine with Bazel and Debian's rulesets that does not reach the registry."""
    machine.bazel("8.0.0")
    machine.network(reached=False)
    (machine.system / "usr/share/bazel/rules").mkdir(parents=True)
    del machine.environment["NEURON_KERNELGEN_OFFLINE"]
    return machine


def assert_offline(machine: Machine) -> None:
    """Checks that Bazel gets a file with the flags of this checkout's configuration."""
    flag, command = machine.bazel_arguments("build")
    assert command == "build"
    text = Path(flag.removeprefix("--bazelrc=")).read_text()
    assert f'common "--override_module=zlib={machine.project}/tools/bazel/offline/zlib"\n' in text
    assert 'common "--override_module=platforms=/usr/share/bazel/tools/platforms"\n' in text


def test_unreachable_registry_is_remembered_for_an_hour(offline: Machine) -> None:
    for _ in range(2):
        assert_offline(offline)
    assert len(offline.calls("curl")) == 1
    marker = offline.home / ".cache/neuron-kernelgen/registry.unreached"
    os.utime(marker, (time.time() - 3700, time.time() - 3700))
    offline.network(reached=True)
    for _ in range(2):
        assert offline.bazel_arguments("build") == ["build"]
    assert len(offline.calls("curl")) == 2


def test_unwritable_home_is_ignored(offline: Machine) -> None:
    offline.environment["NEURON_KERNELGEN_CACHE"] = "/dev/null/cache"
    assert_offline(offline)
    assert offline.run("build").stderr == ""


@pytest.mark.parametrize(("value", "status"), [("1", 0), ("0", 0), ("yes", 2)])
def test_variable_replaces_the_probe(offline: Machine, value: str, status: int) -> None:
    offline.environment["NEURON_KERNELGEN_OFFLINE"] = value
    completed = offline.run("build")
    assert completed.returncode == status
    if status:
        assert "NEURON_KERNELGEN_OFFLINE is 1 or 0, not 'yes'" in completed.stderr
    elif value == "1":
        assert_offline(offline)
    else:
        assert offline.calls("bazel")[-1] == ["build"]
    assert offline.calls("curl") == []


def test_missing_rulesets_are_reported(offline: Machine) -> None:
    shutil.rmtree(offline.system / "usr")
    completed = offline.run("build")
    assert completed.returncode == 0
    assert "Debian's rulesets are not in /usr/share/bazel" in completed.stderr
    assert offline.calls("bazel")[-1] == ["build"]


def test_checkout_with_autocrlf_runs(tmp_path: Path) -> None:
    for name in (".gitattributes", "bazelw"):
        shutil.copy(ROOT / name, tmp_path)
    for command in ("init -q", "add -A", "checkout-index -f -a --prefix=checkout/"):
        subprocess.run(["git", "-c", "core.autocrlf=true", *command.split()], cwd=tmp_path, check=True)
    assert b"\r" not in (tmp_path / "checkout/bazelw").read_bytes()
