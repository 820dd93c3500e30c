"""`bazelw` finds the right Bazel, installs it only where nothing else is left, and passes arguments on as they should be.

Each test runs the script with a PATH of its own that holds fakes; what a fake was called with is in its log.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PINNED = (ROOT / ".bazelversion").read_text().strip()
TOOLS = ("bash", "env", "timeout", "date", "mkdir", "mv", "rm", "grep", "sort", "head", "cat", "chmod", "mktemp")
REGISTRY = "https://bcr.bazel.build/bazel_registry.json"


class Machine:
    """A machine as the script sees it: a checkout, a PATH, a home and some system files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.home = root / "home"
        self.logs = root / "logs"
        self.system = root / "system"
        self.project = root / "project"
        for folder in (self.bin, self.home, self.logs, self.system / "etc", self.project):
            folder.mkdir(parents=True)
        for name in ("bazelw", ".bazelversion"):
            shutil.copy(ROOT / name, self.project / name)
        for tool in TOOLS:
            path = shutil.which(tool)
            assert path, tool
            (self.bin / tool).symlink_to(path)
        self.environment: dict[str, str] = {}
        self.fake("id", "echo 1000")

    def fake(self, name: str, body: str, folder: Path | None = None) -> None:
        """Puts a program on PATH that logs its arguments, one call a line with `|` between them, and then runs `body`."""
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
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def given(self, *args: str) -> list[str]:
        """Runs the script and returns what Bazel was given."""
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


def test_bazelisk_is_not_tried_where_it_can_not_download(machine: Machine) -> None:
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


def test_npx_that_fails_is_said(machine: Machine) -> None:
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
    assert done.stderr == f"bazelw: Bazel {PINNED} is not to be had here; running {version} ({machine.bin}/bazel)\n"
    assert machine.calls("bazel")[-1] == ["build"]


@pytest.mark.parametrize("version", ["4.2.3", "7.3.9", "10.0.0", "no_version"])
def test_other_versions_will_not_do(machine: Machine, version: str) -> None:
    machine.network(reached=False)
    machine.bazel(version)
    assert machine.run("build").returncode == 2
    assert machine.calls("bazel") == [["--version"]]


def test_when_there_is_no_way_each_option_has_a_line(machine: Machine) -> None:
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
    assert options[2] == "  - on Debian, as root: the package bazel-bootstrap of forky (this is not Debian)"


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

MIRROR = "http://mirror.invalid/debian/"


@pytest.fixture
def debian(machine: Machine) -> Machine:
    """A Debian machine, as root, whose apt can install Bazel; `fail` names the apt-get calls that fail the first time."""
    machine.os("debian")
    machine.network(reached=False)
    machine.fake("id", "echo 0")
    for folder in ("sources.list.d", "preferences.d"):
        (machine.system / "etc/apt" / folder).mkdir(parents=True)
    apt_cache(machine, version="4.2.3+ds-11", release="bookworm")
    machine.fake("dpkg", "")
    machine.fake(
        "apt-get",
        f"""
        case "$*" in
          indextargets*) echo {MIRROR}; echo {MIRROR}; exit ;;
          *--download-only*) step=download ;;
          *" -f install"*) step=repair ;;
          *install*) step=install ;;
          *) step=update ;;
        esac
        if [[ -e {machine.root}/fail-$step ]]; then rm {machine.root}/fail-$step; exit 100; fi
        if [[ $step == install ]]; then
          printf '#!/usr/bin/env bash\\nif [[ $1 == --version ]]; then echo "bazel {PINNED}"; else echo "ran $*"; fi\\n' \\
            >{machine.bin}/bazel
          chmod +x {machine.bin}/bazel
        fi
        """,
    )
    return machine


def apt_cache(machine: Machine, version: str, release: str) -> None:
    """What apt knows: one version of the package, and one release; forky too once its suite is configured."""
    list_, _ = suite_files(machine)
    machine.fake(
        "apt-cache",
        f"""
        if [[ $1 == madison ]]; then echo " bazel-bootstrap | {version} | {MIRROR} {release}/main amd64 Packages"; fi
        if [[ $1 == policy ]]; then
          echo "     release v=1,o=Debian,a=some,n={release},l=Debian,c=main,b=amd64"
          if [[ -e {list_} ]]; then echo "     release o=Debian,a=testing,n=forky,l=Debian,c=main,b=amd64"; fi
        fi
        """,
    )


