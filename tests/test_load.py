"""Run folders and files: what is odd is named and left out, and the rest stands."""

import json
import os
from dataclasses import asdict, replace

import pytest
import runs

from common.record import write_json
from report import table
from report.load import RecordError, load_run, read_run

ODD = [
    ("1e400", "tokens_per_s"), ("NaN", "tokens_per_s"), ('"fast"', "tokens_per_s"), ("-5", "tokens_per_s"),
    ("1" + "0" * 400, "tokens_per_s"), ("null", "loss"), ("[]", "loss"), ("[NaN]", "loss"), ("null", "timing"),
    ("0", "timing", "median_ms"), ("1e300", "timing", "p75_ms"), ('"x"', "profile", "kernels"),
    ('{"magic": {}}', "profile", "categories"), ('"great"', "status"),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{'.'.join(odd[1:])}={odd[0][:20]}")
def test_an_odd_field_leaves_its_row_out_by_name_and_the_others_stand(tmp_path, odd):
    raw, *keys = odd
    row = runs.step("1_b", profile=runs.profile(100.0))
    runs.write_rows(tmp_path, runs.step("0_a"), runs.step("2_c"))
    runs.write_odd(tmp_path / "1_b.json", runs.run(row), raw, "steps", 0, *keys)
    run = load_run(tmp_path)
    assert [row.status for row in run.steps] == ["ok", "failed", "ok"]
    assert len(run.problems) == 1 and "1_b" in run.problems[0] and "1_b" in table.render_text(run)


def test_one_odd_row_of_a_recorded_run_is_left_out_and_two_of_one_name_are_refused(tmp_path):
    made = runs.run(runs.step("0_a"), runs.step("1_b"), peers=[runs.step("p")])
    runs.write_odd(tmp_path / "results.json", made, "1e400", "steps", 1, "loss")
    run = load_run(tmp_path)
    assert [row.status for row in [*run.steps, *run.peers]] == ["ok", "failed", "ok"] and "1_b" in run.problems[0]
    with pytest.raises(RecordError, match="two rows of one name"):
        read_run(runs.write(runs.run(runs.step("0_a"), runs.step("0_a")), tmp_path) / "results.json")


def test_odd_roofs_are_named_and_the_table_stands(tmp_path):
    recorded, made = tmp_path / "recorded", runs.run(runs.step("0_a"), roofs=runs.ROOFS)
    runs.write_odd(runs.write(made, recorded) / "results.json", made, '"fast"', "roofs", "fp32_flops_per_s")
    runs.write_rows(tmp_path, runs.step("0_a"))
    runs.write_odd(tmp_path / "roofs.json", runs.ROOFS, "-1", "fp32_flops_per_s")
    for run in (load_run(recorded), load_run(tmp_path)):
        assert run.roofs is None and "roofs" in run.problems[0] and "100.0" in table.render_text(run)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{ broken", "not readable JSON"),
        ("[" * 200_000, "not readable JSON"),
        ("[]", "not a record"),
        ('{"hello": 1}', "not a record"),
        ('{"schema_version": 2, "steps": [3]}', "1_b.json"),
        ('{"schema_version": 1}', "schema version 1"),
        (json.dumps(asdict(runs.run())), "not a record"),
        (json.dumps(asdict(runs.run(runs.step("1_b"))) | {"environment": 5}), "environment"),
    ],
    ids=lambda value: value[:40],
)
def test_a_file_that_is_no_record_is_one_line(tmp_path, content, said):
    runs.write_rows(tmp_path, runs.step("0_a"))
    (tmp_path / "1_b.json").write_text(content, encoding="latin-1")
    run = load_run(tmp_path)
    assert [(row.step, row.status) for row in run.steps] == [("0_a", "ok"), ("1_b", "failed")]
    assert len(run.problems) == 1 and said in run.problems[0] and "\n" not in run.problems[0]


def test_what_is_no_regular_file_too_large_or_holds_another_files_step_is_named(tmp_path):
    runs.write_rows(tmp_path, runs.step("0_a"))
    os.mkfifo(tmp_path / "1_b.json")
    with (tmp_path / "3_d.json").open("wb") as file:
        file.truncate(200_000_000)
    (tmp_path / "4_x.json").write_text((tmp_path / "0_a.json").read_text())
    problems = "; ".join((run := load_run(tmp_path)).problems)
    assert "1_b.json is not a regular" in problems and "3_d.json has 200 MB, more than any record" in problems
    assert [row.step for row in run.steps if row.status == "ok"] == ["0_a"]
    assert run.steps[-1].step == "4_x" and "4_x.json holds 0_a, not the one row it is named after" in problems


def test_planned_rows_without_a_record_are_interrupted_or_not_run_unless_the_ladder_knows_more(tmp_path):
    runs.write_rows(tmp_path, runs.step("0_a"))
    runs.write_plan(tmp_path, "0_a", "1_b", "2_c", "3_d", "peers/p", left_out=["3_d"])
    (tmp_path / "1_b.log").write_text("began")
    run = load_run(tmp_path)
    assert [row.status for row in run.steps] == ["ok", "interrupted", "not run", "not run"]
    assert "--resume" in run.steps[1].reason and "--only" in run.steps[3].reason
    assert [(peer.step, peer.status) for peer in run.peers] == [("p", "not run")]
    ended = {"1_b": runs.step("1_b", status="timeout", reason="slow"), "0_a": runs.step("0_a", status="failed")}
    assert [row.status for row in load_run(tmp_path, ended).steps][:2] == ["ok", "timeout"]


