"""Doubts in two levels, the verdict on a busy machine, and what both do to every figure that is shown."""

import re
from dataclasses import replace

import runs
from conftest import ROOT
from test_page import Page

from common.record import GpuState, Roofs, Settings, Timing
from report import analysis, compare, documents, page, table
from report.doubts import BUSY, Doubt, busy, describe_profile_offset, doubts


def fair(name, ms=100.0, **fields):
    """A row that no rule doubts."""
    row = runs.step(name, ms, **fields)
    row.timing.step_ms = fields["timing"].step_ms if "timing" in fields else [ms] * 30
    return row


def busy_run(**fields):
    """Five rows of which the third had a neighbor, as all documents want them."""
    names = ("0_baseline", "1_cublas", "2_sdpa", "3_compile", "4_te")
    rows = [fair(name, 300.0 / (k + 1), reference_ms=runs.reference(30.0 if k == 2 else 21.0), **fields)
            for k, name in enumerate(names)]  # fmt: skip
    return runs.run(*rows, peers=[fair("p", 50.0)], roofs=runs.ROOFS)


def drifting(share):
    return Timing(
        warmup_s=1.0, step_ms=[100.0] * 20 + [100.0 * (1 + share)] * 20, median_ms=100.0, p25_ms=100.0, p75_ms=100.0
    )


def test_broken_rules_are_doubted_in_two_levels_and_a_fair_run_is_not():
    wide, wider = runs.timing(100.0), runs.timing(100.0)
    (wide.p25_ms, wide.p75_ms), (wider.p25_ms, wider.p75_ms) = (98.0, 101.5), (90.0, 124.0)
    for environment, fields, level, said in (
        ({}, {}, "notice", "0_a: 3 timed steps, fewer than 30"),
        ({"device_type": "cpu"}, {}, "notice", "3 timed steps, fewer than 10"),
        ({"dirty": True}, {}, "notice", "uncommitted changes"),
        ({"commit": None, "commit_reason": "no git"}, {}, "notice", "commit is unknown: no git"),
        ({"nvml_reason": "no NVML"}, {}, "notice", "clocks and power are unknown: no NVML"),
        ({}, {"gpu_state": GpuState(throttle_reasons="0x44")}, "notice", "power limit, hardware thermal slowdown"),
        ({}, {"gpu_state": GpuState(while_running=False)}, "notice", "was done before its clocks had been read"),
        ({}, {"timing": wide}, "notice", "0_a: the middle half of its times spreads over 3.5% of the median"),
        ({}, {"timing": wider}, "serious", "0_a: the middle half of its times spreads over 34.0% of the median"),
        ({}, {"timing": drifting(0.02)}, "notice", "second half of its timed steps took 2.0% more"),
        ({}, {"timing": drifting(-0.06)}, "serious", "second half of its timed steps took 6.0% less"),
    ):
        (doubt,) = (one for one in doubts(runs.run(runs.step("0_a", **fields), **environment)) if said in one.text)
        assert doubt.level == level, said
    assert doubts(runs.run(fair("0_a"))) == []


def test_a_profile_that_is_off_says_which_of_its_times_to_trust():
    slowed = runs.step("0_a", 50.0, profile=runs.profile(48.0, step_ms=99.0, gpu_idle_ms=51.0))
    said = describe_profile_offset(slowed)
    assert "98% slower" in said and "not its gaps" in said
    assert Doubt("notice", f"0_a: {said}", ("0_a",)) in doubts(runs.run(slowed))
    faster = describe_profile_offset(runs.step("0_a", 100.0, profile=runs.profile(90.0)))
    assert "10% faster" in faster and "Trust the percentages" in faster
    assert describe_profile_offset(runs.step("0_a", profile=runs.profile(100.0))) is None


def test_products_above_their_ceiling_doubt_the_ceiling_and_mark_its_share():
    row = fair("0_a", profile=runs.profile(100.0), settings=Settings("bfloat16", attention_kernel="cudnn"))
    made = runs.run(row, roofs=Roofs(ceilings={"bf16": 0.0}))
    made.roofs.ceilings["bf16"] = analysis.products_rate(row, made) / 1.19
    text = "0_a: its matrix products reach 119 % of their ceiling: the ceiling is wrong"
    assert doubts(made) == [Doubt("serious", text, ("0_a",), "roof")]
    assert [table.table_rows(made)[0][name] for name in ("ms/step", "of roof")] == ["100.0", "97%? of bf16"]
    made.roofs.ceilings["bf16"] *= 1.17
    assert doubts(made) == []