def suite_files(machine: Machine) -> tuple[Path, Path]:
    etc = machine.system / "etc/apt"
    return etc / "sources.list.d/neuron-kernelgen-bazel.list", etc / "preferences.d/neuron-kernelgen-bazel"


def steps(machine: Machine) -> list[str]:
    """What apt-get was asked for, by the words that are no options."""
    found = []
    for call in machine.calls("apt-get"):
        words = [w for w in call if w in ("update", "install", "-f", "--download-only", "indextargets")]
        found.append(" ".join(words))
    return found


def test_debian_installs_from_the_next_release(debian: Machine) -> None:
    done = debian.run("build", "//x")
    assert (done.returncode, done.stdout) == (0, "ran build //x\n"), done.stderr
    assert done.stderr.count("\n") == 1 and "installing Bazel from Debian's next release" in done.stderr
    assert steps(debian) == ["update", "indextargets", "update", "install --download-only", "install"]
    for call in debian.calls("apt-get"):
        if "indextargets" not in call:
            assert {"-y", "Dpkg::Options::=--force-overwrite", "Dpkg::Options::=--force-confold"} <= set(call)
    assert debian.calls("apt-get")[-1][-4:] == ["-t", "forky", "bazel-bootstrap", "binutils"]
    suite, pin = suite_files(debian)
    assert suite.read_text().splitlines()[-1].split("] ")[1] == f"{MIRROR} forky main"
    assert "check-valid-until=no" in suite.read_text()
    assert pin.read_text().splitlines()[1:] == ["Package: *", "Pin: release n=forky", "Pin-Priority: 100"]


@pytest.mark.parametrize(("release", "options"), [("forky", ["-t", "forky"]), ("sid", [])])
def test_debian_that_has_the_version_needs_no_other_suite(debian: Machine, release: str, options: list[str]) -> None:
    apt_cache(debian, version=f"{PINNED}+ds-8", release=release)
    assert debian.run("build").returncode == 0
    assert not any(path.exists() for path in suite_files(debian))
    last = debian.calls("apt-get")[-1]
    assert last[last.index("install") + 1 :] == [*options, "bazel-bootstrap", "binutils"]


def test_debian_downloads_before_it_changes_anything(debian: Machine) -> None:
    (debian.root / "fail-download").touch()
    done = debian.run("build")
    assert done.returncode == 2
    assert "apt-get can not get the packages" in done.stderr
    assert "install" not in steps(debian)
    assert not any(path.exists() for path in suite_files(debian))


def test_debian_repairs_an_install_that_stops_half_way(debian: Machine) -> None:
    (debian.root / "fail-install").touch()
    assert debian.run("build").returncode == 0
    assert steps(debian)[-3:] == ["install", "-f install", "install"]
    assert debian.calls("dpkg") == [["--force-overwrite", "--force-confold", "--configure", "-a"]]


def test_debian_without_root_says_so(debian: Machine) -> None:
    debian.fake("id", "echo 1000")
    done = debian.run("build")
    assert done.returncode == 2
    assert "run ./bazelw once as root" in done.stderr
    assert debian.calls("apt-get") == []


def test_debian_install_can_be_forbidden(debian: Machine) -> None:
    debian.environment["NEURON_KERNELGEN_INSTALL"] = "0"
    done = debian.run("build")
    assert done.returncode == 2
    assert "NEURON_KERNELGEN_INSTALL=0 forbids it" in done.stderr
    assert debian.calls("apt-get") == []


def test_debian_does_not_replace_system_libraries_where_a_bazel_will_do(debian: Machine) -> None:
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


def test_a_home_that_can_not_be_written_is_done_without(offline: Machine) -> None:
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


def test_offline_without_the_packaged_rules_is_said(offline: Machine) -> None:
    shutil.rmtree(offline.system / "usr")
    done = offline.run("build")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "is not reached, and /usr/share/bazel" in done.stderr
    assert offline.calls("bazel")[-1] == ["build"]
