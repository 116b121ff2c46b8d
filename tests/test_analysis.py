"""Figures, changes, sentences and doubts: each has one function."""

import runs

from common.record import GpuState, Roofs, Settings
from report import analysis


def test_losses_are_means_of_the_last_20_and_the_gap_is_the_largest_one():
    assert analysis.mean_loss(runs.step("0_a", loss=[100.0] * 50 + [2.0] * 20)) == 2.0
    steps = [runs.step("0_a", loss=[4.0, 3.0]), runs.step("1_b", loss=[4.5, 3.1]), runs.step("2_c", loss=[4.0, 2.0])]
    assert "1.0000 nats (2_c, step 1)" in analysis.largest_loss_difference(steps)


def test_kernels_and_categories_are_matched_by_name():
    before = runs.step("a", 100.0, profile=runs.profile(100.0, ("old", "kept")))
    after = runs.step("b", 60.0, profile=runs.profile(60.0, ("new", "kept")))
    kinds = {change.name: change.kind for change in analysis.changed_kernels(before, after)}
    assert kinds == {"old": "vanished", "new": "appeared", "kept": "shrank"}
    assert (50.0, 30.0) in {(c.before_ms, c.after_ms) for c in analysis.changed_categories(before, after)}


def test_the_code_of_two_steps_is_side_by_side_and_long_scripts_are_not_compared():
    before, after = runs.step("0_a", source="a\nb\nc\n"), runs.step("1_b", source="a\nB\nc\nd\n")
    changed = [line for line in analysis.code_diff(before, after) if line[0] != "same"]
    assert changed == [("changed", "b", "B"), ("added", "", "d")]
    for source in ("x\n" * 60_000, "x" * 5_000, None):
        assert analysis.code_diff(runs.step("0_a", source=source), after) is None


def test_gaps_that_the_profiler_made_are_not_the_steps():
    slowed = runs.step("0_a", 50.0, profile=runs.profile(48.0, step_ms=99.0, gpu_idle_ms=51.0))
    assert analysis.gaps_ms(slowed) == 2.0 and sum(analysis.category_ms(slowed).values()) == 50.0
    said = analysis.describe_profile_offset(slowed)
    assert "98% slower" in said and "not its gaps" in said and any(said in line for line in doubts_of(slowed))
    true = runs.step("0_a", 100.0, profile=runs.profile(95.0, step_ms=100.0, gpu_idle_ms=5.0))
    assert analysis.gaps_ms(true) == 5.0 and analysis.describe_profile_offset(true) is None
    faster = analysis.describe_profile_offset(runs.step("0_a", 100.0, profile=runs.profile(90.0)))
    assert "10% faster" in faster and "Trust the percentages" in faster


def test_rows_are_held_against_the_roof_of_their_precision():
    for settings, expected in (
        (Settings("float32", "highest"), ("fp32", 5e13)),
        (Settings("float32", "high"), ("tf32", 3e14)),
        (Settings("bfloat16", "high"), ("bf16", 7e14)),
        (Settings("bfloat16", "high", fp8_recipe="DelayedScaling"), ("fp8", 1.3e15)),
    ):
        assert analysis.roof(runs.step("0_a", settings=settings), runs.ROOFS) == expected
    assert analysis.roof(runs.step("0_a", settings=settings), None) is None


def doubts_of(row, **environment):
    return analysis.doubts(runs.run(row, **environment))


def test_broken_rules_are_doubted():
    for environment, fields, said in (
        ({}, {}, "3 timed steps, fewer than 30"),
        ({"device_type": "cpu"}, {}, "3 timed steps, fewer than 10"),
        ({"dirty": True}, {}, "uncommitted changes"),
        ({"commit": None, "commit_reason": "no git"}, {}, "commit is unknown: no git"),
        ({"nvml_reason": "no NVML"}, {}, "clocks and power are unknown: no NVML"),
        ({}, {"gpu_state": GpuState(throttle_reasons="0x44")}, "power limit, hardware thermal slowdown"),
        ({}, {"gpu_state": GpuState(while_running=False)}, "was done before its clocks had been read"),
    ):
        assert any(said in line for line in doubts_of(runs.step("0_a", **fields), **environment)), said


def test_a_wide_spread_and_a_row_above_its_roof_are_doubted_and_a_fair_run_is_not():
    fair = runs.step("0_a")
    fair.timing.step_ms = [100.0] * 30
    assert doubts_of(fair) == []
    low = Roofs(fp32_flops_per_s=fair.model_flops_per_s / 2)
    assert any("faster than the fp32 roof" in line for line in analysis.doubts(runs.run(fair, roofs=low)))
    fair.timing.p25_ms, fair.timing.p75_ms = 98.0, 101.5
    assert doubts_of(fair) == ["0_a: the middle half of its times spreads over 3.5% of the median"]


def test_sentences_say_which_rows_they_compare():
    rows = [runs.step("0_a", 300.0), runs.step("1_b", status="oom", reason="x"), runs.step("2_c", 100.0)]
    said = [analysis.sentence(before, row) for before, row in analysis.consecutive(rows)]
    assert "1_b has no time (oom: x)." in said and "2_c is 3.00x faster than 0_a (300.0 to 100.0 ms)" in said[2]
    assert "4_e ran in FP8, but no step before it" in analysis.headline(
        runs.run(rows[1], runs.step("4_e", settings=Settings(fp8_recipe="x")))
    )[-1]  # fmt: skip
