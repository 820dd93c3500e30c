"""The levels of the cache: a stored NEFF is not made again; a fault prints one message and costs time, but never fails
a build.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelgen.cache import (
    COMPILED,
    LOCAL,
    SHARED,
    Cache,
    CacheSettings,
    Folder,
    NeffKey,
    Notices,
    entry,
    notices,
)
from kernelgen.cache import shared as stores
from kernelgen.cache.entry import DamagedEntry, pack
from kernelgen.cache.shared import Shared
from kernelgen.errors import KernelgenError

from .conftest import environment, little_memory
from .store import Store

Neffs = list[tuple[NeffKey, bytes]]


class Made(list[str]):
    """Makes NEFFs, and records their names."""

    def __init__(self, neffs: Neffs) -> None:
        super().__init__()
        self.neffs = dict(neffs)

    def get(self, cache: Cache, key: NeffKey) -> tuple[bytes, str]:
        def make() -> bytes:
            self.append(key.name)
            return self.neffs[key]

        return cache.neff(key, "sqr-1", make)


@pytest.fixture
def made(neffs: Neffs) -> Made:
    return Made(neffs)


@pytest.fixture
def said() -> list[str]:
    return []


def opened(said: list[str], **settings: Any) -> Cache:
    return Cache(CacheSettings(**settings), Notices(said.append))


# --- one folder -----------------------------------------------------------------------------------------------------------


def test_what_is_there_is_not_made_again(tmp_path: Path, neffs: Neffs, made: Made, said: list[str]) -> None:
    for expected in (COMPILED, LOCAL):
        for key, neff in neffs:
            assert made.get(opened(said, folder=tmp_path), key) == (neff, expected)
    assert len(made) == len(neffs) and said == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["lock", "tmp", *(f"{key.name}.entry" for key, _ in neffs)]
    )
    assert not any((tmp_path / "tmp").iterdir())
    assert (tmp_path / "lock").stat().st_size == 0


def test_a_failure_is_not_stored(tmp_path: Path, neffs: Neffs, made: Made, said: list[str]) -> None:
    cache = opened(said, folder=tmp_path)

    def fail() -> bytes:
        raise KernelgenError("no")

    for _ in range(2):
        with pytest.raises(KernelgenError):
            cache.neff(neffs[0][0], "k", fail)
    assert not list(tmp_path.glob("*.entry"))
    assert made.get(cache, neffs[0][0])[1] == COMPILED


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif how == "folder":
        path.rename(path.with_name("aside"))
        path.mkdir()
        path.with_name("aside").rename(path / "inside")
    elif how == "link":
        path.unlink()
        path.symlink_to("/dev/zero")
    elif how == "sparse":
        os.truncate(path, 300 << 30)
    elif how == "zeros":
        path.write_bytes(b"")
        os.truncate(path, 300 << 30)
    elif how == "says so":  # as a forger would write it
        first, about, _ = data.split(b"\n", 2)
        head = first + b"\n" + re.sub(rb'"size":\d+', b'"size":%d' % (300 << 30), about) + b"\n"
        path.write_bytes(head)
        os.truncate(path, len(head) + (300 << 30))
    elif how == "other":
        path.write_bytes(next(p for p in path.parent.glob("*.entry") if p != path).read_bytes())
    else:
        path.write_bytes({"empty": b"", "cut": data[:-1], "bit": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]}[how])


@pytest.mark.parametrize(
    "how", ["empty", "cut", "bit", "other", "fifo", "folder", "link", "sparse", "zeros", "says so"]
)
def test_a_damaged_entry_is_removed_and_made_again(
    tmp_path: Path, neffs: Neffs, made: Made, said: list[str], how: str
) -> None:
    for key, _ in neffs:
        made.get(opened(said, folder=tmp_path), key)
    key, neff = neffs[0]
    file = tmp_path / f"{key.name}.entry"
    damage(file, how)
    with little_memory():
        assert made.get(opened(said, folder=tmp_path), key) == (neff, COMPILED)
    assert len(said) == 1 and "damaged" in said[0] and str(tmp_path) in said[0] and key.name in said[0]
    assert file.is_file() and not file.is_symlink()
    assert made.get(opened(said, folder=tmp_path), key) == (neff, LOCAL)
    assert len(said) == 1


def test_a_folder_that_cannot_be_is_done_without_and_said_once(
    tmp_path: Path, neffs: Neffs, made: Made, said: list[str]
) -> None:
    (tmp_path / "file").touch()
    cache = opened(said, folder=tmp_path / "file" / "cache")
    for key, neff in neffs:
        assert made.get(cache, key) == (neff, COMPILED)
    assert said == [f"the cache {tmp_path}/file/cache can't be written, and nothing is added to it: Not a directory"]


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: Path, neffs: Neffs, made: Made, said: list[str]
) -> None:
    (tmp_path / "tmp").mkdir()
    dead, living = (tmp_path / "tmp" / f"{neffs[0][0].name}.{end * 6}" for end in ("de", "11"))
    dead.write_bytes(b"half")
    # The lock counts, not the file's time, which means nothing after a clock was set back.
    os.utime(dead, (2**33, 2**33))
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made.get(opened(said, folder=tmp_path), neffs[0][0])
        assert not dead.exists() and living.exists()
    made.get(opened(said, folder=tmp_path), neffs[1][0])
    assert not living.exists()


def test_only_files_of_our_own_are_removed(tmp_path: Path, neffs: Neffs, made: Made, said: list[str]) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    ours = f"{neffs[0][0].name}.{'de' * 6}"
    for folder in (cache / "tmp", other):
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("somebody's")
    (other / ours).write_text("somebody's, by chance of this name")
    (cache / "tmp" / ours).symlink_to(other / "notes.txt")
    made.get(opened(said, folder=cache), neffs[0][0])
    assert (cache / "tmp" / "notes.txt").exists() and (other / "notes.txt").exists()
    assert said == []


def test_a_planted_link_is_not_followed(tmp_path: Path, neffs: Neffs, made: Made, said: list[str]) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other"
    cache.mkdir()
    other.mkdir()
    ours = other / f"{neffs[0][0].name}.{'de' * 6}"
    ours.write_text("somebody's")
    (cache / "tmp").symlink_to(other)
    (cache / "lock").symlink_to(tmp_path / "locked")
    assert made.get(opened(said, folder=cache), neffs[0][0])[1] == COMPILED
    Folder(cache).sweep()
    assert ours.exists() and list(other.iterdir()) == [ours] and not (tmp_path / "locked").exists()
    assert len(said) == 1 and "it is a link" in said[0]


def test_a_pipe_in_the_place_of_the_lock_does_not_hang(
    tmp_path: Path, neffs: Neffs, made: Made, said: list[str]
) -> None:
    os.mkfifo(tmp_path / "lock")
    assert made.get(opened(said, folder=tmp_path), neffs[0][0])[1] == COMPILED


# --- many processes -------------------------------------------------------------------------------------------------------


WORKER = """
import json, sys, time
from pathlib import Path
from kernelgen.cache import *
root, first = Path(sys.argv[1]), int(sys.argv[2])
keys = [NeffKey.from_json(value) for value in json.loads((root / "keys").read_text())]
for key in keys[first:] + keys[:first]:
    neff = (root / key.name).read_bytes()
    def make():
        with (root / "log").open("a") as file:
            file.write(key.name + "\\n")
        time.sleep(0.05)
        return neff
    assert Cache(CacheSettings(root / "cache"), Notices(sys.exit)).neff(key, "k", make)[0] == neff
