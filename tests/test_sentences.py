"""Headline and sentences: what a run may claim, and where it may not."""

import runs

from common.record import GpuState, Settings
from report.doubts import doubts
from report.sentences import headline, largest_loss_difference, sentence, sentences


def pair(*of_rows, **settings):
    """Two profiled rows: of each the time, and the times of its matrix products and of its optimizer."""
    kinds, names = (("gemm", "adamw"), ("matrix products", "optimizer")), ("1_cublas", "2_sdpa")
    return [runs.step(name, ms, profile=runs.profile(ms, *kinds, times), settings=Settings(**settings))
            for name, (ms, *times) in zip(names, of_rows, strict=True)]  # fmt: skip


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
    same = {"optimizer": "AdamW, fused"}
    small = said_of(pair((100.0, 60.0, 30.0), (60.0, 20.0, 34.0), **same))
    assert "less time in matrix products (60.0 to 20.0 ms)" in small and "optimizer" not in small
    other = ((100.0, 60.0, 30.3), (60.0, 20.0, 51.0))
    text = "AdamW, the same code in 1_cublas and 2_sdpa, took 30.3 and 51.0 ms: "
    assert "1.67x faster" in said_of(pair(*other, **same)) and "time in" not in said_of(pair(*other, **same))
    assert [d.level for d in doubts(runs.run(*pair(*other, **same))) if d.text.startswith(text)] == ["notice"]
    assert "optimizer (30.3 to 51.0 ms)" in said_of(pair(*other)), "another optimizer, for all that is known"
    tiny = said_of(pair((1000.0, 600.0, 3.0), (600.0, 200.0, 9.0), **same))
    assert "less time in matrix products" in tiny, "6 ms are less than 1 % of the step"


def test_matrix_products_at_another_clock_are_held_against_equal_clock():
    rows = pair((300.0, 171.0, 0.0), (200.0, 189.0, 0.0))
    assert "clock" not in said_of(rows)
    rows[0].clock_mhz, rows[1].clock_mhz = 1920.0, 1665.0
    clause = "both steps run alike take 189.0 ms instead of 171.0, while the clock fell from 1920 to 1665 MHz"
    assert f"{clause}; at equal clock it would be 1.65x faster" in said_of(rows)
    rows[1].gpu_state = GpuState(throttle_reasons="0x4")
    assert f"{clause} (power limit); at equal clock" in said_of(rows)
    for mhz in (1990.0, 1900.0):
        rows[1].clock_mhz = mhz
        assert "clock" not in said_of(rows), "slower at a higher clock, or by far more, has another reason"
    rows[1].clock_mhz, rows[1].profile.kernels[0].launches = 1665.0, 2
    assert "clock" not in said_of(rows), "other launches are other work"
