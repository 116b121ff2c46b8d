"""Records from disk: what is damaged, hostile or missing becomes a failed row or one line, and the rest
stands."""

import json
import os
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem

import pytest
import runs

from common.record import Settings, Study, write_json
from report import doubts
from report.derive import derive
from report.load import RecordError, _harmless, load, read
from report.table import main_rows

ODD = [
    ("-1", "step_ms", 0),
    ('[{"step": "1_b", "status": "ok"}]', "passes"),
    ("0", "step_ms", 0),
    ("[]", "step_ms"),
    ('{"magic": {}}', "profile", "categories"),
    ('"magic"', "profile", "forward", 0, "category"),
    ('"great"', "status"),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{'.'.join(map(str, odd[1:]))}={odd[0]}")
def test_an_odd_field_is_one_failed_row_and_the_others_stand(tmp_path, odd):
    raw, *keys = odd
    folder = runs.plan(tmp_path, "0_a", "1_b", "2_c")
    for name in ("0_a", "2_c"):
        runs.put(folder, runs.row(name))
    content = asdict(runs.run(runs.row("1_b", profile=runs.profile(100.0))))
    reduce(getitem, keys[:-1], content["rows"][0])[keys[-1]] = "@@"
    (folder / "1_b.json").write_text(json.dumps(content).replace('"@@"', raw))
    loaded = load(folder)
    assert [row.status for row in loaded.rows] == ["ok", "failed", "ok"]
    assert (
        loaded.rows[1].step == "1_b"
        and "cannot be used" in loaded.rows[1].reason
        and "\n" not in loaded.rows[1].reason
    )
    with pytest.raises(RecordError):
        read(folder / "1_b.json")


@pytest.mark.parametrize(("key", "value"), [("loss", [1e-17, -1e-17]), ("cosine", 1e-20), ("lr", 1e-16)])
def test_a_loss_a_cosine_and_a_rate_may_be_small(key, value):
    assert _harmless({key: value}) == {key: value}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{ broken", "not readable JSON"),
        ("[" * 200_000, "not readable JSON"),
        ('{"schema_version": 2, "steps": [3]}', "schema version 3"),
        ('{"schema_version": 3, "rows": []}', "command"),
        (json.dumps(asdict(runs.run())), "no rows"),
        (json.dumps(asdict(runs.run(runs.row("0_x"), work=runs.workload(batch_size=None)))), "its shape"),
        (json.dumps(asdict(runs.run(runs.row("0_a"), runs.row("0_a")))), "two of one name"),
        (json.dumps(asdict(runs.run(runs.row("0_a"))) | {"environment": 5}), "environment"),
        (json.dumps(asdict(runs.run(runs.row("0_a"), work=runs.workload(tokens_per_step=0)))), "of nothing"),
        (json.dumps(asdict(runs.run(runs.row("0_a"), work=runs.workload(gpus=0)))), "of nothing"),
        (
            json.dumps(asdict(runs.study("scaling", {"1": runs.run(peers=[runs.row("p")])}))),
            "no part of a study",
        ),
        (
            json.dumps(
                asdict(runs.study("sweep", {"1": runs.run(runs.row("a"), work=runs.workload(n_layer=None))}))
            ),
            "no part of a study",
        ),
    ],
)
def test_a_file_that_is_no_record_is_one_line(tmp_path, content, said):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=said) as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


def test_only_files_that_the_plan_names_are_read_and_none_outside_the_folder(tmp_path):
    folder = runs.plan(tmp_path / "run", "0_a", "1_b")
    runs.put(folder, runs.row("0_a"))
    runs.put(folder, runs.row("2_foreign"))
    runs.put(tmp_path, runs.row("1_b"))
    os.mkfifo(folder / "1_b.json")  # would wait for ever
    assert [(row.step, row.status) for row in load(folder).rows] == [("0_a", "ok"), ("1_b", "failed")]
    for output in ("../1_b.json", str(tmp_path / "1_b.json")):
        with pytest.raises(RecordError, match="outside the run folder"):
            load(runs.plan(tmp_path / "run", ("1_b", output)))
    for said, folder in (("no file results.json", tmp_path), ("is not a folder", tmp_path / "absent")):
        with pytest.raises(RecordError, match=said):
            load(folder)


def test_a_run_names_the_machine_of_its_times_where_a_row_without_ran_again_on_another(tmp_path):
    folder = runs.plan(tmp_path, "0_a", "1_b")
    runs.put(folder, runs.row("0_a", status="oom", reason="out of memory"), gpu_uuid="B")
    runs.put(folder, runs.row("1_b"), gpu_uuid="A")
    loaded = load(folder)
    assert loaded.environment.gpu_uuid == "A" and loaded.problems == []
    runs.put(folder, runs.row("1_b", status="oom", reason="out of memory"), gpu_uuid="A")
    assert load(folder).environment.gpu_uuid == "B"


