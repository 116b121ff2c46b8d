"""Doubts in two levels, the verdict on a busy machine, and what both do to every figure that is shown."""

import re
from dataclasses import replace

import runs
from conftest import ROOT

from common.record import GpuState, Roofs, Settings
from report import analysis, compare, documents, page, table
from report.doubts import Doubt, busy, doubts


def fair(name, ms=100.0, drift=0.0, quartiles=None, **fields):
    """A row that no rule doubts, if nothing drifts and spreads."""
    row = runs.step(name, ms, **{"reference_ms": runs.reference(20.0)} | fields)
    row.timing.step_ms = [ms] * 20 + [ms * (1 + drift)] * 20
    row.timing.p25_ms, row.timing.p75_ms = quartiles or (ms, ms)
    return row


def written(made, folder):
    """All that is written of a run: text, report.md, the page, README's table, docs/performance.md."""
    results = runs.write(made, folder / "docs" / "results" / documents.SHOWN).parent.parent
    reports = table.render_text(made), table.render_markdown(made), page.render(made)
    return [*reports, documents.readme_table(results), documents.performance_tables(results)]


def test_broken_rules_are_doubted_in_two_levels_and_a_fair_run_is_not():
    slowed = runs.profile(48.0, step_ms=99.0, gpu_idle_ms=51.0)
    assert doubts(runs.run(fair("0_a", profile=runs.profile(100.0)))) == []
    for row, level, said in (
        (fair("0_a", quartiles=(98.0, 101.5)), "notice", "the middle half of its times spreads over 3.5% of"),
        (fair("0_a", quartiles=(90.0, 124.0)), "serious", "the middle half of its times spreads over 34.0% of"),
        (fair("0_a", drift=0.02), "notice", "the second half of its timed steps took 2.0% more than the first"),
        (fair("0_a", drift=-0.06), "serious", "the second half of its timed steps took 6.0% less than the first"),
        (fair("0_a", 50.0, profile=slowed), "notice", "98% longer than the timed one. Its kernels alone fit"),
        (fair("0_a", profile=runs.profile(90.0)), "notice", "10% shorter than the timed one. Its kernels may"),
        (runs.step("0_a", reference_ms=runs.reference(9.0)), "notice", "3 timed steps, fewer than 30"),
        (fair("0_a", reference_ms=None), "notice", "whether the machine was busy is not known"),
        (fair("0_a", gpu_state=GpuState(throttle_reasons="0x44")), "notice", "power limit, hardware thermal slowdown"),
        (fair("0_a", gpu_state=GpuState(while_running=False)), "notice", "was done before its clocks had been read"),
    ):
        (doubt,) = doubts(runs.run(row))
        assert (doubt.level, doubt.rows) == (level, ("0_a",)) and doubt.text.startswith("0_a: ") and said in doubt.text
    unknown = {"dirty": True, "commit": None, "commit_reason": "no git", "nvml_reason": "no NVML"}
    told = doubts(runs.run(fair("0_a"), **unknown))
    assert {doubt.level for doubt in told} == {"notice"} and len(told) == 3
    assert all(said in str(told) for said in ("had uncommitted changes", "unknown: no git", "are unknown: no NVML"))


def test_matrix_products_of_a_fused_step_have_a_rate_and_above_their_ceiling_the_ceiling_is_wrong():
    row = fair("0_a", profile=runs.profile(100.0), settings=Settings("bfloat16", attention_kernel="cudnn"))
    by_hand = fair("1_b", profile=row.profile, settings=Settings("bfloat16", attention_kernel="by hand"))
    made = runs.run(row, by_hand)
    assert analysis.products_rate(by_hand, made) is analysis.products_rate(fair("1_b"), made) is None
    rate = (runs.WORKLOAD.flops_per_step - 6 * 2 * 1024 * 128 * 2048) / 0.05
    made.roofs = Roofs(ceilings={"bf16": rate / 1.19})
    text = "0_a: its matrix products reach 119 % of their ceiling: the ceiling is wrong"
    assert doubts(made) == [Doubt("serious", text, ("0_a",), "roof")]
    assert [table.table_rows(made)[0][name] for name in ("ms/step", "of roof")] == ["100.0", "97%? of bf16"]
    made.roofs.ceilings["bf16"] = rate / 1.01
    assert doubts(made) == []


