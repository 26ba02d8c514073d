"""The HTML report in headless Chromium, opened from a file: it draws, answers to mouse and keys, and asks for nothing.

`make browser` installs what is needed. Without it these tests are skipped, unless REMAT_KIT_REQUIRE_BROWSER is 1.
"""

import base64
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from html_samples import gpt2, large
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from test_html import EVIL, ODD, changed, explanation_of

from remat_kit._diff import diff
from remat_kit._record import Record
from remat_kit._report import html
from remat_kit._units import format_bytes

# What a browser does with a page does not depend on the version of JAX: once is enough.
pytestmark = pytest.mark.slow

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_SIZES = [(1440, 900), (1280, 720)]

FULL, NONE = gpt2(), gpt2(policy="none")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One browser for all tests of the file."""
    if not CHROMIUM or not DRIVER:
        reason = "chromium and chromedriver are not installed: run `make browser`"
        if os.environ.get("REMAT_KIT_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With the path given, selenium looks for no driver to download.
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    # Away from the new tab, which loads much.
    driver.get("about:blank")
    yield driver
    driver.quit()


class Opened:
    """A report that is open in the browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def __call__(self, identifier: str) -> WebElement:
        return self.driver.find_element(By.ID, identifier)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements at once: one call a report, not one an element."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
        return self.driver.execute_script(script, selector)

    def script(self, body: str, *values: object) -> Any:
        return self.driver.execute_script(body, *values)

    def until(self, wanted: Callable[[], Any], what: str = "") -> Any:
        """The first true value of `wanted`; charts are drawn a frame later."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if value := wanted():
                return value
            time.sleep(0.02)
        raise AssertionError(f"did not happen: {what or wanted}")

    def point(self, identifier: str, x: float, y: float) -> None:
        """Moves the mouse to a place in an element, in parts of its width and height."""
        element = self(identifier)
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        size = element.size
        away = (round((x - 0.5) * size["width"]), round((y - 0.5) * size["height"]))
        ActionChains(self.driver, duration=0).move_to_element_with_offset(element, *away).perform()

    def complaints(self) -> list[str]:
        """What the console says since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def requests(self) -> list[str]:
        """Every address that was asked for since the last call."""
        found = []
        for entry in self.driver.get_log("performance"):  # type: ignore[no-untyped-call]
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found


