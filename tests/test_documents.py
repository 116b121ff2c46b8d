"""Generated tables: each figure of README, docs/performance.md, report.md and report.html is one figure."""

import re
from dataclasses import replace
from statistics import fmean
from xml.etree import ElementTree

import pytest
import runs
from conftest import ROOT, STEPS
from test_page import Page

from report import documents, page, parity, parity_page, readme, steps, story, table
from report.glossary import unlinked
from report.load import read_run
from report.records import GPU
from report.sentences import headline
from report.sweep import SWEEP, by_shape, ratio, read_cells

RESULTS = ROOT / "docs" / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("h200/*/results.json"))


def tables_of(markdown):
    """Rows of every table of a Markdown text, as dicts by column name; the key of a row is its first cell."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n?)+", markdown, re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        tables.append({row[0].removeprefix("peer: "): dict(zip(header, row, strict=True)) for row in rows})
    return tables


def number(cell):
    found = re.match(r"-?[\d,]+\.?\d*", cell)
    return float(found[0].replace(",", "")) if found else None


def page_tables(run):
    """Rows of the page's tables by its name; the two of all rows as one."""
    shown, named = Page(page.render(run)).tables, {}
    for name, (header, *rows) in ((name, rows) for name, rows in shown.items() if rows):
        named[name] = {row[0].removeprefix("peer: "): dict(zip(header, row, strict=False)) for row in rows}
    more = named["More of all rows"]
    return named | {"All rows": {step: row | more[step] for step, row in named["All rows"].items()}}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_performance_shows_the_figures_of_the_page_and_its_short_form(folder):
    run = read_run(folder / "results.json")
    shown = page_tables(run)
    for step, row in tables_of(table.render_markdown(run))[0].items():
        short = {name: cell for name, cell in row.items() if name != "step"}
        assert short.items() <= shown["All rows"][step].items() and len(row) >= 5
    text = unlinked((ROOT / "docs" / "performance.md").read_text())
    whole = tables_of(text)[0]
    part, *_ = re.findall(rf"^### {folder.name}, batch.*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    categories, limits = tables_of(part)[:2]
    for step, row in shown["All rows"].items():
        (cell,) = (cell for name, cell in whole[step].items() if name.startswith(f"{folder.name}, "))
        assert number(cell) == number(row["ms/step"])
        if ", " in cell:  # over the first row of all, with one digit: the table of the report has two
            assert abs(number(cell.partition(", ")[2]) - number(row["vs baseline"])) < 0.0551
        if step not in categories:
            continue  # a row without a profile
        assert number(categories[step]["timed"]) == number(row["ms/step"])
        names = {"TFLOP/s", "peak GiB", "of roof", "most time in"} & set(row)
        assert all(limits[step][name] == row[name] for name in names)
        for name in set(categories[step]) - {"ms per step", "timed"}:
            cells = shown["Time by kernel category"][step]
            assert number(categories[step][name]) == number(cells[name]), (step, name)
        if step in shown.get("Roofline", {}):
            assert all(shown["Roofline"][step][name] == row[name] for name in ("TFLOP/s", "of roof"))


def test_readme_shows_the_figures_of_its_run():
    rows = page_tables(read_run(RESULTS / documents.SHOWN / "results.json"))["All rows"]
    readme = next(table for table in tables_of(unlinked((ROOT / "README.md").read_text())) if "0_baseline" in table)
    for step, cells in readme.items():
        assert number(cells["ms per step"]) == number(rows[step]["ms/step"])
        assert abs(number(cells["times faster than 0_baseline"]) - number(rows[step]["vs baseline"])) < 0.0551
        plain = number(rows[step]["vs 2_sdpa"])
        shown = number(cells["times faster than 2_sdpa"])
        assert (shown is None and plain < 1) or abs(shown - plain) < 0.0551
        assert all(cells[name] == rows[step][name] for name in ("TFLOP/s", "peak GiB"))


@pytest.mark.parametrize("make", [runs.recorded, runs.older, runs.partial, runs.cpu])
def test_the_story_in_markdown_has_a_section_and_a_diff_a_step_and_pictures_that_are_files(make):
    run = make()
    text, pictures = steps.steps_page(run, "x", ["0_baseline moves 4 GB"], {"1_cublas": "a table of parts"})
    assert table.markdown(headline(run)) in text and "None" not in text
    assert ("a table of parts" in text) == any(card.name == "1_cublas" for card in story.cards(run))
    assert {name.removeprefix("steps/") for name in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)} == set(pictures)
    for picture in pictures.values():
        assert ElementTree.fromstring(picture.decode()).tag.endswith("svg") and b"prefers-color-scheme" in picture
    for card in story.cards(run):
        assert f"## {table.markdown(card.title)}\n" in text
    assert text.count("```diff") == sum(bool(card.code) for card in story.cards(run))
    assert ("block-1.svg" in pictures) == (make is runs.recorded) == ("## One transformer block" in text)


