"""A remote-execution cluster on loopback, from packages: BuildGrid, PostgreSQL, buildbox.

The test that uses a server starts and ends it; each listens only on 127.0.0.1 and keeps its files in one scratch
folder. Packages that the machine lacks are unpacked into a scratch folder if possible (Debian's packages; PyPI);
`Missing` names those that are not available.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON_ENV = HERE.parents[1] / "rules" / "private" / "repositories" / "python_env.py"
UNPACK = HERE.parents[1] / "tools" / "debian-unpack"

START_SECONDS = 120
"""How long a server may take to listen."""


class Missing(Exception):
    """Something that the cluster needs is not on this machine and can't be installed."""


# --- requirements
# -----------------------------------------------------------------------------------------------------------


def _program(name: str, *folders: str) -> Path | None:
    for folder in folders:
        for found in sorted(Path("/").glob(folder.lstrip("/")), reverse=True):
            if (found / name).exists():
                return found / name
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
    return Path(found) if found else None


PACKAGES = ("buildbox", "postgresql")
"""Debian's packages of the servers."""


@functools.cache
def _unpacked() -> Path:
    """Unpacks Debian's packages with their dependencies; nothing is installed, and the folder is deleted when this
    process ends.

    Raises:
        Missing: the packages can't be unpacked.
    """
    if not shutil.which("apt-get"):
        raise Missing("only on Debian could packages be unpacked")
    folder = tempfile.mkdtemp(prefix="neuron-kernelgen-debian-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # PostgreSQL does not run as root, and reads its own files.
    Path(folder).chmod(0o755)
    command = [str(UNPACK), "forky", folder, folder, "--has", "python3", *PACKAGES]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise Missing(f"the packages {', '.join(PACKAGES)} can't be unpacked: {done.stdout}")
    return Path(folder)


def _need(name: str, package: str, *folders: str) -> Path:
    found = _program(name, *folders)
    if not found:
        try:
            root = _unpacked()
        except Missing as missing:
            raise Missing(f"{package} is not installed, and {missing}") from None
        places = [f"{root}{folder}" for folder in ("/usr/bin", "/usr/sbin", *folders)]
        found = next(
            (path / name for place in places for path in Path("/").glob(place[1:]) if (path / name).exists()), None
        )
    if not found:
        raise Missing(f"the package {package} brings no {name}")
    return found


def _postgres() -> Path:
    """Returns the folder of PostgreSQL's programs."""
    return _need("initdb", "postgresql", "/usr/lib/postgresql/*/bin").parent


def _buildgrid() -> list[Path]:
    """Returns the command `bgd`, in its own environment in the user's cache folder."""
    done = subprocess.run(
        [sys.executable, str(PYTHON_ENV), "--lock", str(HERE / "requirements.txt")],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Missing(f"BuildGrid can't be installed:\n{done.stderr[-2000:]}")
    programs = Path(json.loads(done.stdout)["path"]) / "bin"
    return [programs / "python", programs / "bgd"]


# --- processes --------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """Returns a free port of 127.0.0.1."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Server:
    """A process in its own session, and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        """Ends the process and all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, with_signal)
        self.process.wait(timeout=30)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def start(name: str, command: Sequence[object], folder: Path, *, user: str | None = None) -> Server:
    """Starts a server that logs into `folder`, as `user` if that is given."""
    log = folder / f"{name}.log"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=user,
            group=pwd.getpwnam(user).pw_gid if user else None,
            extra_groups=[] if user else None,
            cwd=folder,
        )
    return Server(name, process, log)


def wait_for(server: Server, port: int) -> None:
    """Waits until a server listens on the port.

    Raises:
        RuntimeError: the server ended, or took too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"{server.name} ended with status {server.process.returncode}:\n{server.tail()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{server.name} does not listen on port {port}:\n{server.tail()}")


# --- remote execution -------------------------------------------------------------------------------------------------------

_BUILDGRID = """\
server:
  - !channel
    address: "127.0.0.1:{port}"
    insecure-mode: true

authorization:
  method: none

connections:
  - !sql-connection &sql
    connection-string: {database}
    pool-size: 10
    max-overflow: 20

storages:
  - !disk-storage &storage
    path: {folder}/cas

caches:
  - !lru-action-cache &actions
    storage: *storage
    max-cached-refs: 100000
    allow-updates: true
    cache-failed-actions: false