def test_a_serious_doubt_marks_its_figures_and_every_doubt_is_said_once(tmp_path):
    made = runs.run(fair("0_baseline", 300.0), fair("2_sdpa", drift=0.1), fair("3_x", 50.0), dirty=True)
    made.problems = ["left out: 1_b.json is gone", "1_cublas: 2 of 3 passes"]
    assert [doubt.level for doubt in doubts(made)] == ["serious"] * 2 + ["notice"] * 2
    text, markdown, html, readme, performance = shown = written(made, tmp_path)
    for said in shown:
        assert "100.0?" in said and said.count("? : see the serious doubts") == 1 and "300.0?" not in said
        assert all(said.count(doubt.text) == (doubt.level == "serious" or said != readme) for doubt in doubts(made))
    assert all(said.index("serious:") < said.index("notice:") for said in (text, markdown))
    assert html.index("left out: 1_b") < html.index("<table") and html.index("working copy") > html.index('id="trust"')
    cells = {row["step"]: row for row in table.table_rows(made)}
    assert [cells["2_sdpa"][name] for name in ("ms/step", "vs baseline")] == ["100.0?", "3.00x?"]
    assert cells["3_x"]["vs previous"] == "2.00x?" and cells["3_x"]["vs baseline"] == "6.00x"
    assert "100.0?, 3.0x?" in performance and " 6.0 |" in readme and " 2.0? |" in readme
    said = compare.text_of(compare.compare(made, made, ("a", "b")))
    assert "1.000?" in said and "A, serious: 2_sdpa: the second half" in said and "working copy" not in said


def test_passes_give_ranges_everywhere(tmp_path):
    made = runs.run(runs.repeated("0_baseline", 300.0, 330.0), runs.repeated("2_sdpa", 100.0, 80.0))
    shown = [*written(made, tmp_path), compare.text_of(compare.compare(made, made, ("a", "b")))]
    assert all(
        said.count("median of 2 passes, their range in brackets") in (1, 2) for said in shown if said != shown[4]
    )
    assert all("100.0 (80.0-100.0)" in said for said in shown)
    for said, speedup in zip(shown, ("3.30x (3.00-4.12)",) * 3 + (" 3.3 (3.0-4.1)", "3.3x (3.0-4.1)"), strict=False):
        assert speedup in said
    wide = replace(made, workload=replace(runs.WORKLOAD, n_embd=256))
    assert "0.800 to 1.250" in shown[5] and "3.30x (3.00-4.12)" in str(compare.compare(made, wide, ("a", "b")).table)


def test_a_machine_is_busy_where_the_same_work_took_another_time():
    rows = [runs.step("0_a", reference_ms=runs.reference(20.0, 4.0, 2000.0)), runs.step("1_b"), runs.step("2_c")]
    for device, times, said in (
        ("cuda", (25.0, 4.0, 1600.0), None),  # as many cycles, at a lower clock
        ("cuda", (20.0, 8.0, 2000.0), "the same copy took 4 ms beside 0_a and 8 ms beside 1_b"),
        ("cuda", (40.0, 4.0, 2000.0), "product took 20.0 ms at 2000 MHz beside 0_a and 40.0 ms at 2000 MHz beside 1_b"),
        ("cpu", (21.0, 4.1, 1000.0), None),
        ("cpu", (40.0, 4.0, 1000.0), "the same matrix product took 20.0 ms beside 0_a and 40.0 ms beside 1_b"),
    ):
        rows[1].reference_ms = runs.reference(*times)
        verdict = busy(runs.run(*rows, device_type=device))
        assert verdict == said or ("machine busy: rows are not comparable (" in verdict and said in verdict)
    row = runs.repeated("0_a", 100.0, 100.0, reference_ms=runs.reference(20.0))
    row.repetitions[1].reference_ms = runs.reference(40.0)
    assert busy(runs.run(row)), "every pass counts"


def test_no_ratio_of_a_busy_machine_is_shown_anywhere(tmp_path):
    names = ("0_baseline", "1_cublas", "2_sdpa", "3_compile", "4_te")
    calm = runs.run(*(fair(name, 200.0) for name in names), peers=[fair("p", 50.0)])
    made = runs.run(*(fair(name, 300.0 / k, reference_ms=runs.reference(20.0 * k)) for k, name in enumerate(names, 1)))
    wide = replace(calm, workload=replace(runs.WORKLOAD, n_embd=256))
    compared = [
        compare.text_of(compare.compare(*two, ("a", "b"))) for two in ((made, calm), (calm, made), (made, wide))
    ]
    for said in (shown := written(made, tmp_path)) + compared:
        assert said.count(busy(made)) == 1 and not re.search(r"\d\.\d+\??x|x\?? (faster|slower) than", said)
    assert all("60.0?" in said for said in shown + compared[:2]), "times stay"
    assert not any(re.search(r"\d\.\d{3}", said) for said in compared[:2])
    assert re.search(r"\| 4_te +\| +60\.0\? +\| +- \| +- \|", shown[3])
    assert all(f">{300 / k:.1f}? ms<" in shown[2] for k in range(1, 6)), "a bar's label is its time alone"
    files = [path for path in (ROOT / "report").glob("*.py") if path.name not in ("analysis.py", "doubts.py")]
    assert not [path.name for path in files if "analysis.speedup" in path.read_text()], "compared() is the one way"


def test_rows_of_different_gpus_are_named_without_serial_numbers():
    made = runs.run(fair("0_a"), fair("1_b"))
    made.problems = ["rows differ in gpu_uuid: GPU-a4 in 1_b; GPU-bc in 0_a, 1_b"]
    assert doubts(made) == [
        Doubt("serious", "rows ran on different GPUs: 1_b on one; 0_a, 1_b on another", ("0_a", "1_b"))
    ]
