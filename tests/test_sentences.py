"""Headline and sentences: what a run may claim, and where it may not."""

import runs

from common.record import CategoryTime, GpuState, Settings
from report.doubts import doubts
from report.sentences import headline, largest_loss_difference, sentence, sentences

ADAMW = Settings(optimizer="AdamW, fused")


def pair(before_ms, after_ms, before=(60.0, 30.0), after=(20.0, 30.0), **settings):
    """Two profiled rows, with milliseconds of matrix products and of the optimizer."""
    categories, names = ("matrix products", "optimizer"), ("gemm", "adamw")
    rows = []
    for name, ms, times in (("1_cublas", before_ms, before), ("2_sdpa", after_ms, after)):
        profile = runs.profile(ms, names, categories)
        for kernel, category, time in zip(profile.kernels, categories, times, strict=True):
            kernel.ms, profile.categories[category] = time, CategoryTime(time, 1)
        rows.append(runs.step(name, ms, profile=profile, settings=Settings(**settings)))
    return rows


def said_of(rows):
    return sentence(runs.run(*rows), *rows)


def test_sentences_say_which_rows_they_compare():
    made = runs.run(runs.step("0_a", 300.0), runs.step("1_b", status="oom", reason="x"), runs.step("2_c", 100.0))
    said = sentences(made)
    assert "1_b has no time (oom: x)." in said and "2_c is 3.00x faster than 0_a (300.0 to 100.0 ms)" in said[2]
    alone = runs.run(made.steps[1], runs.step("4_e", settings=Settings(fp8_recipe="x")))
    assert "4_e ran in FP8, but no step before it" in headline(alone)[-1]


def test_the_gap_of_the_losses_is_the_largest_one():
    steps = [runs.step("0_a", loss=[4.0, 3.0]), runs.step("1_b", loss=[4.5, 3.1]), runs.step("2_c", loss=[4.0, 2.0])]
    assert "1.0000 nats (2_c, step 1)" in largest_loss_difference(steps)


def test_a_row_whose_times_spread_too_far_makes_no_claim_and_no_headline():
    rows = [runs.step("0_a", 300.0), runs.step("3_compile", 100.0, settings=Settings(fp8_recipe="x"))]
    rows[1].timing.p25_ms, rows[1].timing.p75_ms = 90.0, 124.0
    said = "3_compile has no comparison: the middle half of its times spreads over 34 % of the median."
    made = runs.run(*rows, runs.step("4_x", 50.0))
    assert sentences(made)[1] == said and headline(runs.run(*rows))[1:] == [said]
    assert sentences(made)[2].startswith("4_x has no comparison: the middle half of the times of 3_compile spreads")
    assert "4_x is 6.00x faster than 0_a" in headline(made)[1], "first and last row are steady"
    rows[1].timing.p75_ms = 109.0
    assert "3.00x faster" in headline(runs.run(*rows))[1]


def test_the_same_optimizer_is_no_cause_and_where_it_takes_another_time_nothing_is_a_cause():
    small = said_of(pair(100.0, 60.0, (60.0, 30.0), (20.0, 34.0), optimizer="AdamW, fused"))
    assert "less time in matrix products (60.0 to 20.0 ms)" in small and "optimizer" not in small
    other = pair(100.0, 60.0, (60.0, 30.3), (20.0, 51.0), optimizer="AdamW, fused")
    text = "AdamW, the same code in 1_cublas and 2_sdpa, took 30.3 and 51.0 ms: "
    assert "1.67x faster" in said_of(other) and "time in" not in said_of(other)
    assert [doubt.level for doubt in doubts(runs.run(*other)) if doubt.text.startswith(text)] == ["notice"]
    unknown = pair(100.0, 60.0, (60.0, 30.3), (20.0, 51.0))
    assert "optimizer (30.3 to 51.0 ms)" in said_of(unknown) and "AdamW" not in str(doubts(runs.run(*unknown)))
    tiny = pair(1000.0, 600.0, (600.0, 3.0), (200.0, 9.0), optimizer="AdamW, fused")
    assert "less time in matrix products" in said_of(tiny), "6 ms are less than 1 % of the step"


def test_matrix_products_at_another_clock_are_held_against_equal_clock():
    rows = pair(300.0, 200.0, (171.0, 0.0), (189.0, 0.0))
    assert "clock" not in said_of(rows)
    rows[0].clock_mhz, rows[1].clock_mhz = 1920.0, 1665.0
    clause = (
        "the matrix products that both steps run alike take 189.0 ms instead of 171.0, because the clock fell from "
        "1920 to 1665 MHz"
    )
    assert f"{clause}; at equal clock it would be 1.65x faster" in said_of(rows)
    rows[1].gpu_state = GpuState(throttle_reasons="0x4")
    assert f"{clause} (power limit); at equal clock" in said_of(rows)
    rows[1].clock_mhz = 1990.0
    assert "clock" not in said_of(rows), "slower at a higher clock has another reason"
    rows[1].clock_mhz, rows[1].profile.kernels[0].launches = 1665.0, 2
    assert "clock" not in said_of(rows), "other launches are other work"
