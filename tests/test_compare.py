"""Two runs beside each other, and the refusals."""

import subprocess
import sys

import pytest
import runs
from conftest import ROOT

from common import compare
from common.record import RecordError

NAMES = ("first", "second")


def test_times_of_the_same_work_have_a_ratio_and_its_range():
    a, b = runs.run(runs.step("0_a", 200.0)), runs.run(runs.step("0_a", 100.0), device="other")
    said = compare.compare(a, b, NAMES)
    low, high = 200 * 0.995 / (100 * 1.005), 200 * 1.005 / (100 * 0.995)
    assert "2.000" in said and f"{low:.3f} to {high:.3f}" in said and "second: other" in said


def test_rows_without_a_time_stay():
    rows = [runs.step("0_a"), runs.step("1_b", status="oom", reason="too large")]
    assert "oom: too large" in compare.compare(runs.run(*rows), runs.run(*rows), NAMES)


def test_two_shapes_compare_speedups_not_times():
    wide = runs.WORKLOAD | {"n_embd": 256, "flops_per_step": 3e10}
    a = runs.run(runs.step("0_a", 200.0), runs.step("1_b", 100.0))
    b = runs.run(runs.step("0_a", 900.0), runs.step("1_b", 300.0), workload=wide)
    said = compare.compare(a, b, NAMES)
    assert "n_embd" in said and "2.00x" in said and "3.00x" in said and "1.500" in said and "900.0" not in said


def test_a_row_that_only_one_run_has_says_so():
    both, only = runs.step("0_a"), runs.step("1_b")
    said = compare.compare(runs.run(both, only), runs.run(both), NAMES)
    assert "absent: not in B" in said


def test_speedups_of_two_shapes_are_over_the_first_row_of_both():
    wide = runs.WORKLOAD | {"n_embd": 256}
    a = runs.run(runs.step("0_a", 400.0), runs.step("1_b", 200.0), runs.step("2_c", 100.0))
    b = runs.run(runs.step("1_b", 900.0), runs.step("2_c", 300.0), workload=wide)
    said = compare.compare(a, b, NAMES)
    assert "over 1_b" in said and "3.00x" in said and "4.00x" not in said


@pytest.mark.parametrize("field", ["seed", "surprise"])
def test_other_differences_are_refused_by_name(field):
    other = runs.run(runs.step("0_a"), workload=runs.WORKLOAD | {field: 7})
    with pytest.raises(RecordError, match=f"different workloads: {field} differ"):
        compare.compare(runs.run(runs.step("0_a")), other, NAMES)


def test_nothing_in_common_is_refused():
    with pytest.raises(RecordError, match="no step in common"):
        compare.compare(runs.run(runs.step("0_a")), runs.run(runs.step("1_b")), NAMES)


def test_the_command_compares_and_refuses(tmp_path):
    a = runs.write(runs.run(runs.step("0_a", 200.0)), tmp_path / "a")
    b = runs.write(runs.run(runs.step("0_a", 100.0)), tmp_path / "b")
    c = runs.write(runs.run(runs.step("0_a"), workload=runs.WORKLOAD | {"seed": 2}), tmp_path / "c")

    def run(*words):
        command = [sys.executable, "-m", "common.report", *map(str, words)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert "2.000" in run("--compare", a, b).stdout
    for words in (("--compare", a, c), ("--compare", a, tmp_path / "no"), (), (a, "--compare", a, b)):
        refused = run(*words)
        assert refused.returncode == 2 and "error:" in refused.stderr and "Traceback" not in refused.stderr