schedulers:
  - !sql-scheduler &scheduler
    sql: *sql
    action-cache: *actions
    storage: *storage
    property-set: !dynamic-property-set
      match-property-keys: [neuron-compiler, neuron-target]
    bot-session-keepalive-timeout: 10
    assigners:
      - !priority-age-assigner
        count: 2
        interval: 0.1

instances:
  - name: ""
    services:
      - !action-cache
        cache: *actions
      - !execution
        scheduler: *scheduler
      - !cas
        storage: *storage
      - !bytestream
        storage: *storage

# Each action that waits for a worker holds a thread, and Bazel lets 100 wait.
thread-pool-size: 300
"""


@dataclass
class Cluster:
    """A BuildGrid with workers.

    Attributes:
        url: the value for `--remote_executor`.
        folder: all files of the cluster.
        server: the scheduler and store.
        workers: by name.
    """

    url: str
    folder: Path
    server: Server
    casd: Server
    workers: dict[str, Server] = field(default_factory=dict)
    casd_port: int = 0

    def worker(self, name: str, properties: Mapping[str, Sequence[str]], *, prefix: Sequence[object] = ()) -> Server:
        """Starts a worker.

        Args:
            name: its name; its log is `<name>.log` in the cluster's folder.
            properties: the values of each execution property that it offers.
            prefix: the beginning of the command, such as `unshare --mount`.
        """
        words = [f"--platform={key}={value}" for key, values in properties.items() for value in values]
        self.workers[name] = start(
            name,
            [
                *prefix,
                _need("buildbox-worker", "buildbox"),
                f"--remote=http://127.0.0.1:{self.casd_port}",
                f"--bots-remote={self.url.replace('grpc:', 'http:')}",
                f"--buildbox-run={_need('buildbox-run-hosttools', 'buildbox')}",
                "--platform=OSFamily=linux",
                *words,
                "--concurrent-jobs=1",
                "--bots-request-timeout=30",
                name,
            ],
            self.folder,
        )
        return self.workers[name]


@contextlib.contextmanager
def _database(folder: Path) -> Iterator[str]:
    """Yields the address of an empty PostgreSQL database."""
    programs = _postgres()
    # PostgreSQL does not run as root.
    user = "nobody" if os.geteuid() == 0 else None
    data = folder / "postgres"
    data.mkdir()
    if user:
        shutil.chown(data, user)
        folder.chmod(0o755)
    port = free_port()
    made = subprocess.run(
        [programs / "initdb", "--auth=trust", "--username=bgd", "--no-sync", "-E", "UTF8", "--locale=C", data / "db"],
        user=user,
        cwd=data,
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(f"initdb failed:\n{made.stdout}{made.stderr}")
    settings = {
        "listen_addresses": "127.0.0.1",
        "port": port,
        "unix_socket_directories": data,
        "fsync": "off",
        "max_connections": 200,
    }
    options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
    (folder / "postgres.log").touch()
    if user:
        shutil.chown(folder / "postgres.log", user)
    server = start("postgres", [programs / "postgres", "-D", data / "db", *options], folder, user=user)
    try:
        wait_for(server, port)
        yield f"postgresql+psycopg2://bgd@127.0.0.1:{port}/postgres"
    finally:
        server.kill(signal.SIGQUIT)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Yields a cluster without workers.

    Raises:
        Missing: the machine lacks a program that can't be installed.
    """
    store = _need("buildbox-casd", "buildbox")
    bgd = _buildgrid()
    with _database(folder) as database, contextlib.ExitStack() as stack:
        # The tables come first: without them the server and the workers die.
        migrated = subprocess.run([*bgd, "migrate", "apply", database], capture_output=True, text=True, check=False)
        if migrated.returncode:
            raise RuntimeError(f"bgd migrate failed:\n{migrated.stdout}{migrated.stderr}")
        port, casd_port = free_port(), free_port()
        (folder / "buildgrid.yml").write_text(_BUILDGRID.format(port=port, database=database, folder=folder))
        server = start("buildgrid", [*bgd, "server", "start", "-v", folder / "buildgrid.yml"], folder)
        stack.callback(server.kill)
        wait_for(server, port)
        remote = f"http://127.0.0.1:{port}"
        casd = start(
            "casd",
            [store, f"--cas-remote={remote}", f"--bind=127.0.0.1:{casd_port}", folder / "casd"],
            folder,
        )
        stack.callback(casd.kill)
        wait_for(casd, casd_port)
        made = Cluster(f"grpc://127.0.0.1:{port}", folder, server, casd, casd_port=casd_port)
        try:
            yield made
        finally:
            for worker in made.workers.values():
                worker.kill()
