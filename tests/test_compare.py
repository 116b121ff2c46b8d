"""Two runs beside each other, and the refusals."""

from dataclasses import replace

import pytest
import runs

from report import compare
from report.load import RecordError

NAMES = ("first", "second")
WIDE = replace(runs.WORKLOAD, n_embd=256, flops_per_step=30_000_000_000)


def test_times_of_the_same_work_have_a_ratio_and_its_range_and_other_rows_say_why_not():
    rows = [runs.step("0_a", 200.0), runs.step("1_b", status="oom", reason="too large"), runs.step("2_c")]
    other = runs.run(runs.step("0_a", 100.0), rows[1], device="other")
    made = compare.compare(runs.run(*rows), other, NAMES)
    said = compare.text_of(made)
    low, high = 200 * 0.995 / (100 * 1.005), 200 * 1.005 / (100 * 0.995)
    assert "2.000" in said and f"{low:.3f} to {high:.3f}" in said and "second: other" in said
    assert "oom: too large" in said and "absent: not in B" in said
    html = compare.page_of(made)
    assert made.claim == "0_a is 2.00x faster in second than in first" and f"<h1>{made.claim}</h1>" in html
    assert "A: 0_a" in html and "B: 0_a" in html and f"{low:.3f} to {high:.3f}" in html and "oom: too large" in html


def test_a_difference_within_the_spread_and_a_doubted_one_are_no_claim():
    a, b = runs.run(runs.step("0_a", 100.0)), runs.run(runs.step("0_a", 100.4))
    assert "is as fast in second as in first" in compare.compare(a, b, NAMES).claim
    b.steps[0].timing.p25_ms = 50.0
    assert "a serious doubt stands against" in compare.compare(a, b, NAMES).claim


def test_two_shapes_compare_speedups_over_the_first_row_of_both():
    a = runs.run(runs.step("0_a", 400.0), runs.step("1_b", 200.0), runs.step("2_c", 100.0))
    b = runs.run(runs.step("1_b", 900.0), runs.step("2_c", 300.0), workload=WIDE)
    said = compare.text_of(compare.compare(a, b, NAMES))
    assert "n_embd" in said and "over 1_b" in said and "2.00x" in said and "3.00x" in said and "1.500" in said
    assert "4.00x" not in said and "900.0" not in said


def test_another_number_of_steps_is_named_and_times_still_compare():
    other = runs.run(runs.step("0_a"), workload=replace(runs.WORKLOAD, steps=9))
    said = compare.text_of(compare.compare(runs.run(runs.step("0_a", 200.0)), other, NAMES))
    assert "A step is the same work in both, but steps differ." in said and "2.000" in said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (runs.run(runs.step("0_a"), workload=replace(runs.WORKLOAD, seed=7)), "different workloads: seeds differ"),
        (runs.run(runs.step("1_b")), "no step in common"),
        (runs.run(runs.step("0_a", status="oom")), "no step in common that has a time"),
        (runs.run(runs.step("0_a"), workload=None), "workload is unknown"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(other, said):
    with pytest.raises(RecordError, match=said):
        compare.compare(runs.run(runs.step("0_a")), other, NAMES)


def test_the_command_compares_and_refuses(tmp_path):
    a = runs.write(runs.run(runs.step("0_a", 200.0)), tmp_path / "a" / "same")
    b = runs.write(runs.run(runs.step("0_a", 100.0)), tmp_path / "b" / "same")
    ran = runs.report("--compare", a, b)
    assert ran.returncode == 0 and "2.000" in ran.stdout and "a/same: GPU" in ran.stdout
    ran = runs.report("--compare", a, b, "--html", tmp_path / "both.html")
    assert ran.returncode == 0 and "2.00x faster" in (tmp_path / "both.html").read_text()
    assert runs.report(a, "--html", tmp_path / "x.html").returncode == 2
    refused = runs.report("--compare", a, tmp_path / "no")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "error:" in refused.stderr