def test_a_serious_doubt_marks_its_figures_and_every_doubt_is_said_once(tmp_path):
    rows = [fair("0_baseline", 300.0), fair("2_sdpa", 100.0, timing=drifting(0.1)), fair("3_x", 50.0)]
    made = runs.run(*rows, dirty=True)
    made.problems = ["left out: 1_b.json is gone", "1_cublas: 2 of 3 passes"]
    assert [doubt.level for doubt in doubts(made)] == ["serious"] * 2 + ["notice"] * 2
    runs.write(made, tmp_path / "docs" / "results" / documents.SHOWN)
    html, readme = page.render(made), documents.readme_table(tmp_path / "docs" / "results")
    whole = documents.performance_tables(tmp_path / "docs" / "results")
    for text in (shown := [table.render_text(made), table.render_markdown(made), html, readme]):
        assert "100.0?" in text and text.count("? : see the serious doubts") == 1 and "300.0?" not in text
        assert all(text.count(doubt.text) == 1 for doubt in doubts(made) if text != readme or doubt.level == "serious")
    assert "working copy" not in readme and html.index("left out: 1_b") < html.index("<table>")
    assert html.index("working copy") > html.index('id="trust"')
    assert all(text.index("serious:") < text.index("notice:") for text in shown[:2])
    cells = {row["step"]: row for row in table.table_rows(made)}
    assert [cells["2_sdpa"][name] for name in ("ms/step", "vs baseline")] == ["100.0?", "3.00x?"]
    assert cells["3_x"]["vs previous"] == "2.00x?" and cells["3_x"]["vs baseline"] == "6.00x"
    assert "100.0?, 3.0x?" in whole and " 6.0 |" in readme and " 2.0? |" in readme
    said = compare.compare(made, made, ("a", "b"))
    assert "1.000?" in said and "A, serious: 2_sdpa: the second half" in said and "2.0% more" not in said


def test_a_machine_is_busy_where_the_same_work_took_another_time():
    assert busy(busy_run()) == (
        "machine busy: rows are not comparable (the same matrix product took 21.0 ms at 1800 MHz beside 0_baseline "
        "and 30.0 ms at 1800 MHz beside 2_sdpa)"
    )
    rows = [runs.step("0_a", reference_ms=runs.reference(20.0, 4.0, 2000.0)), runs.step("1_b"), runs.step("2_c")]
    for device, reference, verdict in (
        ("cuda", runs.reference(25.0, 4.0, 1600.0), None),  # as many cycles at a lower clock
        ("cuda", runs.reference(20.0, 4.4, 2000.0), "the same copy took 4 ms beside 0_a and 4.4 ms beside 1_b"),
        ("cpu", runs.reference(29.0, 5.9, 1000.0), None),
        ("cpu", runs.reference(31.0, 4.0), "matrix product took 20.0 ms beside 0_a and 31.0 ms beside 1_b"),
    ):
        rows[1].reference_ms = reference
        said = busy(runs.run(*rows, device_type=device))
        assert said == verdict or verdict in said
    rows = [runs.repeated("0_a", 100.0, 100.0, reference_ms=runs.reference(20.0))]
    rows[0].repetitions[1].reference_ms = runs.reference(20.0 * 1.07)
    assert busy(runs.run(*rows)) and BUSY["cuda"]["product"] < 1.07


def test_no_ratio_of_a_busy_machine_is_shown_anywhere(tmp_path):
    made, calm = busy_run(), runs.run(*(fair(row.step, 200.0) for row in busy_run().steps))
    results = tmp_path / "docs" / "results"
    runs.write(made, results / documents.SHOWN)
    shown = [table.render_text(made), table.render_markdown(made), page.render(made), documents.readme_table(results)]
    shown += [compare.compare(*pair, ("a", "b")) for pair in ((made, calm), (calm, made))]
    wide = replace(runs.WORKLOAD, n_embd=256)
    shown += [compare.compare(made, replace(calm, workload=wide), ("a", "b")), documents.performance_tables(results)]
    for text in shown:
        assert text.count(busy(made)) == 1 and not re.search(
            r"\d\.\d+x|faster: |slower:|faster than (?!0_|2_|the)", text
        )
        assert not re.search(r"\d\.\d{3}\b(?! to)", "".join(re.findall("(?<=A / B).*", text, re.DOTALL))), text
        assert re.search(r"60\.0\?|n_embd", text), "times stay"
    readme = re.findall(r"^\| 4_te .*", shown[3], re.MULTILINE)[0].split("|")
    assert [cell.strip() for cell in readme[2:5]] == ["60.0?", "-", "-"]
    tables = Page(shown[2]).tables
    assert {cells[4] for cells in tables["Time per training step"][1:]} == {f"{300 / k:.1f}? ms" for k in range(1, 6)}
    files = [path for path in (ROOT / "report").glob("*.py") if path.name not in ("analysis.py", "doubts.py")]
    assert not [path.name for path in files if re.search(r"analysis\.speedup|import.*\bspeedup\b", path.read_text())]
