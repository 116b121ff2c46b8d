"""The page, its Markdown and its picture: what they show is what the records hold, whoever wrote the records."""

import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
import runs
from conftest import ROOT

from common import analysis, charts, page, report


class Page(HTMLParser):
    """Ids, attributes, tags, and the cells of every table by the label of its region."""

    def __init__(self, html):
        super().__init__()
        self.ids, self.tags, self.attributes, self.tables, self.text = set(), set(), [], {}, []
        self.region, self.cell = None, False
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


def html_of(made, folder):
    assert report.write_reports(made, folder) == []
    return (folder / "report.html").read_text()


@pytest.mark.parametrize("name", runs.RUNS)
def test_every_section_is_there(name, tmp_path):
    shown = Page(html_of(runs.RUNS[name](), tmp_path))
    assert {section for section, _ in page.SECTIONS} <= shown.ids
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_those_of_the_record(tmp_path):
    made = runs.recorded()
    shown = Page(html_of(made, tmp_path))
    markdown, text = (tmp_path / "report.md").read_text(), "".join(shown.text)
    first, last = (made["steps"][i]["timing"]["median_ms"] for i in (0, 4))
    before_last = made["steps"][3]["timing"]["median_ms"]
    for said in (f"{first / last:.2f}x faster than 0_baseline", f"{before_last / last:.2f}x faster than 3_compile"):
        assert said in text and said in markdown
    times = {row[0]: row for row in shown.tables["Time per training step"][1:]}
    categories = {row[0]: row for row in shown.tables["Time by kernel category"][1:]}
    for step in made["steps"]:
        timing, profile = step["timing"], step["profile"]
        assert times[step["step"]][1:4] == [f"{timing[key]:,.1f}" for key in ("median_ms", "p25_ms", "p75_ms")]
        assert f" {timing['median_ms']:.1f} |" in markdown
        cells = dict(zip(shown.tables["Time by kernel category"][0], categories[step["step"]], strict=True))
        assert cells["sum"] == f"{profile['step_ms']:,.1f}", "categories and gaps add up to the profiled step"
        assert cells["attention"] == f"{profile['categories']['attention']['ms']:,.1f}"
    facts = {row[0]: row[1:] for row in shown.tables["What changed"]}
    launches = [step["profile"]["kernels_per_step"] for step in made["steps"][3:]]
    assert facts["kernels launched (of a CPU: operators)"] == [
        *(f"{n:,.0f}" for n in launches),
        f"{launches[1] - launches[0]:+,.0f}",
    ]


def test_kernels_are_matched_by_name():
    before = runs.step("a", 100.0, profile=runs.profile(100.0, ("old", "kept")))
    after = runs.step("b", 60.0, profile=runs.profile(60.0, ("new", "kept")))
    what = {row["name"]: row["what"] for row in analysis.changed_kernels(before, after)}
    assert what == {"old": "vanished", "new": "appeared", "kept": "shrank"}
    assert analysis.count_changes(before, after) == {"vanished": 1, "appeared": 1, "stayed": 1}
    rows = {row["name"]: row for row in analysis.changed_categories(before, after)}
    assert rows["attention"]["before_ms"] == 50.0 and rows["attention"]["after_ms"] == 30.0


def test_rows_without_a_time_keep_their_reason_in_every_section(tmp_path):
    html = html_of(runs.partial(), tmp_path)
    shown = Page(html)
    for name, status in (("1_b", "oom"), ("2_c", "failed"), ("3_d", "timeout"), ("4_e", "skipped")):
        said = f"{status}: why {name} has no time"
        for region in ("Time per training step", "Peak memory", "Time by kernel category", "Raw times", "Settings"):
            assert said in next(row for row in shown.tables[region] if row[0] == name), (region, name)
        assert html.count(said) >= 10, "charts, tables and sections"
    assert "The roofs of this machine were not measured" in html and "There is nothing to compare" in html


def test_a_missing_profile_is_said_and_the_rest_shown(tmp_path):
    made = runs.run(runs.step("0_a", 200.0), runs.step("1_b", 100.0))
    shown = Page(html_of(made, tmp_path))
    text = "".join(shown.text)
    assert "No row was profiled" in text and "There is no profile of both steps" in text
    assert ["ms per step", "200.0", "100.0", "-100.0"] in shown.tables["What changed"]


def test_nothing_a_record_says_becomes_markup(tmp_path):
    html = html_of(runs.hostile(), tmp_path)
    shown = Page(html)
    assert "script" not in shown.tags and runs.TAG in "".join(shown.text)
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    addresses = [value for name, value in shown.attributes if name in ("href", "src", "xlink:href", "action")]
    assert all(value.startswith(("#", "data:,")) for value in addresses)


def test_mathematics_in_a_name_is_not_set(tmp_path):
    assert "$x^2$" in charts.falling_bars([charts.Bar("$x^2$", 1.0, "$\\frac$")], "ms")