"""


def test_many_processes_make_each_neff_once(tmp_path: Path, neffs: Neffs) -> None:
    (tmp_path / "keys").write_text(json.dumps([key.to_json() for key, _ in neffs]))
    for key, neff in neffs:
        (tmp_path / key.name).write_bytes(neff)
    for _ in range(3):
        processes = [
            subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(n % len(neffs))], env=environment())
            for n in range(8)
        ]
        assert [process.wait(60) for process in processes] == [0] * 8
        assert sorted((tmp_path / "log").read_text().split()) == sorted(key.name for key, _ in neffs)
        (tmp_path / "log").unlink()
        for file in (tmp_path / "cache").glob("*.entry"):
            file.unlink()


HOLDER = """
import sys, time
from pathlib import Path
from kernelgen.cache import Folder
with Folder(Path(sys.argv[1])).locked(sys.argv[2], 5):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Returns a function that starts a process which holds an entry's lock and does not make the entry."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), name], env=environment(), stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_waiting_build_goes_on_when_the_other_is_killed(
    tmp_path: Path, neffs: Neffs, made: Made, said: list[str], holder: Callable[[str], subprocess.Popen[str]]
) -> None:
    key, neff = neffs[0]
    process = holder(key.name)
    # The lock does not block other entries.
    assert made.get(opened(said, folder=tmp_path), neffs[1][0])[1] == COMPILED
    answers: list[tuple[bytes, str]] = []
    waiting = threading.Thread(target=lambda: answers.append(made.get(opened(said, folder=tmp_path), key)))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() and answers == []
    process.send_signal(signal.SIGKILL)
    waiting.join(10)
    assert answers == [(neff, COMPILED)] and said == []


