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

    for gb in (1, 2, 3, 4, 6, 8):
        for cpus in (1, 2, 3, 4, 6, 8):
            assert counted(gb * 1024, cpus) == (gb * 1024, cpus)
    for memory in range(1025, 131072, 977):
        assert memory <= counted(memory, 1)[0] <= max(2048, 1.5 * memory)
    for cpus in range(1, 17):
        assert cpus <= counted(1, cpus)[1] <= 1.5 * cpus
    assert counted(1, 0) == (1024, 1)
    assert counted(614400, 100) == (131072, 16)
