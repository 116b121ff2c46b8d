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


def test_passes_energy_and_heldout_losses_have_tables():
    rows = [runs.repeated("0_a", 200.0, 210.0, 190.0), runs.repeated("1_b", 98.0, 102.0, tokens_per_joule=9.0)]
    rows[1].clock_mhz, rows[1].power_w, rows[1].energy_j_per_step = 1665.0, 698.0, 60.0
    rows[0].heldout_loss, rows[1].heldout_loss = 4.0, 4.1
    shown = Page(page.render(runs.run(*rows, runs.step("2_c")))).tables
    assert shown["Passes"][1:] == [["0_a", "200.0", "210.0", "190.0"], ["1_b", "98.0", "102.0", "-"]]
    assert shown["Time per training step"][1][1:4] == ["200.0", "190.0", "210.0"]
    assert shown["Energy"][1:] == [["1_b", "1,665", "698.0", "60.0", "9.00"]]
    assert [row[-2:] for row in shown["Loss curves"][1:]] == [["4.0000", "+0.00%"], ["4.1000", "+2.50%"], ["-", "-"]]


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