def test_rows_of_other_variables_are_not_compared_without_a_word(tmp_path):
    folder = runs.plan(tmp_path, "0_a", "1_b")
    runs.put(folder, runs.row("0_a"), variables={"CUDA_LAUNCH_BLOCKING": "1"})
    runs.put(folder, runs.row("1_b"))
    (problem,) = load(folder).problems
    assert problem == "rows differ in CUDA_LAUNCH_BLOCKING: 1 in 0_a; not set in 1_b"
    runs.put(
        folder, runs.row("1_b", settings=Settings(captured=True)), variables={"CUDA_LAUNCH_BLOCKING": "1"}
    )
    launched, replayed = derive(load(folder)).lines
    assert launched.doubts == ["CUDA_LAUNCH_BLOCKING made the host wait for every kernel"]
    assert replayed.doubts == [], "the host launches it at once"


def test_runs_of_a_study_may_be_of_two_cards_and_not_of_two_versions(tmp_path):
    places = [("2_sdpa", "2_sdpa, seed 1/2_sdpa.json"), ("3_compile", "3_compile, seed 1/3_compile.json")]
    folder = runs.plan(tmp_path, *places, kind="parity")
    for torch, problems in (("1", 0), ("2", 1)):
        runs.put(folder, runs.row("2_sdpa"), places[0][1], gpu_uuid="A", versions={"torch": "1"})
        runs.put(folder, runs.row("3_compile"), places[1][1], gpu_uuid="B", versions={"torch": torch})
        first = next(iter(load(folder).runs.values()))
        assert len(first.problems) == problems, first.problems


def test_a_run_names_the_versions_that_any_of_its_rows_knows(tmp_path):
    folder = runs.plan(tmp_path, "0_a", "1_b")
    runs.put(folder, runs.row("0_a"), versions={"torch": "1"})
    runs.put(folder, runs.row("1_b"), versions={"torch": "1", "nanogpt": "abc"})
    assert load(folder).environment.versions == {"torch": "1", "nanogpt": "abc"}
    runs.put(folder, runs.row("1_b"), versions={"torch": "2"})
    assert load(folder).environment.versions == {"torch": "1"} and "torch" in load(folder).problems[0]


def test_rows_without_a_record_and_rows_of_other_work_or_of_another_name_say_so(tmp_path):
    folder = runs.plan(tmp_path, "0_a", "1_b", "2_c", "3_d", "4_e", "peers/p")
    runs.put(folder, runs.row("0_a"))
    runs.put(folder, runs.row("1_b"), work=runs.workload(batch_size=9, seed=2))
    runs.put(folder, runs.row("2_c", 50.0), device="B", gpu_uuid="B", versions={"torch": "B"})
    runs.put(folder, runs.row("x"), "4_e.json")
    runs.put(folder, runs.row("p", 50.0), "peers/p.json")
    loaded = load(folder)
    assert [row.status for row in loaded.rows] == ["ok", "failed", "ok", "not run", "failed"]
    assert "batch_size, seed differ" in loaded.rows[1].reason and "--output" in loaded.rows[3].reason
    assert [(row.step, row.status) for row in loaded.peers] == [("p", "ok")]
    both = ("device: GPU", "gpu_uuid: None", "torch: 2.x")
    assert loaded.problems == [f"rows differ in {value} in 0_a, p; B in 2_c" for value in both]
    figures = derive(loaded)
    cells = " ".join(f"{row['ms']} {row['x above']}" for row in main_rows(figures))
    assert cells == "100.0? - failed - 50.0? 2.00? not run - failed - 50.0? -"
    said = (loaded.problems[0], "0_a, 2_c, p: rows differ in more than their scripts")
    assert all(text in shown for shown in runs.printed(loaded) for text in said)
    assert "2.00? times faster than 0_a" in runs.printed(loaded)[2]


def test_a_row_whose_script_changed_after_the_run_began_says_so(tmp_path):
    folder = runs.plan(tmp_path, "0_a", "1_b")
    plan = json.loads((folder / "plan.json").read_text()) | {"code": {"0_a.py": "1", "1_b.py": "2"}}
    write_json(folder / "plan.json", plan)
    for step, code in (("0_a", "1"), ("1_b", "3")):
        runs.put(folder, runs.row(step, code_sha256=code))
    assert load(folder).problems == ["rows differ in code: 1_b changed after the run began"]