def test_a_build_that_waits_too_long_compiles_the_neff_itself(
    tmp_path: Path, neffs: Neffs, holder: Callable[[str], subprocess.Popen[str]], said: list[str]
) -> None:
    key, neff = neffs[0]
    holder(key.name)
    begun = time.monotonic()
    assert opened(said, folder=tmp_path).neff(key, "k", lambda: neff, patience=0.4) == (neff, COMPILED)
    assert 0.4 <= time.monotonic() - begun < 5


# --- two levels -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "http", "memory"])
def shared(request: pytest.FixtureRequest, tmp_path: Path, store: Store) -> str:
    """Returns the place of a shared cache."""
    if request.param == "folder":
        return str(tmp_path / "shared")
    return store.url if request.param == "http" else f"memory://{tmp_path}/neffs"


def test_machines_share_what_one_compiled(
    tmp_path: Path, shared: str, neffs: Neffs, made: Made, said: list[str]
) -> None:
    for machine, expected in (("one", COMPILED), ("two", SHARED), ("two", LOCAL)):
        for key, neff in neffs:
            cache = opened(said, folder=tmp_path / machine, shared=shared)
            assert made.get(cache, key) == (neff, expected)
    # Also without a local folder.
    assert made.get(opened(said, shared=shared), neffs[0][0])[1] == SHARED
    assert len(made) == len(neffs) and said == []


def test_a_machine_that_may_only_read_adds_nothing(
    tmp_path: Path, shared: str, neffs: Neffs, made: Made, said: list[str]
) -> None:
    cache = opened(said, folder=tmp_path / "one", shared=shared, writable=False)
    assert made.get(cache, neffs[0][0])[1] == COMPILED
    assert made.get(opened(said, folder=tmp_path / "two", shared=shared), neffs[0][0])[1] == COMPILED
    assert made.get(opened(said, folder=tmp_path / "three", shared=shared, writable=False), neffs[0][0])[1] == SHARED
    assert said == []


def test_a_damaged_object_is_not_used_and_is_replaced(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str]
) -> None:
    for key, _ in neffs:
        made.get(opened(said, shared=store.url), key)
    whole = dict(store.objects)
    for n, path in enumerate(store.objects):
        data = whole[path]
        store.objects[path] = [b"", data[:-5], data[:300] + b"x" + data[301:], b"<html>log in</html>"][n]
    cache = opened(said, folder=tmp_path, shared=store.url)
    for key, neff in neffs:
        assert made.get(cache, key) == (neff, COMPILED)
    assert store.objects == whole
    assert len(said) == 1 and "damaged" in said[0]


def test_an_answer_that_is_cut_off_is_not_used(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str]
) -> None:
    made.get(opened(said, shared=store.url), neffs[0][0])
    store.cut = 1000
    assert made.get(opened(said, folder=tmp_path, shared=store.url), neffs[0][0]) == (neffs[0][1], COMPILED)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (lambda data: data, "it is longer than the {size} bytes that its header gives"),
        (lambda data: b"", "it does not begin with the header of an entry"),
        (lambda data: data[:70] + b"\n", "it does not begin with the header of an entry"),
        (lambda data: data.partition(b"\n")[0] + b"\n{", "it is cut off"),
    ],
    ids=["entry", "nothing", "head", "line"],
)
def test_what_a_store_sends_without_end_is_not_read(
    tmp_path: Path,
    store: Store,
    neffs: Neffs,
    made: Made,
    said: list[str],
    begin: Callable[[bytes], bytes],
    message: str,
) -> None:
    key, neff = neffs[0]
    made.get(opened(said, shared=store.url), key)
    (path,) = store.objects
    whole = store.objects[path]
    store.objects[path] = begin(whole)
    store.endless = True
    with little_memory():
        assert made.get(opened(said, folder=tmp_path, shared=store.url), key) == (neff, COMPILED)
    assert len(said) == 1 and message.format(size=len(whole)) in said[0] and store.url in said[0], said
    # The bytes that were in transit when reading ended.
    assert store.sent < 64 << 20
    assert store.objects == {path: whole}