@pytest.mark.parametrize(
    ("environment", "fields", "said"),
    [
        ({}, {}, "3 timed steps, fewer than 30"),
        ({"device_type": "cpu"}, {}, "3 timed steps, fewer than 10"),
        ({"dirty": True}, {}, "uncommitted changes"),
        ({"commit": None}, {}, "commit is unknown"),
        ({}, {"gpu_state": {"throttle_reasons": "0x0000000000000044"}}, "power limit, hardware thermal slowdown"),
    ],
)
def test_broken_rules_are_warned_of(environment, fields, said):
    made = runs.run(runs.step("0_a", **fields), **environment)
    assert any(said in line for line in analysis.warnings(made))


def test_a_wide_spread_is_warned_of_and_a_fair_run_is_not():
    fair = runs.step("0_a")
    fair["timing"]["step_ms"] = [100.0] * 30
    assert analysis.warnings(runs.run(fair)) == []
    fair["timing"] |= {"p25_ms": 98.0, "p75_ms": 101.5}
    assert analysis.warnings(runs.run(fair)) == ["0_a: the middle half of its times spreads over 3.5% of the median"]


def test_the_loss_gap_is_the_largest_one():
    steps = [runs.step("0_a", loss=[4.0, 3.0]), runs.step("1_b", loss=[4.5, 3.1]), runs.step("2_c", loss=[4.0, 2.0])]
    assert "1.0000 nats (2_c, step 1)" in analysis.largest_loss_difference(steps)


def test_a_record_that_is_too_large_is_named_and_left_out(tmp_path):
    runs.write(runs.run(runs.step("0_a")), tmp_path)
    (tmp_path / "results.json").rename(tmp_path / "0_a.json")
    with (tmp_path / "1_b.json").open("wb") as file:
        file.truncate(200_000_000)
    made = report.load_run(tmp_path)
    assert [step["status"] for step in made["steps"]] == ["ok", "failed"]
    assert "1_b.json has 200 MB, more than any record" in html_of(made, tmp_path)


def test_a_long_script_is_not_compared_line_by_line():
    before, after = runs.step("0_a", source="x\n" * 60_000), runs.step("1_b", source="y\n")
    assert analysis.code_diff(before, after) is None


def test_the_command_is_quick_and_its_page_small(tmp_path):
    folder = runs.write(runs.recorded(), tmp_path / "run")
    started = time.monotonic()
    ran = subprocess.run([sys.executable, "-m", "common.report", str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert time.monotonic() - started < 10 and (folder / "report.html").stat().st_size < 3_000_000


def test_without_what_draws_the_table_stands(tmp_path):
    folder = runs.write(runs.cpu(), tmp_path)
    hide = "import sys; sys.modules['matplotlib'] = None; from common import report; report.main()"
    ran = subprocess.run([sys.executable, "-c", hide, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and "no report.html" in ran.stdout and "0_a" in ran.stdout
    assert (folder / "report.md").exists() and not (folder / "report.html").exists()


def test_gaps_that_the_profiler_made_are_not_the_steps():
    slowed = runs.step("0_a", 50.0, profile=runs.profile(48.0) | {"step_ms": 99.0, "gpu_idle_ms": 51.0})
    assert analysis.gaps_ms(slowed) == 2.0 and sum(analysis.category_ms(slowed).values()) == 50.0
    assert any("+98% off the timed median" in line for line in analysis.warnings(runs.run(slowed)))
    true = runs.step("0_a", 100.0, profile=runs.profile(95.0) | {"step_ms": 100.0, "gpu_idle_ms": 5.0})
    assert analysis.gaps_ms(true) == 5.0 and analysis.profile_is_off(true) is None
    faster = runs.step("0_a", 100.0, profile=runs.profile(90.0))
    assert "-10% off the timed median: read its times as shares" in analysis.describe_profile_off(faster)


def test_an_unknown_category_is_other():
    profiled = runs.step("0_a", profile=runs.profile(100.0, categories=("matrix products", "magic")))
    assert analysis.category_ms(profiled) == {"matrix products": 50.0, "other": 50.0, "gaps": 0.0}


def test_fp8_that_follows_no_time_says_so():
    alone = runs.step("4_e", settings={"fp8_recipe": "x"})
    said = analysis.headline(runs.run(runs.step("0_a", status="oom", reason="x"), alone))[-1]
    assert "no step before it has a time" in said


def test_many_raw_times_and_long_kernel_names_stay_small(tmp_path):
    names = [f"kernel<{'very ' * 100}{k}>" for k in range(2000)]
    rows = []
    for name in ("0_a", "1_b"):
        made = runs.step(name, profile=runs.profile(100.0, names, ("other",) * len(names)))
        made["timing"]["step_ms"] = [100.0] * 10_000
        rows.append(made)
    assert len(html_of(runs.run(*rows), tmp_path)) < 1_000_000