def test_rows_of_other_numbers_of_threads_are_told(tmp_path):
    folder = runs.plan(tmp_path, "0_a", "1_b")
    runs.put(folder, runs.row("0_a"), cpu_threads=2)
    runs.put(folder, runs.row("1_b"), cpu_threads=1)
    assert load(folder).problems == ["rows differ in cpu_threads: 2 in 0_a; 1 in 1_b"]


def test_a_later_commit_of_the_same_code_may_add_rows(tmp_path):
    folder = runs.plan(tmp_path, "0_a", "1_b")
    for step, commit in (("0_a", "a"), ("1_b", "b")):
        runs.put(folder, runs.row(step), commit=commit)
    assert not load(folder).problems


def test_passes_are_merged_and_a_row_has_a_time_only_if_no_pass_ended_without(tmp_path):
    places, names = ("", "pass-2/", "pass-3/"), ("0_a", "1_b", "2_c")
    folder = runs.plan(tmp_path, *((name, f"{place}{name}.json") for name in names for place in places))
    for k, ms in ((1, 100.0), (2, 130.0), (3, 104.0)):
        place = folder if k == 1 else folder / f"pass-{k}"
        runs.put(place, runs.row("0_a", ms, product_ms=[ms / 5] * 2))
        if k < 3:
            runs.put(place, runs.row("1_b", status="oom" if k == 2 else "ok", reason="too large"))
            runs.put(place, runs.row("2_c", ms))
    loaded = load(folder)
    a, b, c = loaded.rows
    assert [one.step_ms[1] for one in a.passes] == [100.0, 130.0, 104.0] and a.step_ms[1] == 104.0
    assert (b.status, b.reason, len(c.passes)) == ("oom", "pass 2 of 3: too large", 2)
    figures = derive(loaded)
    said = ["2_c ran in 2 of 3 passes only", "median of 2 to 3 passes, 30.0% apart at most"]
    assert loaded.problems == said[:1] and doubts.remarks(figures)[-2:] == said
    texts = [row["ms"] for row in main_rows(figures, detailed=True)]
    assert texts == ["104.0? (100.0-130.0)", "oom", "115.0 (100.0-130.0)"]


def test_the_folder_of_an_output_names_the_run_of_a_study(tmp_path):
    folder = runs.plan(tmp_path, *[("2_c", f"{at}/2_c.json") for at in ("1", "2-ddp")], kind="scaling")
    runs.put(folder / "1", runs.row("2_c"))
    runs.put(folder / "2-ddp", runs.row("2_c"), work=runs.workload(gpus=2, parallel="ddp"))
    loaded = load(folder)
    assert (
        isinstance(loaded, Study)
        and [*loaded.runs] == ["1", "2-ddp"]
        and loaded.runs["2-ddp"].workload.gpus == 2
    )


def test_roofs_are_taken_and_damaged_ones_are_named(tmp_path):
    folder = runs.plan(tmp_path, "0_a")
    runs.put(folder, runs.row("0_a"))
    write_json(folder / "roofs.json", asdict(runs.roofs()))
    loaded = load(folder)
    assert loaded.roofs.rate("fp32", burst=True) == pytest.approx(1e14)
    (folder / "roofs.json").write_text('{"products": 5}')
    loaded = load(folder)
    assert loaded.roofs is None and len(loaded.problems) == 1 and "left out" in loaded.problems[0]


def test_no_text_of_a_record_harms_a_terminal_or_a_page(tmp_path):
    text = runs.HOSTILE
    odd = runs.row(
        text, note=text, settings=replace(runs.SETTINGS["2_sdpa"], optimizer=text), source=f"{text}\n{text}"
    )
    peer = runs.row("p", status="failed", reason=text)
    work = replace(runs.workload(preset=text), text=text)
    run = runs.run(
        odd, runs.row("1_b"), peers=[peer], work=work, problems=[text], device=text, versions={text: text}
    )
    run.command = text
    text, markdown, html = runs.printed(load(runs.write(tmp_path, run)))
    assert all(c.isprintable() or c == "\n" for c in text + markdown)
    assert "<script" not in html and 'href="javascript' not in html and "&lt;script&gt;" in html
    prose = [line for line in markdown.splitlines() if not line.startswith("    ")]  # no code
    assert not any("<script" in line or "](" in line.replace("\\](", "") for line in prose)


def test_a_row_without_losses_or_workload_has_its_times_alone(tmp_path):
    run = runs.run(runs.row("0_a", loss=[], step_ms=[5.0], peak_bytes=None))
    run.workload = run.environment = None
    text, markdown, html = runs.printed(load(runs.write(tmp_path, run)))
    assert "workload unknown" in markdown and "5.00" in text and "unknown machine" in html
