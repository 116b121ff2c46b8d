"""The page in a real browser, on a desk and on a phone. Skipped without selenium, chromium and
chromedriver."""

import json
import shutil

import pytest
import runs

from report.load import load

webdriver = pytest.importorskip("selenium.webdriver")
if not (shutil.which("chromium") and shutil.which("chromedriver")):
    pytest.skip("needs chromium and chromedriver", allow_module_level=True)

CLIPPED = """return [...document.querySelectorAll(
    "body, table, td, th, .card, .diff, .bar, p, li, pre, h1, h2, h3")]
  .filter(e => e.checkVisibility() && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
  .map(e => `${e.tagName} ${e.textContent.slice(0, 40)}`)"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.chrome.service.Service(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as driver:
        yield driver


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_clipped_and_no_network_is_asked(browser, tmp_path, width):
    path = tmp_path / "report.html"
    path.write_text(runs.printed(load(runs.ROOT / "docs" / "results" / "h200" / "gpt3-6.7b-slice"))[2])
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get(path.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CLIPPED) == [] and browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
