"""The page in a real browser: nothing fails or overflows, nothing is fetched, the keyboard reaches everything."""

import itertools
import json
import shutil

import pytest
import runs

from report import compare, page

if not (shutil.which("chromedriver") and shutil.which("chromium")):
    pytest.skip("needs chromium and chromium-driver of the distribution", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

VISIBLE = """return [...document.querySelectorAll("a[href], summary, [tabindex='0']")]
               .filter(e => e.checkVisibility()).length"""


OVERFLOWING = """return [...document.querySelectorAll("table, .card, .diff, figure, p, li, pre, h1, h2, h3, h4")]
  .filter(e => e.checkVisibility() && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
  .map(e => `${e.tagName} ${e.getAttribute("aria-label") || e.textContent.slice(0, 40)}`)"""
INK_AND_GROUND = """let e = document.querySelector(arguments[0]), ink = getComputedStyle(e).color;
  while (getComputedStyle(e).backgroundColor === "rgba(0, 0, 0, 0)") e = e.parentElement;
  return [ink, getComputedStyle(e).backgroundColor]"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"))) as driver:
        yield driver


def open_page(browser, html, folder, width, scheme="light"):
    """Show a page, and return the addresses it asked for."""
    (folder / "report.html").write_text(html)
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get_log("performance")
    browser.get((folder / "report.html").as_uri())
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


KINDS = [runs.recorded, runs.predicted, runs.only, runs.partial, runs.recorded_cpu, runs.two_gpus, runs.busy,
         runs.full, runs.hostile]  # fmt: skip
BOTH = compare.page_of(compare.compare(runs.recorded(), runs.predicted(), ("first", "second")))


@pytest.mark.parametrize("make", [*KINDS, None], ids=lambda make: make.__name__ if make else "compare")
def test_the_page_is_whole_quiet_and_alone_and_nothing_overflows_its_box(browser, make, tmp_path):
    html = page.render(make()) if make else BOTH
    assert len(html) < 3e6
    for width, scheme in itertools.product((390, 768, 1440, 1920), ("light", "dark")):
        asked = open_page(browser, html, tmp_path, width, scheme)
        assert sorted(address.partition(":")[0] for address in asked if not address.startswith("data:")) == ["file"]
        assert browser.get_log("browser") == []
        for opened in (False, True):
            browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = arguments[0])", opened)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, "scrolls sideways"
            assert browser.execute_script(OVERFLOWING) == [], (width, opened)
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids)) and (not make or {section for section, _ in page.SECTIONS} <= set(ids))


def test_text_and_its_ground_stand_apart_in_light_and_dark(browser, tmp_path):
    html, grounds = page.render(runs.recorded()), set()
    for scheme in ("light", "dark"):
        open_page(browser, html, tmp_path, 1440, scheme)
        for selector in ("body", ".soft", ".card", ".diff ins", ".diff del", "nav a"):
            ink, ground = browser.execute_script(INK_AND_GROUND, selector)
            grounds.add(ground)
            light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, selector)
    assert len(grounds) == 8, "paper, card, added and removed, each twice"


def luminance(color):
    """Of `rgb(r, g, b)`, as the Web Content Accessibility Guidelines define it."""
    channels = [int(part) / 255 for part in color[4:-1].split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_chart_speaks_and_the_keyboard_reaches_everything(browser, tmp_path):
    open_page(browser, page.render(runs.predicted()), tmp_path, 1440)
    drawn = browser.find_elements(By.TAG_NAME, "svg")
    assert len(drawn) >= 12, "two of time, one a card, two of a block, four of evidence"
    for svg in drawn:
        holder = svg.find_element(By.XPATH, "..")
        assert holder.get_attribute("role") == "img" and len(holder.get_attribute("aria-label")) > 40
        assert svg.size["width"] > 300 and svg.size["height"] > 80
    expected, body, reached = browser.execute_script(VISIBLE), browser.find_element(By.TAG_NAME, "body"), set()
    for _ in range(expected + 5):
        body.send_keys(Keys.TAB)
        reached.add(browser.switch_to.active_element.id)
    assert expected > 15 and len(reached - {body.id}) >= expected
    summary = browser.find_element(By.TAG_NAME, "summary")
    summary.send_keys(Keys.ENTER)
    assert summary.find_element(By.XPATH, "..").get_attribute("open") is not None