def test_what_readme_says_of_the_long_runs_is_what_they_show():
    text = unlinked((ROOT / "README.md").read_text())
    assert "No row's loss on held-out text differs from that of step 0 by more than chance explains." in text
    for _, study in parity_page.recorded_studies(RESULTS):
        assert parity.reference(study) == "0_baseline" and not parity.missing(study)
        rows = {row: parity.by_seed(study, row, parity.heldout_loss) for row in parity.rows(study)}
        assert {parity.verdict(losses, rows["0_baseline"]) for losses in rows.values()} == {parity.ALIKE}
    (_, study), (_, of_cpu) = parity_page.recorded_studies(RESULTS)
    assert set(STEPS) <= set(parity.rows(study)) and set(STEPS) & set(parity.rows(of_cpu)) == {
        STEPS[k] for k in (0, 2, 3)
    }
    step_0, step_4, dead = (
        parity.by_seed(study, row, parity.heldout_loss) for row in (STEPS[0], STEPS[4], "dead MLP, step 4")
    )
    low, high = parity.interval(step_4, step_0)
    assert f"may lie anywhere from {-low:.2f} nats below to {high:.2f} above." in text
    least, most = parity.interval(dead, step_4)
    assert f"was made to do nothing: that costs {least:.2f} to {most:.2f} nats, and the comparison sees it." in text
    first = [parity.by_seed(study, row, parity.first_losses) for row in (STEPS[4], STEPS[0])]
    assert parity.verdict(*first) == parity.DIFFERENT
    early = parity.difference(*first)
    assert f"step 4 lies {early:.3f} above step 0, which is more than chance explains." in text
    of = parity.measures(study).values()
    assert {parity.fault_verdict(study, "dead MLP, step 4", measure) for measure in of} == {parity.DIFFERENT}
    assert "Both measures see it there as well." in unlinked((ROOT / "docs" / "parity.md").read_text())


def test_the_sweep_of_the_gpu_has_the_shapes_that_readme_names():
    cells = read_cells(RESULTS / "h200" / SWEEP)
    widths = {cell.n_embd for cell in cells}
    said = f"{len(by_shape(cells))} shapes from {min(widths)} to {max(widths)} channels, two layers, each trained once."
    assert {cell.n_layer for cell in cells} == {2}
    readme = unlinked((ROOT / "README.md").read_text())
    assert said in readme and all(cell.is_timed for cell in cells)
    smallest = min(by_shape(cells).values(), key=lambda shape: (shape["0_baseline"].n_embd, shape["0_baseline"].column))
    assert smallest["1_cublas"].host_bound and ratio(smallest, "0_baseline", "1_cublas") < 1
    assert "At the smallest shape, where the host is the limit, it lost." in readme


def test_the_first_losses_set_steps_1_and_4_apart_as_the_page_says():
    (_, study), _ = parity_page.recorded_studies(RESULTS)
    rows = {row: parity.by_seed(study, row, parity.first_losses) for row in STEPS}
    apart = {row for row, losses in rows.items() if parity.verdict(losses, rows[STEPS[0]]) == parity.DIFFERENT}
    assert apart == {STEPS[1], STEPS[4]}
    text = unlinked((ROOT / "docs" / "parity.md").read_text())
    assert "Step 1 crosses the limit by a hair, with a much smaller difference below step 0." in text
    assert "Steps 1 and 2 both lie below step 0 by less than a tenth of a per mille." in text
    step_1, step_2 = (parity.difference(rows[row], rows[STEPS[0]]) for row in STEPS[1:3])
    assert -1e-4 < step_1 / parity.mean(rows[STEPS[0]]) < step_2 / parity.mean(rows[STEPS[0]]) < 0
    assert parity.interval(rows[STEPS[1]], rows[STEPS[0]])[1] > step_1 / 4, "by a hair"
    assert parity.difference(rows[STEPS[4]], rows[STEPS[0]]) > -30 * step_1, "much smaller"


