"""The page: what it shows is what the records hold, whoever wrote them."""

from html.parser import HTMLParser

import pytest
import runs

from report import analysis, page, story


class Page(HTMLParser):
    """Ids, attributes, tags, and the cells of every table by its label."""

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
        if tag == "table":
            self.region = self.tables.setdefault(attributes["aria-label"], [])
        if tag == "tr" and self.region is not None:
            self.region.append([])
        self.cell = self.cell or tag in ("td", "th")
        if tag in ("td", "th") and self.region:
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
    html = page.render(made)
    shown = Page(html)
    assert {section for section, _ in page.SECTIONS} <= shown.ids and page.speedup_png(made).startswith(b"\x89PNG")
    header, *categories = shown.tables["Time by kernel category"]
    profiled = {row.step: row for row in made.steps if row.profile}
    times = {row[0]: row[2] for row in shown.tables["All rows"][1:]}
    assert len(categories) == len(profiled) + len(made.peers) == 8
    for row, cells in ((profiled[cells[0]], cells) for cells in categories if cells[0] in profiled):
        cell, ms = dict(zip(header, cells, strict=True)), row.timing.median_ms
        assert times[row.step].partition(" ")[0] == f"{ms:.1f}" and f">{ms:,.1f} ms" in html
        assert cell["sum"] == f"{row.profile.step_ms:,.1f}", "categories and gaps add up to the profiled step"
        assert cell["attention"] == f"{row.profile.categories['attention'].ms:,.1f}"
    a, b = (row.profile.kernels_per_step for row in made.steps[2:4])
    assert ["kernels run", f"{a:,.0f}", f"{b:,.0f}"] in shown.tables["What changed in 3_compile"]


def test_a_card_tells_a_step_in_the_order_in_which_it_is_read():
    html = page.render(runs.recorded())
    card = html[html.index('id="step-2"') : html.index('id="step-3"')]
    places = [
        card.index(part)
        for part in (
            "Step 2: fused attention", "becomes one kernel", "is 1.59x faster than", "of the time saved", "<svg",
            "<del>", "What changed in 2_sdpa", "Kernels:", "fused attention, backward",
            "cudnn_generated_fort_native_sdpa",
        )
    ]  # fmt: skip
    assert places == sorted(places)
    assert "<ins>" in card and "Run:" not in card, "the docstring is no part of a diff"
    facts = Page(html).tables["What changed in 2_sdpa"]
    assert 3 <= len(facts) - 1 <= 6 and all(before != after for _, before, after in facts[1:])


def test_newer_records_show_a_block_what_memory_is_for_and_predictions_and_older_ones_say_what_they_lack():
    html = page.render(runs.predicted())
    assert "fused attention, backward: " in html and "The same without the first step" in html
    assert "% activations" in html and "Dashed: what" in html
    assert f"predicted {1.04 * runs.recorded().steps[4].timing.median_ms:.1f}" in html
    older = page.render(runs.older())
    assert (
        "hold no timeline of a block" in older
        and "do not say what the memory was for" in older
        and "predicted" not in older
    )


def test_rows_without_a_time_keep_their_reason_where_times_are_shown_and_what_is_missing_is_said():
    html = page.render(runs.partial())
    shown = Page(html)
    rows = {cells[0]: cells for cells in shown.tables["All rows"]}
    for row in runs.partial().steps[1:]:
        said = analysis.reason_untimed(row)
        assert html.count(said) >= 2 and rows[row.step][1:3] == [row.status, "-"]
        assert f"{row.step}: why {row.step} has no time" in html
        for name in ("Time by kernel category", "Loss"):
            assert row.step not in {cells[0] for cells in shown.tables[name]}, "no empty series"
    assert "The ceilings of this machine were not measured" in html
    bare = Page(page.render(runs.run(runs.step("0_a", 200.0), runs.step("1_b", 100.0))))
    said = "".join(bare.text)
    assert "No row was profiled" in said and "there is no profile of both steps" in said
    assert ["ms per step", "200.0", "100.0"] in bare.tables["What changed in 1_b"]
    nothing = runs.run(runs.step("0_a", status="failed"), workload=None)
    nothing.environment = None
    assert "workload unknown" in page.render(nothing) and "No step has a time" in page.render(nothing)


def test_runs_of_every_kind_have_their_own_headline():
    only_2, cpu_0 = runs.recorded().steps[2].timing.median_ms, runs.recorded_cpu().steps[0].timing.median_ms
    for make, said in (
        (runs.recorded, "20 times faster; 1.8 times over AMP + SDPA (2_sdpa)"),
        (runs.only, f"One training step from 2_sdpa to 3_compile: {only_2:.1f} ms"),
        (runs.two_gpus, "One training step on 2 GPUs from 3_compile to 4_transformer_engine: "),
        (runs.recorded_cpu, f"One training step from 0_baseline to 3_compile: {cpu_0:.1f} ms"),
        (runs.busy, "machine busy: rows are not comparable (the same copy"),
    ):
        html = page.render(make()).replace("&nbsp;", " ")
        assert said in html.partition("<h1>")[2].partition("</h1>")[0], make.__name__
    two = page.render(runs.two_gpus())
    assert "communication" in two and "vs 3_compile" in two and "baseline" not in two, "its first row is no baseline"
    assert "x faster" not in page.render(runs.busy())
    assert "On a CPU no step is captured" in page.render(runs.recorded_cpu()) and "On a CPU no step" not in two
    left_out = page.render(runs.only())
    assert "Not run: 0_baseline, 1_cublas, 4_transformer_engine." in left_out and left_out.count('class="card"') == 2


def test_what_is_more_than_a_block_is_not_drawn_as_one():
    made = runs.recorded()
    made.steps[1].profile.block.backward[1].category = "optimizer"
    assert story.one_block(made.steps[0])[0] and story.one_block(made.steps[1])[0] is None
    assert "its profile lacks an attention" in "".join(Page(page.render(made)).text)
    assert [row["ms of one block"] for row in story.block_table(made)] == [
        row.step for row in made.steps if row.step != "1_cublas"
    ]


def test_passes_energy_and_heldout_losses_have_tables():
    rows = [runs.repeated("0_a", 200.0, 210.0, 190.0), runs.repeated("1_b", 98.0, 102.0, tokens_per_joule=9.0)]
    rows[1].clock_mhz, rows[1].power_w, rows[1].energy_j_per_step = 1665.0, 698.0, 60.0
    rows[0].heldout_loss, rows[1].heldout_loss = 4.0, 4.1
    shown = Page(page.render(runs.run(*rows, runs.step("2_c")))).tables
    assert [row[2] for row in shown["All rows"][1:]] == ["200.0 (190.0-210.0)", "102.0 (98.0-102.0)", "100.0"]
    assert shown["Energy"][1:] == [["1_b", "1,665", "698.0", "60.0", "9.00"]]
    assert [row[-2:] for row in shown["Loss"][1:]] == [["4.0000", "+0.00%"], ["4.1000", "+2.50%"], ["-", "-"]]


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
    assert ("alert(1)" in said or "a.example" in said) and len(shown.tables["More of all rows"][1]) > 5
