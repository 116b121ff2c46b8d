"""The page: what it shows is what the records hold, whoever wrote them."""

from html.parser import HTMLParser

import pytest
import runs

from report import analysis, page


class Page(HTMLParser):
    """Ids, attributes, tags, and the cells of every table by the label of its region."""

    def __init__(self, html):
        super().__init__()
        self.ids, self.tags, self.attributes, self.tables, self.text = set(), set(), [], {}, []
        self.region = self.cell = None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.attributes += attributes.items()
        self.ids.add(attributes.get("id"))
        if attributes.get("role") == "region":
            self.region = self.tables.setdefault(attributes["aria-label"], [])
        if tag == "tr" and self.region is not None:
            self.region.append([])
        self.cell = tag in ("td", "th")
        if self.cell and self.region:
            self.region[-1].append("")

    def handle_data(self, data):
        self.text.append(data)
        if self.cell and self.region:
            self.region[-1][-1] += data

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")
        if tag == "table":
            self.region = None


def test_figures_are_those_of_the_record():
    made = runs.recorded()
    shown = Page(page.render(made))
    assert {section for section, _ in page.SECTIONS} <= shown.ids and page.speedup_png(made).startswith(b"\x89PNG")
    times = {row[0]: row for row in shown.tables["Time per training step"][1:]}
    header, *categories = shown.tables["Time by kernel category"]
    profiled = {row.step: row for row in made.steps if row.profile}
    for row, cells in ((profiled[cells[0]], cells) for cells in categories if cells[0] in profiled):
        cell, timing = dict(zip(header, cells, strict=True)), row.timing
        assert times[row.step][1:4] == [f"{ms:,.1f}" for ms in (timing.median_ms, timing.p25_ms, timing.p75_ms)]
        assert cell["sum"] == f"{row.profile.step_ms:,.1f}", "categories and gaps add up to the profiled step"
        assert cell["attention"] == f"{row.profile.categories['attention'].ms:,.1f}"
    a, b = (row.profile.kernels_per_step for row in made.steps[3:])
    launched = ["kernels launched (of a CPU: operators)", f"{a:,.0f}", f"{b:,.0f}", f"{b - a:+,.0f}"]
    assert launched in shown.tables["What changed"]


def test_rows_without_a_time_keep_their_reason_in_every_section_and_what_is_missing_is_said():
    html = page.render(runs.partial())
    tables = Page(html).tables
    for row in runs.partial().steps[1:]:
        assert (said := analysis.reason_untimed(row)) == f"{row.status}: why {row.step} has no time"
        assert html.count(said) >= 10
        for region in ("Time per training step", "Peak memory", "Time by kernel category", "Raw times", "Settings"):
            assert said in next(cells for cells in tables[region] if cells[0] == row.step), (region, row.step)
    assert "The ceilings of this machine were not measured" in html and "There is nothing to compare" in html
    bare = Page(page.render(runs.run(runs.step("0_a", 200.0), runs.step("1_b", 100.0))))
    said = "".join(bare.text)
    assert "No row was profiled" in said and "There is no profile of both steps" in said
    assert ["ms per step", "200.0", "100.0", "-100.0"] in bare.tables["What changed"]
    nothing = runs.run(runs.step("0_a", status="failed"), workload=None)
    nothing.environment = None
    assert "workload unknown" in page.render(nothing) and "No step has a time" in page.render(nothing)


@pytest.mark.parametrize("text", runs.HOSTILE.values(), ids=runs.HOSTILE)
def test_nothing_a_record_says_becomes_markup(text):
    html = page.render(runs.hostile(text))
    shown = Page(html)
    assert not {"script", "img", "b", "code"} & shown.tags
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    addresses = [value for name, value in shown.attributes if name in ("href", "src", "xlink:href", "action")]
    assert all(value.startswith(("#", "data:,")) for value in addresses)
    assert all(character.isprintable() or character in "\n\t" for character in html)
    said = "".join(shown.text)
    assert ("alert(1)" in said or "a.example" in said) and len(shown.tables["All rows"][1]) > 10
