"""Headline and sentences: what a run may claim, and where it may not."""

from dataclasses import replace

import runs

from common.record import GpuState, Settings
from report.analysis import consecutive
from report.doubts import doubts
from report.sentences import further, headline, largest_loss_difference, outcome, rising_loss, title, told, why


def pair(*of_rows, **settings):
    """Two profiled rows: of each the time, and the times of its matrix products and of its optimizer."""
    kinds, names = (("gemm", "adamw"), ("matrix products", "optimizer")), ("1_cublas", "2_sdpa")
    return [runs.step(name, ms, profile=runs.profile(ms, *kinds, times), settings=Settings(**settings))
            for name, (ms, *times) in zip(names, of_rows, strict=True)]  # fmt: skip


def said_of(rows):
    made = runs.run(*rows)
    return " ".join([outcome(made, *rows), why(made, *rows), *further(made, *rows)])


def test_on_a_cpu_no_cause_is_named_where_one_of_two_steps_is_compiled():
    rows = pair((300.0, 171.0, 60.0), (200.0, 160.0, 1.0))
    made = runs.run(*rows, device_type="cpu")
    assert "optimizer takes 1.0 ms" in why(made, *rows)
    rows[1].settings.compiled = True
    assert why(made, *rows).startswith("No cause is named: on a CPU a compiled region holds")
    assert "kind" not in " ".join(further(made, *rows)) and why(runs.run(*rows), *rows).startswith("The optimizer")


def outcomes(made):
    return [outcome(made, *one) for one in consecutive(made.steps)]


def test_outcomes_say_which_rows_they_compare():
    made = runs.run(runs.step("0_a", 300.0), runs.step("1_b", status="oom", reason="x"), runs.step("2_c", 100.0))
    said = outcomes(made)
    assert said[1:] == ["1_b has no time (oom: x).", "2_c is 3.00x faster than 0_a (300.0 to 100.0 ms)."]


def test_the_headline_is_the_last_step_over_the_first_and_over_plain_training():
    rows = [runs.step("0_baseline", 3105.0), runs.step("2_sdpa", 282.0), runs.step("4_te", 157.0)]
    said = "One training step: 3.10 s → 0.16 s, 20 times faster; 1.8 times over 2_sdpa"
    assert headline(runs.run(*rows)) == said
    rows[1].settings = Settings(amp_dtype="bfloat16", attention_kernel="cudnn")
    assert headline(runs.run(*rows)) == said.replace("over 2_sdpa", "over AMP + SDPA (2_sdpa)")
    alone = runs.run(rows[1], rows[2])
    assert headline(alone) == "One training step from 2_sdpa to 4_te: 282.0 ms → 157.0 ms, 1.8 times faster"
    alone.workload = replace(alone.workload, gpus=2)
    assert headline(alone).startswith("One training step on 2 GPUs from 2_sdpa to 4_te")
    left_out = runs.step("0_baseline", status="not run")
    assert headline(runs.run(left_out, *rows[1:])).startswith("One training step from 2_sdpa to 4_te: 282.0 ms")
    assert headline(runs.run(rows[2], rows[1])).endswith("1.8 times slower")
    narrow = runs.run(runs.step("0_a", 300.0), runs.step("3_c", 100.0), runs.step("4_d", 150.0))
    assert headline(narrow).endswith("2.0 times faster; the fastest is 3_c, 3.0 times faster")
    assert headline(runs.run(rows[0])) == "One training step of 0_baseline: 3.10 s"
    assert headline(runs.run(left_out)) == "No step has a time"
    passes = [runs.repeated("0_a", 300.0, 330.0), runs.repeated("1_b", 100.0, 150.0)]
    assert headline(runs.run(*passes)).endswith("2.2 times faster (2.2 to 3.0)")
    within = runs.run(runs.step("0_a", 100.0), runs.step("1_b", 99.5))
    assert headline(within).endswith("no change that is larger than the spread of the times")
    assert said_of(within.steps) == "1_b and 0_a differ by less than their times spread (100.0 to 99.5 ms). " + (
        "There is no gain to explain."
    )


def test_a_serious_doubt_withholds_the_headline():
    rows = [runs.step("0_a", 300.0), runs.step("1_b", 100.0)]
    rows[1].timing.step_ms = [100.0] * 10 + [120.0] * 10
    assert headline(runs.run(*rows)) == "No headline: a serious doubt stands against these times"
    assert "3.0 times faster" in headline(runs.run(rows[0], runs.step("1_b", 100.0)))


def test_a_cause_is_the_largest_one_with_its_part_of_the_gain():
    rows = pair((100.0, 70.0, 30.0), (60.0, 40.0, 20.0))
    assert "Matrix products take 40.0 ms instead of 70.0, which is 75% of the time saved. The optimizer" in said_of(
        rows
    )
    rows = pair((100.0, 90.0, 10.0), (80.0, 60.0, 20.0))
    assert "Matrix products take 60.0 ms instead of 90.0, and everything else 20.0 ms instead of 10.0." in said_of(rows)
    rows[1].profile.kernels[1].ms = rows[1].profile.categories["optimizer"].ms = 18.0
    rows[1].profile = replace(rows[1].profile, step_ms=78.0, gpu_busy_ms=78.0)
    assert "everything else 18.0 ms" in said_of(rows), "of the profiled step, which took less than the timed one"
    assert "instead of 20.0, which is" not in said_of(pair((80.0, 60.0, 20.0), (100.0, 90.0, 10.0))), "the slower one"
    slower = said_of(pair((100.0, 50.0, 10.0), (80.0, 65.0, 10.0)))
    assert slower.endswith("No kind of kernel explains it. Matrix products take 65.0 ms instead of 50.0."), "gaps do"
    rows[1].profile = None
    assert "No cause is named: there is no profile of both steps." in said_of(rows)