@pytest.fixture
def open_report(browser: webdriver.Chrome, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens the report of a record from a file. Afterwards: nothing in the console, no request but for the file."""
    opened = Opened(browser)
    opened.complaints()
    opened.requests()
    addresses = []

    def open_it(
        record: Record, before: Record | None = None, size: tuple[int, int] = _SIZES[0], dark: bool = False
    ) -> Opened:
        path = tmp_path / f"report{len(addresses)}.html"
        path.write_text(html.render(record, diff(before, record) if before else None, before), encoding="utf-8")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        addresses.append(path.as_uri())
        browser.get(addresses[-1])
        return opened

    yield open_it
    assert opened.complaints() == []
    # The icon is an empty data address.
    assert [address for address in opened.requests() if address != "data:,"] == addresses
    assert opened.script("return performance.getEntriesByType('resource').length") == 0


def no_overflow(page: Opened) -> bool:
    return page.script("return document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("size", _SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("record", [(FULL, None), (FULL, NONE), (large(), None)], ids=["one", "two", "large"])
def test_it_draws_and_fits_the_window(
    open_report: Callable[..., Opened], record: tuple[Record, Record | None], size: tuple[int, int]
) -> None:
    page = open_report(*record, size=size)
    assert no_overflow(page)
    for chart in ("timeline-chart", "module-chart"):
        page.until(lambda chart=chart: len(page.all(f"#{chart} svg path")) > 10, chart)
        box = page.script(
            "const box = arguments[0].getBoundingClientRect(); return [box.width, box.height]", page(chart)
        )
        assert box[0] > size[0] / 2
    assert any("live peak" in each for each in page.texts("#timeline-chart svg text"))


def test_pointing_at_a_moment_names_it_and_its_largest_buffers(open_report: Callable[..., Opened]) -> None:
    page = open_report(FULL)
    peak = explanation_of(FULL).peak
    assert FULL.live_peak_bytes
    assert page.texts("#moment h3") == [f"The live peakevent {peak.event}"]
    assert page.texts("#moment .value") == [format_bytes(FULL.live_peak_bytes)]
    at_peak = [each for each in explanation_of(FULL).buffers if each.born <= peak.event < each.dies]
    assert page.texts("#moment-buffers code") == [each.name for each in at_peak[:8]]

    page.point("timeline-chart", 0.6, 0.4)
    page.until(lambda: page.texts("#moment h3")[0].startswith("Momentevent"), "the moment changes")
    event = int(page.texts("#moment h3 .hint")[0].removeprefix("event ").replace(",", ""))
    alive = [each for each in explanation_of(FULL).buffers if each.born <= event < each.dies]
    assert page.texts("#moment-buffers code") == [each.name for each in alive[:8]]
    assert page.texts("#moment .value") == [format_bytes(sum(each.bytes for each in alive))]
    line = explanation_of(FULL).timeline
    assert line
    place = line.events.index(event)
    assert page.texts("#moment dd") == [line.phases[place], line.modules[place], line.instructions[place]]
    tooltip = page.until(lambda: [each for each in page.texts("#timeline-chart > div") if "GiB in" in each], "tooltip")
    assert line.phases[place] in tooltip[0]

    # A click keeps the moment; the mouse elsewhere returns to it.
    ActionChains(page.driver).click().perform()
    page.until(lambda: page.texts("#moment h3")[0].startswith("Moment kept"), "the moment is kept")
    page.point("timeline-chart", 0.3, 0.4)
    page.point("buffer-table", 0.5, 0.5)
    page.until(lambda: page.texts("#moment h3") == [f"Moment keptevent {event}"], "back to the moment kept")


def test_the_time_line_answers_to_the_keyboard_and_zooms(open_report: Callable[..., Opened]) -> None:
    page = open_report(FULL)
    chart, peak = page("timeline-chart"), explanation_of(FULL).peak.event
    assert chart.get_attribute("tabindex") == "0"
    chart.send_keys(Keys.ARROW_RIGHT)
    page.until(lambda: page.texts("#moment h3") == [f"Moment keptevent {peak + 1}"], "one event on")
    chart.send_keys(Keys.HOME)
    page.until(lambda: page.texts("#moment h3") == ["Moment keptevent 0"], "the first event")
    chart.send_keys("p")
    page.until(lambda: page.texts("#moment h3") == [f"The live peakevent {peak}"], "the peak")
    whole = page.texts("#timeline-chart svg text")
    page("zoom-peak").send_keys(Keys.ENTER)
    page.until(lambda: page.texts("#timeline-chart svg text") != whole, "zoomed")
    page("zoom-all").send_keys(Keys.ENTER)
    page.until(lambda: page.texts("#timeline-chart svg text") == whole, "whole again")


def test_a_category_can_be_hidden(open_report: Callable[..., Opened]) -> None:
    page = open_report(FULL)
    button = page.all("#legend button")[0]
    fills = "return document.querySelectorAll(`#timeline-chart path[fill='#6b8ff6']`)[0].getAttribute('d')"
    before = page.until(lambda: page.script(fills), "drawn")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    page.until(lambda: page.script(fills) != before, "drawn without it")


def test_search_narrows_and_a_click_sorts(open_report: Callable[..., Opened]) -> None:
    page = open_report(FULL)
    total = len([each for each in explanation_of(FULL).buffers if each.born <= 183 < each.dies])
    assert page.texts("#count")[0].startswith(f"30 of {total} shown · ")
    assert len(page.all("#buffer-table tbody tr")) == 30
    assert [each.get_attribute("aria-sort") for each in page.all("#buffer-table th.c-bytes")] == ["descending"]
    page("search").send_keys("LM_HEAD softmax")
    assert page.texts("#buffer-table td.c-name") == ["softmax_fusion.13"]
    assert page.texts("#count") == ["1 shown · 392.63 MiB in all"]
    page("search").send_keys(" nowhere")
    assert page.texts("#buffer-table tbody td") == ["Nothing matches the search."]
    page("search").clear()
    page("search").send_keys("gpt")
    page.all("#buffer-table th.c-name button")[0].send_keys(Keys.ENTER)
    names = page.texts("#buffer-table td.c-name")
    assert names[:3] == ["add_fusion.1", "add_fusion.2", "add_fusion.3"]  # by number, not add_fusion.10
    assert page.script("return document.activeElement.closest('th').className") == "c-name"
    page.all("#buffer-table th.c-name button")[0].send_keys(Keys.ENTER)
    assert page.texts("#buffer-table td.c-name") != names
    page.all("#scope input")[1].click()
    elsewhere = [each for each in explanation_of(FULL).buffers if "Gpt" not in each.module]
    assert len(elsewhere) == 2  # the batch, and what is not attributed
    assert f"of {len(explanation_of(FULL).buffers) - 2} shown" in page.texts("#count")[0]
    page.all("#scope input")[2].click()
    assert "buffers" in page.texts("#buffer-table th")
    assert not page("more").is_displayed()


def test_three_thousand_buffers_can_be_shown(open_report: Callable[..., Opened]) -> None:
    page = open_report(large())
    page.all("#scope input")[1].click()
    assert page.texts("#count")[0].startswith("30 of 3,000 shown")
    page.script("for (let i = 0; i < 6; i++) document.getElementById('more').click()")
    assert page.texts("#count")[0].startswith("3,000 shown")
    assert page.script("return document.querySelectorAll('#buffer-table tbody tr').length") == 3000
    assert not page("more").is_displayed()


def test_the_map_of_modules_drills_down(open_report: Callable[..., Opened]) -> None:
    page = open_report(FULL)
    tiles = "#module-chart svg text"
    page.until(lambda: "Block_*  1.02 GiB" in page.texts(tiles), "drawn")
    assert page.texts("#module-list .name") == ["Block_*", "lm_head", "Embed_0"]
    page.point("module-chart", 0.1, 0.5)
    ActionChains(page.driver).click().perform()
    page.until(lambda: "Mlp_0  648.00 MiB" in page.texts(tiles), "opened")
    assert page.texts("#module-path > *")[-1].startswith("Block_*")
    page.all("#module-list button")[0].send_keys(Keys.ENTER)
    page.until(lambda: page.texts("#module-path > *")[-1].startswith("Mlp_0"), "opened with the keyboard")
    assert page.texts("#module-list .name") == ["Dense_down", "Dense_up"]
    page.all("#module-path button")[0].click()
    page.until(lambda: "Gpt  2.30 GiB" in page.texts(tiles), "back at all")
    page("merge").click()
    page.until(lambda: "Block_11" in page.texts("#module-list .name"), "every block by itself")


def test_dark_follows_the_system(open_report: Callable[..., Opened]) -> None:
    colours = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    label = "return document.querySelector('#timeline-chart svg text').getAttribute('fill')"
    seen = {}
    for dark in (False, True):
        page = open_report(FULL, dark=dark)
        seen[dark] = [*page.script(colours), page.until(lambda page=page: page.script(label), "drawn")]
    assert seen[False][0] == "rgb(255, 255, 255)"
    assert seen[True][0] == "rgb(21, 24, 28)"
    assert seen[False][2] != seen[True][2]
    # It follows while it is open, and is light on paper.
    light = [{"name": "prefers-color-scheme", "value": "light"}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": light})
    page.until(lambda: page.script(label) == seen[False][2], "drawn again")
    printed = page.driver.execute_cdp_cmd("Page.printToPDF", {})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")


def test_two_records_show_what_changed(open_report: Callable[..., Opened]) -> None:
    page = open_report(FULL, NONE)
    assert page("changes").is_displayed()
    assert "−2.04 GiB" in page("changes").text
    assert page.texts("#legend .before") == ["before, stretched"]
    page.until(lambda: page.all("#timeline-chart path[stroke-dasharray]"), "the line of before")


def test_odd_records_open(open_report: Callable[..., Opened]) -> None:
    for record in ODD.values():
        assert no_overflow(open_report(record))


def test_text_of_a_program_stays_text(open_report: Callable[..., Opened]) -> None:
    text = EVIL.replace("\ud800", "")  # half a surrogate pair cannot be asked for
    rows = tuple(dataclasses.replace(each, name=text, module=text, shape=text) for each in explanation_of(FULL).buffers)
    page = open_report(changed(FULL, buffers=rows))
    page.point("timeline-chart", 0.6, 0.4)
    page.point("module-chart", 0.2, 0.5)
    page.until(lambda: page.texts("#moment-buffers code") == [text] * 8, "drawn")
    assert "onerror" in "".join(page.texts("#module-path"))
    assert page.all("img") == []
    assert no_overflow(page)