def test_what_a_store_says_is_too_long_is_not_read(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str]
) -> None:
    key, neff = neffs[0]
    made.get(opened(said, shared=store.url), key)
    store.promised = 300 << 30
    assert made.get(opened(said, folder=tmp_path, shared=store.url), key) == (neff, COMPILED)
    assert len(said) == 1 and f"it has {300 << 30} bytes, more than any entry" in said[0], said


def test_the_heads_of_endless_objects_are_read_and_no_more(
    store: Store, neffs: Neffs, made: Made, said: list[str]
) -> None:
    key, _ = neffs[0]
    made.get(opened(said, shared=store.url), key)
    store.endless = True
    with little_memory():
        (head,) = Shared(store.url, 30.0).heads([key.name, neffs[1][0].name])
    assert head.key == key and store.sent < 64 << 20


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_other_protocols_are_read_by_the_same_rules(
    tmp_path: Path, neffs: Neffs, made: Made, said: list[str], protocol: str
) -> None:
    url = f"{protocol}://{tmp_path}/store"
    shared = Shared(url, 30.0)
    key, neff = neffs[0]
    data = pack(key, "k", neff)
    assert shared.read(key.name) is None
    shared.write(key.name, data)
    assert shared.read(key.name) == data
    shared.write(key.name, data + bytes(1 << 20))
    with pytest.raises(DamagedEntry, match=r"it is longer than the|bytes, and its header gives"):
        shared.read(key.name)


@pytest.mark.parametrize("status", [400, 401, 403, 500, 503])
def test_a_store_that_answers_errors_is_asked_once(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str], status: int
) -> None:
    store.status = {"GET": status, "PUT": status}
    cache = opened(said, folder=tmp_path, shared=store.url)
    for key, neff in neffs:
        assert made.get(cache, key) == (neff, COMPILED)
    assert len(store.requests) == 1
    assert len(said) == 1 and f"it answered {status}" in said[0] and store.url in said[0]


@pytest.mark.parametrize("status", [403, 405, 507])
def test_a_store_that_takes_nothing_is_still_read(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str], status: int
) -> None:
    made.get(opened(said, shared=store.url), neffs[0][0])
    store.requests.clear()
    store.status = {"PUT": status}
    cache = opened(said, folder=tmp_path, shared=store.url)
    for key, _ in reversed(neffs):
        made.get(cache, key)
    assert made[-1] != neffs[0][0].name
    assert (store.count("PUT"), store.count("GET")) == (1, len(neffs))
    assert len(said) == 1 and "can't be written" in said[0] and str(status) in said[0]


def test_a_store_that_is_not_there_is_reported_once(tmp_path: Path, neffs: Neffs, made: Made, said: list[str]) -> None:
    with Store() as gone:
        url = gone.url.replace("http://", "http://user:secret@")
    begun = time.monotonic()
    cache = opened(said, folder=tmp_path, shared=url)
    for key, neff in neffs:
        assert made.get(cache, key) == (neff, COMPILED)
    assert time.monotonic() - begun < 10
    assert len(said) == 1 and gone.url in said[0] and "Connect" in said[0]
    assert "secret" not in said[0] and "user" not in said[0]


def test_a_slow_store_is_given_up(tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str]) -> None:
    for key, _ in neffs:
        made.get(opened(said, shared=store.url), key)
    store.delay = 30.0
    begun = time.monotonic()
    cache = opened(said, folder=tmp_path, shared=store.url, timeout=1.0)
    for key, neff in neffs:
        assert made.get(cache, key) == (neff, COMPILED)
    assert time.monotonic() - begun < 6
    assert len(said) == 1 and "did not answer in" in said[0]


