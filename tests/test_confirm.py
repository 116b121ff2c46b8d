"""docs/record.sh --confirm: a short run against a record, row by row."""

import json
from dataclasses import replace

import pytest
import runs
from conftest import run_python

from common.record import Proof
from report import confirm
from report.load import RecordError

LAUNCHED = replace(runs.SETTINGS["2_sdpa"], captured=False)


def row(step, ms, product=1.0, **fields):
    known = {"product_ms": [product] * 2, "launch_us": [5.0] * 2, "settings": LAUNCHED}
    return runs.row(step, ms, **(known | fields))


WAITING, BUSY = (replace(runs.profile(100.0), idle_ms=idle_ms) for idle_ms in (20.0, 0.0))
RECORD = runs.run(row("0_x", 100.0), row("1_x", 50.0), row("2_x", 20.0))


def test_a_slower_card_is_told_from_slower_code():
    slow = [row("0_x", 110.0, 1.1), row("1_x", 55.0, 1.1), row("2_x", 23.0, 1.1)]
    content, rows, failed = confirm.confirm(RECORD, runs.run(*slow))
    assert content["card"] == pytest.approx(1.1) and content["rows"]["0_x"]["ms"] == pytest.approx(1.0)
    assert failed == ["2_x is not confirmed: ms beyond 0.97 to 1.03"], "23 of 22 ms"
    assert [*rows[2].values()] == ["2_x", "20.0", "23.0", "1.045", "1.000", "1.000"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss": [0.9 * loss for loss in runs.LEARNED]}, ["loss"]),
        ({"peak_bytes": 4 * 2**30}, ["peak"]),
        ({"step_ms": [96.0] * 3}, ["ms"]),
        ({"step_ms": [104.0] * 3, "launch_us": [9.0] * 2, "profile": WAITING}, []),  # on a slow host
        ({"step_ms": [104.0] * 3, "launch_us": [9.0] * 2, "profile": BUSY}, ["ms"]),  # which did not matter
        ({"step_ms": [96.0] * 3, "launch_us": [9.0] * 2, "profile": WAITING}, ["ms"]),  # nor makes it faster
        ({"step_ms": [200.0] * 3, "launch_us": [9.0] * 2, "profile": WAITING}, ["ms"]),  # nor twice as slow
        ({"step_ms": [102.9] * 3}, []),
    ],
)
def test_what_leaves_the_bounds_is_named(fields, said):
    again = runs.run(row("0_x", 100.0, **fields), row("1_x", 50.0), row("2_x", 20.0))
    _, rows, failed = confirm.confirm(RECORD, again)
    assert failed == [f"0_x is not confirmed: {', '.join(said)} beyond 0.97 to 1.03"] * len(said)
    assert rows[0]["now, ms"].endswith("?") == (fields.get("profile") is WAITING)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peak_bytes": None}, "it has no peak of memory"),
        ({"loss": []}, "it has no loss"),
        (
            {"proof": Proof("9_x", False, 1.0, 0.2, "wpe.weight")},
            "it did other work than the run's first row",
        ),
        ({"settings": replace(LAUNCHED, amp_dtype="float16", captured=True)}, "amp_dtype, captured"),
    ],
)
def test_a_row_that_did_another_thing_is_not_confirmed(fields, said):
    again = runs.run(row("0_x", 100.0, **fields), row("1_x", 50.0), row("2_x", 20.0))
    (failed,) = confirm.confirm(RECORD, again)[2]
    assert failed.startswith("0_x is not confirmed: ") and failed.endswith(said)


def test_rows_of_several_cards_confirm_nothing():
    again = replace(RECORD, problems=["rows differ in gpu_uuid: a in 0_x; b in 1_x", "1_x was left out"])
    assert confirm.confirm(RECORD, again)[2] == ["rows differ in gpu_uuid: a in 0_x; b in 1_x"]


def test_a_step_without_a_time_or_without_a_row_is_not_confirmed():
    again = runs.run(row("0_x", 100.0), runs.row("1_x", status="oom", reason="out of memory"))
    _, _, failed = confirm.confirm(RECORD, again)
    assert failed == ["1_x is not confirmed: oom: out of memory", "2_x is not confirmed: it did not run"]


def test_other_work_and_a_record_without_times_are_one_line():
    with pytest.raises(RecordError, match="other work: batch_size"):
        confirm.confirm(RECORD, runs.run(row("0_x", 1.0), work=runs.workload(batch_size=7)))
    with pytest.raises(RecordError, match="no row of the record has a time"):
        confirm.confirm(runs.run(runs.row("0_x", status="oom")), RECORD)
    assert len(confirm.confirm(RECORD, runs.run(row("9_x", 1.0)))[2]) == 3, "none of its rows ran"


@pytest.mark.slow
def test_the_command_writes_what_it_confirms_and_nothing_for_another_card(tmp_path):
    record = runs.write(tmp_path / "record", RECORD)
    same = runs.write(tmp_path / "same", RECORD)
    other = runs.write(
        tmp_path / "other", replace(RECORD, environment=replace(RECORD.environment, device="B"))
    )
    slow = runs.write(tmp_path / "slow", runs.run(row("0_x", 200.0), row("1_x", 50.0), row("2_x", 20.0)))
    words = ["-m", "report.confirm", record]
    ended = run_python(*words, other)
    assert ended.returncode == 0 and "B is compared with GPU: nothing is confirmed" in ended.stdout
    ended = run_python(*words, slow)
    assert ended.returncode == 1 and "0_x is not confirmed: ms" in ended.stdout
    assert not (record / "confirmed.json").exists()
    assert run_python(*words, same).returncode == 0
    content = json.loads((record / "confirmed.json").read_text())
    assert (content["date"], content["device"]) == ("2026-01-01", "GPU") and len(content["rows"]) == 3
    assert run_python(*words, other).returncode == 0 and (record / "confirmed.json").exists()
    for fact in ({"code_sha256": "other"}, {"commit": None}):
        changed = replace(RECORD, environment=replace(RECORD.environment, **fact))
        ended = run_python(*words, runs.write(tmp_path / "changed", changed))
        assert ended.returncode == 1 and "nothing is confirmed: the run is of other code" in ended.stdout
    assert json.loads((record / "confirmed.json").read_text()) == content, "it stays what it was"
    assert run_python(*words, slow).returncode == 1
    assert not (record / "confirmed.json").exists(), "the present code is slower than what was confirmed"
    ended = run_python(*words, tmp_path / "absent")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
