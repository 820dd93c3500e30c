"""Says which packages an interpreter lacks: `python3 -I check_packages.py FILE`.

FILE is a requirements file; of a line `name==version` that very version must be there, of `name>=version` that or a later one. Each
package that is not there is printed with what is there instead. Exit status 1 when one is printed.

Uses the standard library alone, since it asks whether anything else is installed.
"""

import importlib.metadata
import re
import sys
from pathlib import Path

_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)(==|>=)([0-9][^\s;\\]*)", re.MULTILINE)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def main() -> int:
    missing = []
    for name, relation, wanted in _REQUIREMENT.findall(Path(sys.argv[1]).read_text()):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{name}{relation}{wanted} (not installed)")
            continue
        if found != wanted if relation == "==" else numbers(found) < numbers(wanted):
            missing.append(f"{name}{relation}{wanted} ({found} is installed)")
    print("\n".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