def test_a_store_that_trickles_is_given_up_before_its_time_limit(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made.get(opened(said, shared=store.url), neffs[0][0])
    monkeypatch.setattr(stores, "SLOW_SECONDS", 0.5)
    store.trickle = 0.05
    begun = time.monotonic()
    assert made.get(opened(said, folder=tmp_path, shared=store.url), neffs[0][0]) == (neffs[0][1], COMPILED)
    assert time.monotonic() - begun < 20
    assert re.search(r"can't be read, and the build goes on without: it sent only \d+ bytes in [0-9.]+ s$", said.pop())


def test_a_build_of_many_processes_says_it_once_and_asks_once(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.status = {"GET": 500}

    def process(build: str) -> Cache:
        return Cache(CacheSettings(tmp_path, store.url), Notices(said.append, tmp_path / "notices", build))

    for key, _ in neffs[:2]:
        made.get(process("1"), key)
    assert (len(said), store.count("GET")) == (1, 1)
    # The next build prints it again, and sends a request again.
    made.get(process("2"), neffs[2][0])
    assert (len(said), store.count("GET")) == (2, 2)
    # A long build retries after a while, but does not print it again.
    monkeypatch.setattr(notices, "RETRY_SECONDS", 0.0)
    made.get(process("2"), neffs[3][0])
    assert (len(said), store.count("GET")) == (2, 3)
    # Files of earlier builds are removed.
    assert all(p.name.startswith("2.") for p in (tmp_path / "notices").iterdir())


# --- settings -------------------------------------------------------------------------------------------------------------


def test_the_folder_is_where_kernelgen_keeps_things_unless_it_is_named() -> None:
    def folder(**env: str) -> Path | None:
        return CacheSettings.make(env=env).folder

    assert folder(HOME="/h", XDG_CACHE_HOME="/x") == Path("/x/neuron-kernelgen/neff")
    assert folder(XDG_CACHE_HOME="/x", NEURON_KERNELGEN_CACHE="/k") == Path("/k/neff")
    assert folder(NEURON_KERNELGEN_CACHE="/k", NEURON_KERNELGEN_NEFF_CACHE="/n") == Path("/n")
    assert folder(NEURON_KERNELGEN_NEFF_CACHE="off") is None
    assert folder() == Path.home() / ".cache/neuron-kernelgen/neff"
    assert CacheSettings.make("/given", env={"NEURON_KERNELGEN_NEFF_CACHE": "/n"}).folder == Path("/given")


def test_the_shared_cache_is_what_the_environment_or_the_user_says(tmp_path: Path) -> None:
    env = {
        "NEURON_KERNELGEN_NEFF_CACHE": "off",
        "NEURON_KERNELGEN_SHARED_CACHE": "/mnt/neffs",
        "NEURON_KERNELGEN_SHARED_CACHE_MODE": "read-only",
        "NEURON_KERNELGEN_SHARED_CACHE_TIMEOUT": "2.5",
    }
    assert CacheSettings.make(env=env) == CacheSettings(None, "/mnt/neffs", False, 2.5)
    assert CacheSettings.make(shared_at=f"file://{tmp_path}", env={}).shared == str(tmp_path)
    assert CacheSettings.make(shared_at="off", env=env).shared is None
    made = CacheSettings.make(env=env)
    words = dict(word.removeprefix("--").split("=", 1) for word in made.arguments())
    names = ("cache", "shared-cache", "shared-cache-mode", "shared-cache-timeout")
    assert CacheSettings.from_arguments(*(words.get(name) for name in names)) == made


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shared_at": "s4://bucket"}, "there is no protocol 's4'"),
        ({"folder": "s3://bucket"}, "the cache of this machine is a folder"),
        ({"shared_at": "/x", "mode": "readonly"}, "did you mean 'read-only'"),
        ({"shared_at": "/x", "env": {"NEURON_KERNELGEN_SHARED_CACHE_TIMEOUT": "soon"}}, "a number of seconds"),
        ({"shared_at": "file://x/y"}, "expected file:///"),
    ],
)
def test_settings_that_make_no_sense_are_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelgenError, match=message):
        CacheSettings.make(**{"env": {}, **values})


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/neffs", "s3fs"), ("gs://bucket", "gcsfs")])
def test_a_package_that_a_url_needs_is_named(url: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(KernelgenError, match=f"the Python package {package} is needed.*\n.*pip install {package}"):
        CacheSettings.make(shared_at=url, env={})


def test_fsspec_is_not_imported_for_a_path(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kernelgen.cache import *\n"
        f"s = CacheSettings.make({str(tmp_path)!r}, {str(tmp_path)!r}); Cache(s, Notices(print))\n"
        "assert not {'fsspec', 'aiohttp', 'asyncio'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


def test_a_folder_lists_its_entries_and_nothing_else(tmp_path: Path, neffs: Neffs) -> None:
    folder = Folder(tmp_path)
    assert list(folder.entries()) == []
    for key, neff in neffs:
        folder.write(key.name, entry.pack(key, "k", neff))
    (tmp_path / "readme.txt").touch()
    assert sorted(stored.name for stored in folder.entries()) == sorted(key.name for key, _ in neffs)