def test_what_a_script_says_of_itself_is_its_first_line_and_its_first_sentence():
    source = '"""Step 2: fused attention.\n\nChange:   softmax becomes\n  one kernel. And more.\nWhy: x.\n"""\n'
    row = runs.step("2_x", source=source)
    assert told(row, "Why") == "x."
    assert title(row) == "Step 2: fused attention" and told(row, "Change") == "Softmax becomes one kernel. And more."
    for unknown in (None, "no docstring = 1", "not python at all (", '"""Something else."""'):
        assert title(runs.step("2_x", source=unknown)) == "2_x" and told(runs.step("2_x", source=unknown), "Why") == ""


def test_a_loss_that_rises_at_the_start_is_explained_and_one_that_falls_is_not():
    assert "from 11.50 to 34.20 nats in training step 1" in rising_loss([runs.step("0_a", loss=[11.5, 34.2, 19.0])])
    assert rising_loss([runs.step("0_a", loss=[11.5, 9.0])]) == rising_loss([]) == ""


def test_the_gap_of_the_losses_is_the_largest_one():
    steps = [runs.step("0_a", loss=[4.0, 3.0]), runs.step("1_b", loss=[4.5, 3.1]), runs.step("2_c", loss=[4.0, 2.0])]
    assert "-1.0000 nats, in 2_c at training step 1" in largest_loss_difference(steps)
    assert f"Averaged over all {len(steps[0].loss)} training steps, the loss of 2_c" in largest_loss_difference(steps)
    for row in steps:
        row.loss *= 20
    assert "Averaged over the last 20 training steps" in largest_loss_difference(steps)


def test_a_row_whose_times_spread_too_far_makes_no_claim_and_no_headline():
    rows = [runs.step("0_a", 300.0), runs.step("3_compile", 100.0, settings=Settings(fp8_recipe="x"))]
    rows[1].timing.p25_ms, rows[1].timing.p75_ms = 90.0, 124.0
    said = "3_compile has no comparison: the middle half of its times spreads over 34 % of the median."
    made = runs.run(*rows, runs.step("4_x", 50.0))
    assert outcomes(made)[1] == said and headline(runs.run(*rows)) == said
    assert outcomes(made)[2].startswith("4_x has no comparison: the middle half of the times of 3_compile spreads")
    assert headline(made).startswith("No headline"), "the doubt stands above it"
    rows[1].timing.p75_ms = 109.0
    assert "3.0 times faster" in headline(runs.run(*rows))


def test_the_same_optimizer_is_no_cause_and_where_it_takes_another_time_nothing_is_a_cause():
    same = {"optimizer": "AdamW, fused"}
    small = said_of(pair((100.0, 60.0, 30.0), (60.0, 20.0, 34.0), **same))
    assert "Matrix products take 20.0 ms instead of 60.0" in small and "optimizer" not in small
    other = ((100.0, 60.0, 30.3), (60.0, 20.0, 51.0))
    text = "AdamW, the same code in 1_cublas and 2_sdpa, took 30.3 and 51.0 ms: "
    assert "1.67x faster" in said_of(pair(*other, **same)) and " take" not in said_of(pair(*other, **same))
    assert [d.level for d in doubts(runs.run(*pair(*other, **same))) if d.text.startswith(text)] == ["notice"]
    assert "Against this, the optimizer takes 51.0 ms instead of 30.3" in said_of(pair(*other)), (
        "another optimizer, for all that is known"
    )
    tiny = said_of(pair((1000.0, 600.0, 3.0), (600.0, 200.0, 9.0), **same))
    assert "Matrix products take 200.0 ms instead" in tiny, "6 ms are less than 1 % of the step"


def test_matrix_products_at_another_clock_are_held_against_equal_clock():
    rows = pair((300.0, 171.0, 0.0), (200.0, 189.0, 0.0))
    assert "clock" not in said_of(rows)
    rows[0].clock_mhz, rows[1].clock_mhz = 1920.0, 1665.0
    clause = "In 2_sdpa the same products take 189.0 ms, while the clock fell from 1920 to 1665 MHz"
    assert "The matrix products that both steps run alike take 171.0 ms in 1_cublas. In 2_sdpa" in said_of(rows)
    limit, equal = (
        ": the GPU lowers it to stay within its power limit",
        "If they had taken as long as in 1_cublas, 2_sdpa",
    )
    assert f"{clause}. {equal} would be 1.65x faster than 1_cublas." in said_of(rows)
    assert said_of(rows).count("171.0") == 1, "the same products are told of once"
    rows[1].gpu_state = GpuState(throttle_reasons="0x4")
    assert f"{clause}{limit}. {equal}" in said_of(rows)
    for mhz in (1990.0, 1900.0):
        rows[1].clock_mhz = mhz
        assert "clock" not in said_of(rows), "slower at a higher clock, or by far more, has another reason"
    rows[1].clock_mhz, rows[1].profile.kernels[0].launches = 1665.0, 2
    assert "clock" not in said_of(rows), "other launches are other work"
