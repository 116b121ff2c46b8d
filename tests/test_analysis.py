"""Figures and changes: each has one function."""

import runs

from common.record import Roofs, Settings
from report import analysis


def test_losses_are_means_of_the_last_20():
    assert analysis.mean_loss(runs.step("0_a", loss=[100.0] * 50 + [2.0] * 20)) == 2.0


def test_kernels_and_categories_are_matched_by_name():
    before = runs.step("a", 100.0, profile=runs.profile(100.0, ("old", "kept")))
    after = runs.step("b", 60.0, profile=runs.profile(60.0, ("new", "kept")))
    kinds = {change.name: change.kind for change, _ in analysis.changed_kernels(before, after)}
    assert kinds == {"old": "vanished", "new": "appeared", "kept": "shrank"}
    assert (50.0, 30.0) in {(c.before_ms, c.after_ms) for c in analysis.changed_categories(before, after)}


def test_kernels_of_one_kind_are_one_change_with_the_names_behind_it():
    names = ("nvjet_sm90_tst_192x192_64x4_NN", "nvjet_sm90_tst_192x192_64x3_NT")
    before = runs.step("a", 100.0, profile=runs.profile(100.0, names, ("matrix products",) * 2))
    after = runs.step("b", 50.0, profile=runs.profile(50.0, names[:1], ("matrix products",)))
    ((change, behind),) = analysis.changed_kernels(before, after)
    assert change.name == "matrix product, BF16, 192x192 tile" and behind == [*names]
    assert (change.before_ms, change.after_ms, change.before_launches) == (100.0, 50.0, 2)


def test_the_code_of_two_steps_is_unified_without_docstring_and_long_scripts_are_not_compared():
    head = '"""Step {}: x.\n\nChange: {}\n"""\n\nimport a\n\n\nclass A:\n    p = 1\n\n\ndef main(args):\n    one()\n'
    before = runs.step("0_a", source=head.format(0, "old") + "    two()\n    three()\n\n")
    after = runs.step("1_b", source=head.format(1, "new") + "    TWO()\n    three()\n    four()\n")
    assert analysis.code_diff(before, after) == [
        ("@", "def main(args)"), (" ", "    one()"), ("-", "    two()"), ("+", "    TWO()"), (" ", "    three()"),
        ("+", "    four()"),
    ]  # fmt: skip
    assert analysis.code_diff(before, before) == []
    for source in ("x\n" * 60_000, "x" * 5_000, None):
        assert analysis.code_diff(runs.step("0_a", source=source), after) is None


def test_gaps_that_the_profiler_made_are_not_the_steps():
    slowed = runs.step("0_a", 50.0, profile=runs.profile(48.0, step_ms=99.0, gpu_idle_ms=51.0))
    assert analysis.gaps_ms(slowed) == 2.0 and sum(analysis.category_ms(slowed).values()) == 50.0
    true = runs.step("0_a", 100.0, profile=runs.profile(95.0, step_ms=100.0, gpu_idle_ms=5.0))
    assert analysis.gaps_ms(true) == 5.0


def test_rows_are_held_against_the_ceiling_of_their_precision():
    for settings, expected in (
        (Settings("float32", "highest"), ("fp32", 5.1e13)),
        (Settings("float32", "high"), ("tf32", 4e14)),
        (Settings("bfloat16", "high"), ("bf16", 8e14)),
        (Settings("bfloat16", "high", fp8_recipe="DelayedScaling"), ("fp8", 1.6e15)),
    ):
        assert analysis.roof(runs.step("0_a", settings=settings), runs.ROOFS) == expected
    assert analysis.roof(runs.step("0_a", settings=settings), None) is None
    assert analysis.roof(runs.step("0_a", settings=settings), Roofs(*runs.RATES)) is None, "back to back is no ceiling"


def test_passes_give_ranges_and_rows_with_other_passes_none():
    a, b = runs.repeated("0_a", 200.0, 210.0, 190.0), runs.repeated("1_b", 100.0, 84.0, 100.0)
    assert analysis.extent_ms(a) == (190.0, 210.0) and analysis.speedup_range(b, a) == (1.9, 2.5)
    assert analysis.speedup_range(runs.step("2_c"), a) is analysis.speedup_range(runs.repeated("d", 1, 1), a) is None
    assert analysis.extent_ms(runs.step("2_c", 100.0)) == (99.5, 100.49999999999999), "its quartiles"
    b.repetitions[1].timing.step_ms = [100.0] * 4 + [92.0] * 4
    assert round(analysis.drift(b), 9) == -0.08, "of the pass that drifts most"
    assert analysis.drift(a) == 0.0, "too few steps tell nothing"