def test_passes_are_merged_and_a_row_has_a_time_only_if_no_pass_ended_without(tmp_path):
    for k, ms in ((1, 100.0), (2, 130.0), (3, 104.0)):
        place = tmp_path / f"pass-{k}" if k > 1 else tmp_path
        oom = runs.step("1_b", status="oom" if k == 2 else "ok", reason="too large")
        runs.write_rows(place, runs.step("0_a", ms), oom, runs.step("2_c", status="skipped", reason="no FP8"))
    runs.write_rows(tmp_path / "pass-3", runs.step("4_e"), workload=replace(runs.WORKLOAD, seed=2), device="other GPU")
    for place in (tmp_path, tmp_path / "pass-2"):
        runs.write_rows(place / "peers", runs.step("p", 100.0 if place == tmp_path else 130.0))
    runs.write_plan(tmp_path, "0_a", "1_b", "2_c", "3_d", "4_e", "peers/p", left_out=["3_d"], repeat=3)
    run = load_run(tmp_path)
    (a, b, c, d, e), (peer,) = run.steps, run.peers
    assert (a.timing.median_ms, a.timing.step_ms[0], round(a.tokens_per_s)) == (104.0, 104.0, 19692)
    assert [again.timing.median_ms for again in a.repetitions] == [100.0, 130.0, 104.0]
    assert (b.status, b.reason, c.reason) == ("oom", "pass 2 of 3: too large", "no FP8")
    assert d.reason == "left out by --only" and "pass 3 of 3: ran a different workload" in e.reason
    assert peer.timing.median_ms == 115.0 and abs(peer.model_flops_per_s - 8.4e9 / 0.115) < 1
    assert run.problems[0] == "p ran in 2 of 3 passes only" and "rows differ in device" in run.problems[1]
    said = table.render_text(run)
    assert "104.0? (100.0-130.0)" in said and "\nmedian of 3 passes, their range in brackets\n" in said


def test_a_row_of_another_workload_is_failed_one_of_another_machine_is_named_and_a_failed_roof_says_why(tmp_path):
    other = replace(runs.WORKLOAD, batch_size=9, seed=2)
    runs.write_rows(tmp_path, runs.step("0_a"))
    runs.write_rows(tmp_path, runs.step("2_c"), device="other GPU")
    runs.write_rows(tmp_path, runs.step("1_b"), workload=other)
    runs.write_rows(tmp_path / "peers", runs.step("p"), workload=other)
    (tmp_path / "roofs.json").write_text('{"failed": "no luck"}')
    run = load_run(tmp_path)
    assert [row.status for row in run.steps] == ["ok", "failed", "ok"] and "no roofs: no luck" in run.problems
    assert [(peer.step, peer.status) for peer in run.peers] == [("p", "failed")]
    assert any("rows differ in device" in said and "other GPU in 2_c" in said for said in run.problems)
    assert all("batch_size, seed differ" in row.reason for row in (run.steps[1], run.peers[0]))


def test_roofs_that_a_resumed_run_measured_elsewhere_say_so(tmp_path):
    runs.write_rows(tmp_path, runs.step("0_a"), gpu_uuid="GPU-1")
    environment = {"device": "GPU", "device_type": "cuda", "gpu_uuid": "GPU-1", "commit": "abc"}
    for there, said in (
        (environment, []),
        (environment | {"device": "another GPU", "gpu_uuid": "GPU-2"},
         ["the roofs were measured when the run was resumed, on another GPU"]),
        (environment | {"gpu_uuid": "GPU-2", "commit": "0123456789"},
         ["the roofs were measured when the run was resumed, on another card of the same kind, at commit 0123456"]),
    ):  # fmt: skip
        write_json(tmp_path / "roofs.json", asdict(runs.ROOFS) | {"notes": [], "environment": there})
        assert load_run(tmp_path).problems == said
    (tmp_path / "predicted.json").write_text("{")
    write_json(tmp_path / "roofs.json", asdict(runs.ROOFS) | {"environment": "nowhere"})
    run = load_run(tmp_path)
    assert run.roofs is None and len(run.steps) == 1
    assert [said.partition(":")[0] for said in run.problems] == ["no roofs", "no predictions"]


@pytest.mark.parametrize("text", runs.HOSTILE.values(), ids=runs.HOSTILE)
def test_no_text_of_a_record_can_harm_a_terminal(tmp_path, text):
    runs.write_rows(tmp_path / "rows", runs.step("0_a"))
    (tmp_path / "rows" / f"1_{text.replace('/', '')}.json").write_text("{")  # the name of a file is text too
    for run in (runs.hostile(text), load_run(tmp_path / "rows")):
        assert all(character.isprintable() or character == "\n" for character in table.render_text(run))
