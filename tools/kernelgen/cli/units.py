"""Formats amounts for the command line."""

from __future__ import annotations


def binary_size(count: int) -> str:
    """Returns a number of bytes in the largest unit in which it is at least 1: `17 B`, `1.5 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
