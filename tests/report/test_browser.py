"""The page of `kernelgen report` in a browser: sorting, links, plots, requests, a narrow screen, print, contrast and the keyboard."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from model_calls import call
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from kernelgen import cli
from kernelgen.report.numbers import published
from kernelgen.report.page import page

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report about kernels with added calls of a model, so it has every section and plot."""
    path = tmp_path_factory.mktemp("report") / "basic.html"
    manifest = str(ROOT / "manifests" / "basic.yaml")
    assert cli.run(["report", manifest, "--target", "trn1", "-o", str(path)]) == 0
    numbers = json.loads(path.with_suffix(".json").read_text())
    numbers["calls"] = [call(1024, 1, 10.0)]
    numbers["by_cache"] = [call(n_kv, 1, 8.0 + n_kv / 512) for n_kv in (256, 1024, 4096)]
    numbers["by_cores"] = [call(1024, n, 10.0 / n) for n in (1, 2, 4)]
    for kernel in numbers["kernels"]:
        kernel["per_token"], kernel["per_prompt"] = 2, 1
    numbers["kernels"].append(numbers["kernels"][-1] | {"id": "folded", "per_token": 0, "per_prompt": 0})
    path.write_text(page(numbers, [], "basic.kernels"))
    return path


@pytest.fixture
def opened(browser: webdriver.Chrome, report: Path) -> webdriver.Chrome:
    browser.set_window_size(1280, 900)
    browser.get(report.as_uri())
    return browser


def column(browser: webdriver.Chrome, heading: str) -> list[str]:
    table = browser.find_element(By.CSS_SELECTOR, "table.kernels")
    headings = [one.text for one in table.find_elements(By.TAG_NAME, "th")]
    at = next(i for i, text in enumerate(headings, 1) if text.startswith(heading))
    return [cell.text for cell in table.find_elements(By.CSS_SELECTOR, f"tbody td:nth-child({at})")]


def test_a_click_on_a_heading_sorts_by_its_numbers(opened: webdriver.Chrome) -> None:
    def click(heading: str) -> None:
        next(
            one for one in opened.find_elements(By.CSS_SELECTOR, "table.kernels th button") if one.text == heading
        ).click()

    click("MB moved")
    down = [float(text.replace(",", "")) for text in column(opened, "MB moved")]
    assert down == sorted(down, reverse=True) and len(set(down)) > 3
    click("MB moved")
    assert [float(text.replace(",", "")) for text in column(opened, "MB moved")] == down[::-1]
    click("op")
    names = column(opened, "op")
    assert names == sorted(names, reverse=True)
    (sorted_by,) = opened.find_elements(By.CSS_SELECTOR, "table.kernels th[aria-sort]")
    assert sorted_by.text.startswith("op")


def test_links_lead_to_rows_and_pages_of_kernels(opened: webdriver.Chrome, report: Path) -> None:
    links = [one.get_dom_attribute("href") or "" for one in opened.find_elements(By.CSS_SELECTOR, "svg a")]
    targets = {
        opened.execute_script("return document.getElementById(arguments[0]) !== null", link.removeprefix("#"))
        for link in links
    }
    assert targets == {True}
    dot = opened.find_element(By.CSS_SELECTOR, "svg a")
    opened.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", dot)
    assert "#" in opened.current_url
    opened.find_element(By.CSS_SELECTOR, "table.kernels tbody a").click()
    assert opened.find_element(By.TAG_NAME, "pre").text.startswith("HloModule")
    opened.find_element(By.PARTIAL_LINK_TEXT, "basic.html").click()
    assert opened.current_url.startswith(report.as_uri())


def test_a_link_to_a_row_in_the_fold_opens_it(browser: webdriver.Chrome, report: Path) -> None:
    browser.get(report.as_uri())
    row = browser.find_element(By.ID, "folded")
    assert not row.is_displayed()
    browser.get(f"{report.as_uri()}#folded")
    assert row.is_displayed()


def test_published_figures_link_to_their_sources(opened: webdriver.Chrome) -> None:
    links = [one.get_attribute("href") or "" for one in opened.find_elements(By.CSS_SELECTOR, "table.words td a")]
    assert [link for link in links if link.startswith("https://")] == [
        one["url"] for one in published("trn1") if one["url"]
    ]


def test_plots_are_drawn_and_have_a_text(opened: webdriver.Chrome) -> None:
    plots = opened.find_elements(By.TAG_NAME, "svg")
    assert len(plots) == 4
    for plot in plots:
        assert plot.size["width"] > 100 and plot.size["height"] > 10
        assert len(plot.get_attribute("aria-label") or "") > 20


def test_no_request_leaves_the_page(opened: webdriver.Chrome) -> None:
    opened.get_log("performance")
    opened.refresh()
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked == [opened.current_url.partition("#")[0]]
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_screen_of_400_pixels_shows_the_page_without_scrolling_it_sideways(opened: webdriver.Chrome) -> None:
    metrics = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        opened.refresh()
        assert opened.execute_script("return document.documentElement.scrollWidth") <= 400
        size = opened.execute_script(
            "return parseFloat(getComputedStyle(document.querySelector('table.kernels td')).fontSize)"
        )
        assert size >= 12
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_of_kernels_take_few_lines_beside_all_columns(opened: webdriver.Chrome) -> None:
    heights = [row.size["height"] for row in opened.find_elements(By.CSS_SELECTOR, "table.kernels tbody tr")]
    assert len(heights) == 11 and max(heights) < 100


def test_a_kernels_page_breaks_no_heading_on_a_screen_of_400_pixels(browser: webdriver.Chrome, report: Path) -> None:
    kernel = sorted(report.with_suffix(".kernels").glob("*.html"))[0]
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        browser.get(kernel.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
        heading = next(one for one in browser.find_elements(By.CSS_SELECTOR, "th") if one.text == "computes")
        words = browser.execute_script(
            "const range = document.createRange(); range.selectNodeContents(arguments[0]); return range.getClientRects().length",
            heading,
        )
        assert words == 1  # one line
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_prints(opened: webdriver.Chrome) -> None:
    pdf = base64.b64decode(opened.print_page())
    assert pdf.startswith(b"%PDF-") and 1 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 20


CONTRAST = """
const light = (c) => { const v = c / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (e) => {
  for (; e; e = e.parentElement) { const c = numbers(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
  return [255, 255, 255];
};
return [...document.querySelectorAll('h1, h2, h3, p, th, td, a, button, summary, span')].filter((e) => e.innerText).map((e) => {
  const [a, b] = [luminance(numbers(getComputedStyle(e).color)), luminance(behind(e))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
});
"""
"""The contrast of each text with its background. Source: WCAG 2.1, "relative luminance" and "contrast ratio"."""


def test_texts_have_contrast(opened: webdriver.Chrome) -> None:
    found = opened.execute_script(CONTRAST)
    assert len(found) > 50 and min(found) >= 4.5


def test_the_keyboard_alone_sorts_and_opens(opened: webdriver.Chrome) -> None:
    body = opened.find_element(By.TAG_NAME, "body")
    for _ in range(200):
        body.send_keys(Keys.TAB)
        focused = opened.switch_to.active_element
        if focused.tag_name == "button":
            break
    assert focused.tag_name == "button"
    assert opened.execute_script("return getComputedStyle(arguments[0]).outlineStyle", focused) == "solid"
    focused.send_keys(Keys.ENTER)
    assert len(opened.find_elements(By.CSS_SELECTOR, "table.kernels th[aria-sort]")) == 1