def test_the_windows_of_the_first_losses_are_those_that_the_page_names():
    (_, study), _ = parity_page.recorded_studies(RESULTS)

    def different(row, other):
        """The windows, in steps, in which the first losses of two rows are different."""
        pairs = {n: [parity.by_seed(study, one, lambda run, n=n: fmean(run.loss[:n])) for one in (row, other)]
                 for n in range(5, 121, 5)}  # fmt: skip
        return [n for n, losses in pairs.items() if parity.verdict(*losses) == parity.DIFFERENT]

    assert different("attention without its scale", "2_sdpa") == [*range(15, 86, 5)]
    assert different("dead MLP", "2_sdpa") == [*range(40, 76, 5)]
    assert different("4_transformer_engine", "0_baseline") == [*range(15, 51, 5)]
    assert different("2_sdpa", "0_baseline") == [45] and different("1_cublas", "0_baseline") == [45, 50]
    said = "missing scale with 15 to 85 steps, and the dead MLP with 40 to 75. They call step 4 different with 15 to 50"
    said += " steps, so 50 is the longest of these windows that does"
    assert f"{said}, and even step 2 with 45." in unlinked((ROOT / "docs" / "parity.md").read_text())


def test_the_pictures_of_the_story_are_those_of_its_record():
    drawn = {path.name: path.read_bytes() for path in (ROOT / "docs" / steps.FOLDER).iterdir()}
    assert drawn == documents.shown_steps(RESULTS)[1], "stale: python -m report.documents"


def test_a_row_without_a_time_keeps_its_status_and_others_their_speedup(tmp_path):
    off = runs.profile(98.0 * 3, step_ms=450.0, gpu_idle_ms=156.0)
    rows = [runs.step("0_baseline", 300.0, profile=off, note="AMP is off"), runs.step("1_x", status="timeout")]
    rows.append(runs.step("2_sdpa", 100.0))
    runs.write(runs.run(*rows, roofs=runs.ROOFS), tmp_path / "docs" / "results" / documents.SHOWN)
    readme = tables_of(documents.readme_table(tmp_path / "docs" / "results"))[0]
    assert readme["1_x"]["ms per step"] == "timeout" and readme["2_sdpa"]["times faster than 0_baseline"] == "3.0"
    said = documents.performance_tables(tmp_path / "docs" / "results")
    assert (
        "- 0_baseline: AMP is off\n" in said and said.count("The profiled step was 50% longer than the timed one.") == 1
    )
    whole = tables_of(said)[0]
    assert [list(row.values())[1] for row in whole.values()] == ["300.0, 1.0x", "timeout", "100.0, 3.0x"]


def test_gains_stand_by_width_and_a_step_without_a_time_says_how_it_ended(tmp_path):
    results = tmp_path / "docs" / "results"
    steps = [runs.step(name, ms) for name, ms in (("0_a", 300.0), ("1_b", 100.0), ("2_c", 50.0), ("3_d", 100.0))]
    skipped = runs.step("4_e", status="skipped", reason="no FP8")
    for name, width, rows in (("wide", 512, [*steps, skipped]), ("narrow", 64, steps), ("short", 128, steps[:3])):
        runs.write(runs.run(*rows, workload=replace(runs.WORKLOAD, n_embd=width)), results / GPU / name)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.gains_table(results).splitlines()]
    names = ["on", "channels", "layers", "sequence length", "tokens a step", "step 1", "step 2", "step 3", "step 4"]
    assert lines[0][1:] == names
    shape, link = ["2", "1024", "2,048", "3.00", "2.00", "0.50"], "[{0}](docs/results/h200/{0}/report.md)"
    assert lines[2:] == [[link.format("narrow"), "GPU", "64", *shape, "-"],
                         [link.format("wide"), "GPU", "512", *shape, "skipped"]]  # fmt: skip
