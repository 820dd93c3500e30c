"""Functions of Bazel's rules, without Bazel."""

from __future__ import annotations

from pathlib import Path

from starlark import Packages


def test_a_compile_is_counted_for_what_it_needs_or_a_little_more(tmp_path: Path) -> None:
    module = Packages(tmp_path, {}, lambda *_: None).module("//rules/private/actions:resources.bzl")

    def counted(memory_mb: int, cpus: int) -> tuple[int, int]:
        function = module["resource_set"](memory_mb, cpus)
        # Bazel accepts only a function that its module has under its name.
        assert module[function.__name__] is function
        found = function("linux", 1)
        return found["memory"], found["cpu"]

    memory_steps = tuple(gb * 1024 for gb in (1, 4, 8, 32, 128))
    for memory in (1, 1024, 1025, 4096, 5000, 8193, 40000, 131072):
        for cpus in range(1, 17):
            expected = min(s for s in memory_steps if s >= memory), min(s for s in (1, 4, 16) if s >= cpus)
            assert counted(memory, cpus) == expected
    assert counted(614400, 100) == (131072, 16)
