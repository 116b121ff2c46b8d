"""The table and its file from fixture records: every status, every kind of broken file."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from runs import profile

from common import report
from common.record import RecordError, empty_step_record, read_envelope

NAMES = ["0_a", "1_b", "2_c", "3_d", "4_e"]
WORKLOAD = {
    "preset": "tiny", "n_layer": 2, "n_head": 4, "n_embd": 128, "seq_len": 1024, "vocab_size": 256, "batch_size": 8,
    "parameters": 600_000, "tokens_per_step": 2048, "flops_per_step": 8_400_000_000,
    "data": {"name": "text", "tokens": 10_000, "batches_sha256": "0"}, "seed": 1, "lr": 0.001, "warmup": 1, "steps": 3,
}  # fmt: skip


def step(name, ms=100.0, status="ok", **fields):
    record = empty_step_record(name, "source") | {"status": status}
    if status == "ok":
        timing = {"warmup_s": 1.0, "step_ms": [ms] * 3, "median_ms": ms, "p25_ms": ms, "p75_ms": ms}
        record |= {"timing": timing, "tokens_per_s": 2048 / ms * 1e3, "model_flops_per_s": 8.4e9 / ms * 1e3}
        record |= {"loss": [4.0, 3.0, 2.0, 1.0], "peak_allocated_bytes": 3 * 2**30}
    return record | fields


def envelope(*steps, workload=WORKLOAD, **environment):
    environment = {"device": "GPU", "device_type": "cuda", "torch": "2.x", "commit": "abc"} | environment
    return {
        "schema_version": 1, "command": f"python {steps[0]['step']}.py --preset tiny", "started_at": "2026-01-01",
        "environment": environment, "workload": workload, "roofs": None, "steps": list(steps),
    }  # fmt: skip


def write_run(folder, *steps):
    for record in steps:
        (folder / f"{record['step']}.json").write_text(json.dumps(envelope(record)))
    return folder


def rows_of(run):
    headers, rows = report.table(run)
    return [dict(zip(headers, row, strict=True)) for row in rows]


def test_speedups_are_against_the_previous_row_and_step_0(tmp_path):
    run = report.load_run(write_run(tmp_path, step("0_a", 300), step("1_b", 100), step("2_c", 120, loss=[2.0] * 4)))
    rows = rows_of(run)
    assert [row["vs previous"] for row in rows] == ["1.00x", "3.00x", "0.83x"]
    assert [row["vs baseline"] for row in rows] == ["1.00x", "3.00x", "2.50x"]
    assert rows[2]["loss difference"] == "-20.00%" and rows[0]["loss"] == "2.5000"
    assert rows[1]["ms/step"] == "100.0" and rows[1]["tokens/s"] == "20,480" and rows[1]["peak GiB"] == "3.0"


def test_loss_is_the_mean_of_the_last_20():
    assert report.mean_loss({"loss": [100.0] * 50 + [2.0] * 20}) == 2.0


def test_rows_without_a_time_stay_with_their_reason(tmp_path):
    steps = [step("0_a", 300), step("1_b", status="skipped", reason="no such thing"), step("2_c", 100)]
    run = report.load_run(write_run(tmp_path, *steps))
    rows = rows_of(run)
    assert rows[1]["status"] == "skipped" and rows[1]["ms/step"] == "-"
    assert rows[2]["vs previous"] == "3.00x", "against the last row that has a time"
    assert "1_b: no such thing" in report.render_text(run)


def test_without_step_0_speedups_say_what_they_are_against(tmp_path):
    run = report.load_run(write_run(tmp_path, step("0_a", status="oom", reason="x"), step("1_b", 80), step("2_c", 40)))
    rows = rows_of(run)
    assert "vs baseline" not in rows[0] and rows[2]["vs 1_b"] == "2.00x"


def test_no_row_with_a_time_is_still_a_table(tmp_path):
    run = report.load_run(write_run(tmp_path, *(step(name, status="failed", reason="x") for name in NAMES)))
    assert len(rows_of(run)) == 5


@pytest.mark.parametrize(
    ("said", "status", "reason"),
    [
        ("timeout took too long", "timeout", "took too long"),
        ("oom killed", "oom", "killed; try --batch-size 4"),
        ("failed ended with exit code 3", "failed", "ended with exit code 3"),
        ("nonsense", "failed", "nonsense"),
        ("", "failed", "its record cannot be read"),
    ],
)
def test_a_process_without_a_record_has_a_row(tmp_path, said, status, reason):
    write_run(tmp_path, step("0_a"))
    (tmp_path / "1_b.exit").write_text(said + "\n")
    second = report.load_run(tmp_path)["steps"][1]
    assert (second["step"], second["status"], second["reason"]) == ("1_b", status, reason)


def test_only_exits_are_still_a_table(tmp_path):
    (tmp_path / "0_a.exit").write_text("failed no")
    run = report.load_run(tmp_path)
    assert len(rows_of(run)) == 1 and "0_a: no" in report.render_markdown(run)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{ broken", "not readable JSON"),
        ("\x00\xff", "not readable JSON"),
        ("[]", "not a record"),
        ('{"hello": 1}', "not a record"),
        ('{"schema_version": 99}', "schema version 99"),
        ("[" * 200_000, "not readable JSON"),
        (json.dumps(envelope(step("9_z")) | {"steps": []}), "not a record"),
        (json.dumps(envelope(step("9_z", loss=[float("nan")]))), "not readable JSON"),
        (json.dumps(envelope(step("9_z", tokens_per_s=10**400))), "without its numbers"),
        ('{"schema_version": 1, "steps": 3, "workload": {}, "environment": {}}', "not a record"),
        ('{"schema_version": 1, "steps": [3], "workload": {}, "environment": {}}', "without a name"),
        (json.dumps(envelope(step("9_z") | {"timing": None})), "without its numbers"),
        (json.dumps(envelope(step("9_z") | {"loss": ["x"]})), "without its numbers"),
        (json.dumps(envelope(step("9_z") | {"peak_allocated_bytes": "x"})), "without its numbers"),
        (json.dumps(envelope(step("9_z")) | {"environment": None}), "not a record"),
        (json.dumps(envelope(step("9_z") | {"status": "great"})), "known status"),
        (json.dumps(envelope(step("9_z", profile={"step_ms": 1}))), "without its numbers"),
        (json.dumps(envelope(step("9_z", profile="fast"))), "without its numbers"),
        (json.dumps(envelope(step("9_z")) | {"roofs": {"copy_bytes_per_s": "x"}}), "roofs that are not numbers"),
    ],
)
def test_a_corrupt_or_foreign_file_is_named_and_left_out(tmp_path, content, said):
    write_run(tmp_path, step("0_a"))
    (tmp_path / "1_b.json").write_text(content, encoding="latin-1")
    run = report.load_run(tmp_path)
    assert [s["step"] for s in run["steps"]] == ["0_a", "1_b"] and run["steps"][1]["status"] == "failed"
    assert "1_b.json" in report.render_text(run) and said in report.render_markdown(run)


def test_different_workloads_are_not_merged(tmp_path):
    write_run(tmp_path, step("0_a"))
    other = envelope(step("1_b"), workload=WORKLOAD | {"batch_size": 9, "seed": 2})
    (tmp_path / "1_b.json").write_text(json.dumps(other))
    with pytest.raises(RecordError, match="different workloads: batch_size, seed differ"):
        report.load_run(tmp_path)


def test_a_folder_of_other_json_holds_no_record_and_stays_as_it_is(tmp_path):
    (tmp_path / "package.json").write_text('{"name": "precious"}')
    command = [sys.executable, "-m", "common.report", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and "holds no record" in ran.stderr and ran.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["package.json"]


@pytest.mark.parametrize("words", [[], ["--bogus"], ["--compare", "a"]])
def test_bad_arguments_of_the_command_are_one_line(words):
    command = [sys.executable, "-m", "common.report", *words]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "error: " in ran.stderr


def test_a_row_above_its_roof_is_doubted(tmp_path):
    write_run(tmp_path, step("0_a"))
    run = report.load_run(tmp_path)
    rate = run["steps"][0]["model_flops_per_s"]
    for roof, doubted in ((2 * rate, False), (rate / 2, True)):
        run["roofs"] = {"fp32_flops_per_s": roof, "tf32_flops_per_s": roof, "bf16_flops_per_s": roof}
        assert any("faster than the" in said for said in report.warnings(run)) == doubted


def test_rows_of_different_machines_are_named(tmp_path):
    write_run(tmp_path, step("0_a"))
    (tmp_path / "1_b.json").write_text(json.dumps(envelope(step("1_b"), device="other GPU")))
    assert "rows differ in device: GPU in 0_a; other GPU in 1_b" in report.render_text(report.load_run(tmp_path))


def test_the_command_rebuilds_everything(tmp_path):
    write_run(tmp_path, step("0_a", 300), step("1_b", 100, note="a note"))
    (tmp_path / "command").write_text("./run_all.sh --peers --data /home/me/my\\ text.txt ")
    command = [sys.executable, "-m", "common.report", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    merged = read_envelope(tmp_path / "results.json")
    assert [s["step"] for s in merged["steps"]] == ["0_a", "1_b"]
    assert merged["command"] == "./run_all.sh --peers --data 'my text.txt'"
    assert "3.00x" in ran.stdout and "1_b: a note" in ran.stdout
    written = (tmp_path / "report.md").read_text()
    for path in tmp_path.glob("*_*.json"):
        path.unlink()
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert (tmp_path / "report.md").read_text() == written, "results.json alone gives the same report"


def test_the_command_needs_no_torch(tmp_path):
    write_run(tmp_path, step("0_a"))
    code = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = [{str(tmp_path)!r}]; import runpy; "
    code += "runpy.run_module('common.report', run_name='__main__')"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_a_folder_without_records_is_one_line_and_exit_code_2(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "common.report", str(tmp_path / folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1


def test_a_failed_row_makes_exit_code_1(tmp_path):
    write_run(tmp_path, step("0_a"), step("1_b", status="failed", reason="x"))
    command = [sys.executable, "-m", "common.report", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 1


ROOFS = {"copy_bytes_per_s": 4e12, "fp32_flops_per_s": 5e13, "tf32_flops_per_s": 3e14, "bf16_flops_per_s": 7e14}
ROOFS |= {"fp8_flops_per_s": 1.3e15, "shapes": [], "square": {}, "notes": ["fp4 not measured: too new"]}


def settings(**more):
    return {"settings": {"amp_dtype": "bfloat16", "float32_matmul_precision": "high"} | more}


def test_rows_are_held_against_the_roof_of_their_precision(tmp_path):
    steps = [
        step("0_a", **settings(amp_dtype="float32", float32_matmul_precision="highest")),
        step("1_b", **settings(amp_dtype="float32")),
        step("2_c", **settings()),
        step("3_d", **settings(fp8_recipe="DelayedScaling")),
    ]
    for one, rate in zip(steps, (2.5e13, 3e13, 3.5e14, 6.5e14), strict=True):
        one["model_flops_per_s"] = rate
    write_run(tmp_path, *steps)
    (tmp_path / "roofs.json").write_text(json.dumps(ROOFS))
    run = report.load_run(tmp_path)
    assert [row["of roof"] for row in rows_of(run)] == ["50% of fp32", "10% of tf32", "50% of bf16", "50% of fp8"]
    said = report.render_text(run)
    assert "copy 4,000 GB/s" in said and "FP8 1,300 TFLOP/s" in said and "fp4 not measured" in said


@pytest.mark.parametrize("content", ["{", "[]", '{"copy_bytes_per_s": "fast"}', '{"fp8_flops_per_s": -1}'])
def test_broken_roofs_are_named_and_the_table_stands(tmp_path, content):
    write_run(tmp_path, step("0_a"))
    (tmp_path / "roofs.json").write_text(content)
    run = report.load_run(tmp_path)
    assert "roofs.json cannot be read" in report.render_text(run) and "of roof" not in rows_of(run)[0]


def test_roofs_that_failed_say_why(tmp_path):
    write_run(tmp_path, step("0_a"))
    (tmp_path / "roofs.failed").write_text("the roofs could not be measured: no luck\n")
    assert "no luck" in report.render_text(report.load_run(tmp_path))


def test_what_binds_a_row_is_in_the_table(tmp_path):
    profiled = step("0_a", profile=profile(100.0))
    run = report.load_run(write_run(tmp_path, profiled, step("1_b")))
    assert [row["bound by"] for row in rows_of(run)] == ["compute 60%", "-"]
    assert "the largest share of the step" in report.render_text(run)


def test_peers_stand_under_the_steps_and_follow_none(tmp_path):
    write_run(tmp_path, step("0_a", 300), step("1_b", 100))
    (tmp_path / "peers").mkdir()
    write_run(tmp_path / "peers", step("z_peer", 150))
    (tmp_path / "peers" / "gone.exit").write_text("failed ended with exit code 3")
    run = report.load_run(tmp_path)
    rows = rows_of(run)
    assert [row["step"] for row in rows] == ["0_a", "1_b", "peer: gone", "peer: z_peer"]
    assert rows[3]["vs baseline"] == "2.00x" and rows[3]["vs previous"] == "-" and rows[2]["status"] == "failed"


def test_a_peer_of_another_workload_is_left_out(tmp_path):
    write_run(tmp_path, step("0_a"))
    (tmp_path / "peers").mkdir()
    other = envelope(step("p"), workload=WORKLOAD | {"seed": 2})
    (tmp_path / "peers" / "p.json").write_text(json.dumps(other))
    run = report.load_run(tmp_path)
    assert len(rows_of(run)) == 1 and "peer p ran a different workload" in report.render_text(run)


def rebuild(folder):
    command = [sys.executable, "-m", "common.report", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_row_that_became_unreadable_is_kept_from_the_merge(tmp_path):
    write_run(tmp_path, step("0_a", 300), step("1_b", 100))
    (tmp_path / "roofs.json").write_text(json.dumps(ROOFS))
    rebuild(tmp_path)
    (tmp_path / "1_b.json").write_text("{")
    (tmp_path / "roofs.json").write_text("{")
    ran = rebuild(tmp_path)
    assert ran.returncode == 0 and "3.00x" in ran.stdout and "1_b: taken from results.json" in ran.stdout
    kept = read_envelope(tmp_path / "results.json")
    assert kept["steps"][1]["timing"]["median_ms"] == 100 and kept["roofs"]["fp8_flops_per_s"] == 1.3e15


@pytest.mark.parametrize(
    "wrong",
    [
        {"environment": {"commit": 5}},
        {"workload": WORKLOAD | {"parameters": "many"}},
        {"workload": WORKLOAD | {"data": 3}},
    ],
    ids=str,
)
def test_a_field_of_a_wrong_kind_is_one_line_and_replaces_nothing(tmp_path, wrong):
    write_run(tmp_path, step("0_a"))
    rebuild(tmp_path)
    before = (tmp_path / "results.json").read_text()
    (tmp_path / "0_a.json").unlink()
    (tmp_path / "roofs.json").write_text(json.dumps(ROOFS))
    (tmp_path / "1_b.json").write_text(json.dumps(envelope(step("1_b")) | wrong))
    ran = rebuild(tmp_path)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "Traceback" not in ran.stderr, ran.stderr
    assert (tmp_path / "results.json").read_text() == before


def test_odd_exit_files_do_not_stop_the_report(tmp_path):
    write_run(tmp_path, step("0_a"))
    (tmp_path / "1_b.exit").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "9_x.exit").mkdir()
    assert [row["step"] for row in rows_of(report.load_run(tmp_path))] == ["0_a", "1_b"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"settings": "x"},
        {"gpu_state": "hot"},
        {"bytes_per_step": "x"},
        {"profile": profile(1.0) | {"kernels": "abc"}},
        {"profile": profile(1.0) | {"gpu_idle_ms": "x"}},
        {"timing": {"warmup_s": 1.0, "median_ms": 1.0, "step_ms": ["a"], "p25_ms": 1.0, "p75_ms": 1.0}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_row_with_a_field_of_a_wrong_kind_is_left_out(tmp_path, wrong):
    run = report.load_run(write_run(tmp_path, step("0_a"), step("1_b", **wrong)))
    assert [row["status"] for row in run["steps"]] == ["ok", "failed"]
    assert any("1_b.json" in problem for problem in run["problems"])


def test_a_record_that_was_put_away_is_reported_and_never_written(tmp_path):
    merged = envelope(step("0_a", 300), step("1_b", 100))
    (tmp_path / "results.json").write_text(json.dumps(merged))
    (tmp_path / "results-2.json").write_text(json.dumps(envelope(step("1_b", 101))))
    (tmp_path / "ablations.json").write_text("{}")
    before = (tmp_path / "results.json").read_bytes()
    assert rebuild(tmp_path).returncode == 0
    assert (tmp_path / "results.json").read_bytes() == before
    assert "3.00x" in (tmp_path / "report.md").read_text()


def test_one_dirty_row_is_named(tmp_path):
    for name, dirty in (("0_a", False), ("1_b", True)):
        (tmp_path / f"{name}.json").write_text(json.dumps(envelope(step(name), dirty=dirty)))
    assert "rows differ in dirty: False in 0_a; True in 1_b" in report.load_run(tmp_path)["problems"]


def test_a_merge_of_a_newer_version_is_never_overwritten(tmp_path):
    write_run(tmp_path, step("0_a"))
    (tmp_path / "results.json").write_text(json.dumps(envelope(step("0_a")) | {"schema_version": 9}))
    before = (tmp_path / "results.json").read_bytes()
    ran = rebuild(tmp_path)
    assert ran.returncode == 2 and "schema version 9" in ran.stderr
    assert (tmp_path / "results.json").read_bytes() == before


def test_a_row_whose_file_is_gone_is_kept_from_the_merge(tmp_path):
    write_run(tmp_path, step("0_a", 300), step("1_b", 100))
    rebuild(tmp_path)
    (tmp_path / "1_b.json").unlink()
    ran = rebuild(tmp_path)
    assert "3.00x" in ran.stdout and "1_b: taken from results.json, because its file is gone" in ran.stdout


def test_a_second_record_of_a_step_is_named_and_left_out(tmp_path):
    write_run(tmp_path, step("0_a", 300))
    (tmp_path / "3_x.json").write_text(json.dumps(envelope(step("0_a", 100))))
    run = report.load_run(tmp_path)
    assert [row["timing"]["median_ms"] for row in run["steps"]] == [300]
    assert "left out: 3_x.json is a second record of 0_a" in run["problems"]


@pytest.mark.parametrize(
    "wrong", [{"tokens_per_s": True}, {"tokens_per_s": -5}, {"loss": [1e308]}, {"peak_rss_bytes": -1}]
)
def test_impossible_numbers_leave_a_row_out(tmp_path, wrong):
    run = report.load_run(write_run(tmp_path, step("0_a"), step("1_b", **wrong)))
    assert [row["status"] for row in run["steps"]] == ["ok", "failed"]


def test_what_is_no_regular_file_is_named(tmp_path):
    write_run(tmp_path, step("0_a"))
    os.mkfifo(tmp_path / "1_b.json")
    (tmp_path / "roofs.json").write_text("[" * 200_000)
    problems = "; ".join(report.load_run(tmp_path)["problems"])
    assert "1_b.json is not a regular file" in problems and "roofs.json cannot be read" in problems


def test_a_terminal_without_letters_gets_the_table(tmp_path):
    write_run(tmp_path, step("0_b\u00e9\x1b[31m"))
    ran = subprocess.run(
        [sys.executable, "-m", "common.report", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert ran.returncode == 0 and "0_b\\xe9 [31m" in ran.stdout


def test_names_are_no_markup_in_markdown(tmp_path):
    write_run(tmp_path, step("0_<b>|x\n# y", note="<script>"))
    rebuild(tmp_path)
    markdown, _, _ = (tmp_path / "report.md").read_text().partition("Reproduce")  # the command is a code block
    assert "<b>" not in markdown and "<script>" not in markdown and "\n# y" not in markdown and "\\|x" in markdown
