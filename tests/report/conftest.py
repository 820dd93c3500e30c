"""The machine's Chromium, which the tests run without a window."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

sys.path.insert(0, str(Path(__file__).parent))

QUIET = (
    "--headless=new",
    "--no-sandbox",  # it needs namespaces that a container may not have; the pages are our own
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-sync",
    "--no-first-run",
)


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if not found:
        pytest.skip(f"there is no {name} on PATH: install it (on Debian the package {package})")
    return found


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """The browser; a test can read its log of requests."""
    options = webdriver.ChromeOptions()
    options.binary_location = _program("chromium", "chromium")
    for word in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(_program("chromedriver", "chromium-driver"))
    )
    yield driver
    driver.quit()
