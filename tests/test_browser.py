"""The page in a real browser: nothing fails, nothing is fetched, it fits a phone, the keyboard reaches everything."""

import json
import shutil

import pytest
import runs

from report import page

if not (shutil.which("chromedriver") and shutil.which("chromium")):
    pytest.skip("needs chromium and chromium-driver of the distribution", allow_module_level=True)
webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

VISIBLE = """return [...document.querySelectorAll("a[href], summary, [tabindex='0']")]
               .filter(e => e.checkVisibility()).length"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"))) as driver:
        yield driver


def open_page(browser, made, folder, width):
    """Show the page of a run, and return the addresses it asked for."""
    (folder / "report.html").write_text(page.render(made))
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get((folder / "report.html").as_uri())
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("make", [runs.recorded, runs.partial, runs.cpu, runs.hostile])
def test_the_page_is_whole_quiet_and_alone_and_fits_a_phone(browser, make, tmp_path):
    asked = open_page(browser, make(), tmp_path, 390)
    assert sorted(address.partition(":")[0] for address in asked if not address.startswith("data:")) == ["file"]
    assert browser.get_log("browser") == []
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids)) and {section for section, _ in page.SECTIONS} <= set(ids)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, "nothing scrolls sideways"


def test_every_chart_speaks_and_the_keyboard_reaches_everything(browser, tmp_path):
    open_page(browser, runs.recorded(), tmp_path, 1440)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1440
    drawn = browser.find_elements(By.TAG_NAME, "svg")
    assert len(drawn) >= 6, "one of them only where the record has the profiles of two steps"
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
