"""The levels of the cache: a stored NEFF is not made again; a fault prints one message and costs time, but never fails
a build.
"""

from __future__ import annotations

import json
import os
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
    EntryHead,
    Folder,
    NeffKey,
)
from kernelgen.cache.entry import DamagedEntry
from kernelgen.cache.shared import Shared
from kernelgen.errors import KernelgenError

from .conftest import environment
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
    return Cache(CacheSettings(**settings), said.append)


# --- one folder -----------------------------------------------------------------------------------------------------------


def test_what_is_there_is_not_made_again(tmp_path: Path, neffs: Neffs, made: Made, said: list[str]) -> None:
    for expected in (COMPILED, LOCAL):
        for key, neff in neffs:
            assert made.get(opened(said, folder=tmp_path), key) == (neff, expected)
    assert len(made) == len(neffs) and said == []
    files = [f"{key.name}{suffix}" for key, _ in neffs for suffix in (".json", ".neff")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["lock", *files])
    assert [stored.name for stored in Folder(tmp_path).entries()] == sorted(key.name for key, _ in neffs)


def test_a_failure_is_not_stored(tmp_path: Path, neffs: Neffs, made: Made, said: list[str]) -> None:
    cache = opened(said, folder=tmp_path)

    def fail() -> bytes:
        raise KernelgenError("no")

    for _ in range(2):
        with pytest.raises(KernelgenError):
            cache.neff(neffs[0][0], "k", fail)
    assert Folder(tmp_path).entries() == []
    assert made.get(cache, neffs[0][0])[1] == COMPILED


@pytest.mark.parametrize("file", ["json", "neff"])
def test_damaged_entry_is_made_again(tmp_path: Path, neffs: Neffs, made: Made, said: list[str], file: str) -> None:
    key, neff = neffs[0]
    made.get(opened(said, folder=tmp_path), key)
    path = tmp_path / f"{key.name}.{file}"
    path.write_bytes(path.read_bytes()[:-2])
    assert made.get(opened(said, folder=tmp_path), key) == (neff, COMPILED)
    assert len(said) == 1 and "damaged" in said[0] and str(tmp_path) in said[0] and key.name in said[0]
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


def test_sweep_removes_old_files_of_killed_writers(tmp_path: Path, neffs: Neffs) -> None:
    old, new = (tmp_path / f".{neffs[0][0].name}.neff.{n}-ab.tmp" for n in (1, 2))
    for path in (old, new, tmp_path / "notes.tmp"):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    os.utime(tmp_path / "notes.tmp", (1, 1))
    Folder(tmp_path).sweep()
    assert sorted(tmp_path.iterdir()) == [new, tmp_path / "notes.tmp"]


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
    assert Cache(CacheSettings(root / "cache"), sys.exit).neff(key, "k", make)[0] == neff
"""


def test_many_processes_make_each_neff_once(tmp_path: Path, neffs: Neffs) -> None:
    (tmp_path / "keys").write_text(json.dumps([key.to_json() for key, _ in neffs]))
    for key, neff in neffs:
        (tmp_path / key.name).write_bytes(neff)
    for _ in range(2):
        processes = [
            subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), str(n % len(neffs))], env=environment())
            for n in range(8)
        ]
        assert [process.wait(60) for process in processes] == [0] * 8
        assert sorted((tmp_path / "log").read_text().split()) == sorted(key.name for key, _ in neffs)
        (tmp_path / "log").unlink()
        for key, _ in neffs:
            assert Folder(tmp_path / "cache").drop(key.name)


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


def test_damaged_object_is_not_used_and_is_replaced(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str]
) -> None:
    for key, _ in neffs:
        made.get(opened(said, shared=store.url), key)
    objects = dict(store.objects)
    for path, data in objects.items():
        store.objects[path] = data[:-5] if path.endswith(".neff") else b"<html>log in</html>"
    store.objects[f"/neffs/{neffs[0][0].name}.json"] = objects[f"/neffs/{neffs[0][0].name}.json"]
    cache = opened(said, folder=tmp_path, shared=store.url)
    for key, neff in neffs:
        assert made.get(cache, key) == (neff, COMPILED)
    assert store.objects == objects
    assert len(said) == 4 and all("damaged" in text and store.url in text for text in said)


def test_answer_that_is_cut_off_is_not_used(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str]
) -> None:
    made.get(opened(said, shared=store.url), neffs[0][0])
    store.cut = 1000
    assert made.get(opened(said, folder=tmp_path, shared=store.url), neffs[0][0]) == (neffs[0][1], COMPILED)
    assert len(said) == 1


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_other_protocols_are_read_by_the_same_rules(tmp_path: Path, neffs: Neffs, protocol: str) -> None:
    shared = Shared(f"{protocol}://{tmp_path}/store", 30.0)
    key, neff = neffs[0]
    head = EntryHead.make(key, "k", neff)
    assert shared.read(key.name) is None
    shared.write(head, neff)
    assert shared.read(key.name) == (head, neff)
    shared.write(head, neff + bytes(1 << 20))
    with pytest.raises(DamagedEntry, match=r"has more than|does not have the digest"):
        shared.read(key.name)


@pytest.mark.parametrize("status", [403, 503])
def test_a_store_that_answers_errors_is_asked_once(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str], status: int
) -> None:
    store.status = {"GET": status, "PUT": status}
    cache = opened(said, folder=tmp_path, shared=store.url)
    for key, neff in neffs:
        assert made.get(cache, key) == (neff, COMPILED)
    assert len(store.requests) == 1
    assert len(said) == 1 and f"it answered {status}" in said[0] and store.url in said[0]


def test_store_that_accepts_nothing_is_still_read(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str]
) -> None:
    made.get(opened(said, shared=store.url), neffs[0][0])
    store.status = {"PUT": 405}
    cache = opened(said, folder=tmp_path, shared=store.url)
    assert [made.get(cache, key)[1] for key, _ in reversed(neffs)] == [COMPILED] * 3 + [SHARED]
    assert len(said) == 1 and "can't be written" in said[0] and "405" in said[0]


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


def test_processes_of_a_build_ask_a_failing_store_once(
    tmp_path: Path, store: Store, neffs: Neffs, made: Made, said: list[str]
) -> None:
    store.status = {"GET": 500}
    failure = tmp_path / "state/failure"

    def process() -> Cache:
        return Cache(CacheSettings(tmp_path, store.url), said.append, failure)

    for key, _ in neffs[:2]:
        made.get(process(), key)
    # Each gives the same warning, which `kernelgen build` prints once.
    assert (len(said), len(set(said)), len(store.requests)) == (2, 1, 1)
    # A long build asks again after a while.
    os.utime(failure, (1, 1))
    made.get(process(), neffs[2][0])
    assert (len(said), len(set(said)), len(store.requests)) == (3, 1, 2)


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
