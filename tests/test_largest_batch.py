"""--batch-size max: the line through two peaks, the attempts along it, and what each way of ending says."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import runs
from conftest import ROOT

from common.errors import explain
from common.record import write_run
from ladder import largest_batch, process
from ladder.__main__ import build_parser
from report.largest_batch import LARGEST, Largest, gains, read_largest, recorded, table
from report.load import RecordError
from report.recordings import check, facts


def test_the_largest_batch_lies_on_the_line_through_two_peaks():
    slope, batches = largest_batch.predicted_batches({4: 14 * 2**30, 8: 18 * 2**30}, 100 * 2**30)
    assert slope == 2**30 and batches == [87, 84, 80]
    assert largest_batch.predicted_batches({4: 14 * 2**30, 8: 18 * 2**30}, 18 * 2**30)[1] == []
    with pytest.raises(ValueError, match="does not grow"):
        largest_batch.predicted_batches({1: 10, 2: 10}, 100)


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """A search in 100 GiB whose steps take 10 GiB and one more a sequence, and train up to `made.fits`."""
    made = largest_batch.Trials(tmp_path, [], 100 << 30, process.Stop(), 60)
    made.fits, ran = 84, {"tokens_per_s": 10.0, "peak_allocated_bytes": 0}

    def run(_, batch):
        if batch > made.fits:
            status, reason = explain(MemoryError(), batch)
            return ran | {"status": status, "reason": reason}
        trained = {"tokens_per_s": 10.0 * batch, "peak_allocated_bytes": (10 + batch) << 30}
        return trained | {"status": "ok", "reason": None}

    monkeypatch.setattr(made, "run", run)
    return made


def test_a_step_tries_smaller_batches_until_one_trains(trials):
    found = trials.largest(ROOT / "2_sdpa.py", 8)
    assert found.tried == [87, 84] and found.batch == 84 and found.equal_batch == 8 and found.status == "ok"
    assert "10.50" in table([found]) and found.tokens_per_s == 840.0
    broken = trials.largest(ROOT / "2_sdpa.py", 200)
    assert broken.status == "oom" and "try --batch-size" in table([broken])


def test_a_search_in_which_nothing_trains_says_so_and_keeps_the_equal_batch(trials):
    trials.fits = 8
    found = trials.largest(ROOT / "2_sdpa.py", 8)
    assert found.status == "failed" and found.batch is None and found.equal_batch == 8 and found.tried == [87, 84, 80]
    assert found.reason == "no attempt trained: batch 87 oom, batch 84 oom, batch 80 oom"
    assert found.reason in table([found]) and " 18.0 " in table([found])


def test_attempts_can_be_divided_into_micro_batches(trials):
    trials.accumulate = 4
    found = trials.largest(ROOT / "2_sdpa.py", 12)
    assert found.tried == [84] and found.batch == 84
    alone = trials.largest(ROOT / "2_sdpa.py", 4)
    assert alone.equal_batch == 4 and alone.batch == 84


def test_a_search_that_is_ended_tries_no_more(trials, monkeypatch):
    run = trials.run

    def ended(script, batch):
        trials.stop.requests = int(batch == 87)
        return run(script, batch)

    monkeypatch.setattr(trials, "run", ended)
    found = trials.largest(ROOT / "2_sdpa.py", 8)
    assert found.status == "interrupted" and found.tried == [87]


def test_one_sequence_is_the_largest_batch_where_two_have_no_memory(trials):
    trials.fits = 1
    found = trials.largest(ROOT / "2_sdpa.py", 1)
    assert found.status == "ok" and found.batch == found.equal_batch == 1 and found.tried == []
    trials.fits = 0
    assert trials.largest(ROOT / "2_sdpa.py", 1).status == "oom"


@pytest.mark.parametrize("chosen", [{}, {"PYTORCH_ALLOC_CONF": "backend:native"}])
def test_each_batch_has_a_process_of_its_own_and_memory_in_one_piece(chosen, tmp_path, monkeypatch):
    started = []
    for name in largest_batch.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)

    def run_cells(script, todo, log, seconds, stop, environment):
        started.append([cell["name"] for cell in todo])
        assert seconds == 60 and environment == (
            {} if chosen else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        )
        row = {"status": "ok", "reason": None, "tokens_per_s": 1.0, "peak_allocated_bytes": 2**30 * len(started)}
        Path(todo[0]["output"]).write_text(json.dumps({"steps": [row]}))

    monkeypatch.setattr(largest_batch, "run_cells", run_cells)
    trials = largest_batch.Trials(tmp_path, [], 2**30, process.Stop(), 60)
    assert trials.largest(ROOT / "2_sdpa.py", 8).batch == 8 and started == [["batch 4"], ["batch 8"]]


@pytest.mark.parametrize("option", ["--global-batch-size=8", "--no-roofs", "--no-profile", "--sweep-minutes=9"])
def test_the_largest_batch_refuses_what_it_would_ignore_before_anything_runs(option, refused):
    parser = build_parser()
    given, rest = parser.parse_known_args(["--batch-size", "max", option])
    said = refused(largest_batch.main, given, rest, [], parser, lambda *_: pytest.fail("something ran"), 60)
    assert "leave out --" in said and option.partition("=")[0] in said


def test_the_largest_batch_needs_a_gpu_and_hands_on_all_other_arguments(refused):
    parser, asked = build_parser(), []

    def check(words, gpus):
        asked.append(words)
        return {"device_type": "cpu"}

    for words in (["--batch-size", "max"], ["--batch-size=max"]):
        given, rest = parser.parse_known_args([*words, "--device", "cpu", "--data", "my book"])
        assert "--batch-size max needs a GPU" in refused(largest_batch.main, given, rest, words, parser, check, 60)
        assert asked.pop() == ["--device", "cpu", "--data", "my book"]


def test_a_search_leaves_a_record_with_its_machine_and_a_page_shows_it(tmp_path, monkeypatch, capsys):
    shutil.copy(ROOT / "2_sdpa.py", tmp_path)
    monkeypatch.setattr(largest_batch, "ROOT", tmp_path)
    monkeypatch.setattr(process.Stop, "listen", lambda self: None)

    def run_cells(script, todo, log, *_):
        batch = int(todo[0]["words"][todo[0]["words"].index("--batch-size") + 1])
        row = runs.step(script.stem, tokens_per_s=100.0 + batch, peak_allocated_bytes=batch << 30)
        write_run(Path(todo[0]["output"]), runs.run(row))

    monkeypatch.setattr(largest_batch, "run_cells", run_cells)
    facts_of_it = {"device_type": "cuda", "workload": asdict(runs.WORKLOAD), "free_bytes": 100 << 30, "pinned": []}
    words = ["--batch-size", "max"]
    given, rest = build_parser().parse_known_args(words)
    assert largest_batch.main(given, rest, words, build_parser(), lambda *_: facts_of_it, 60) == 0
    assert "197" in capsys.readouterr().out
    (path,) = tmp_path.glob(f"results/*/{LARGEST}")
    check(path)
    found, of = read_largest(path), facts([path])
    assert (of.commits, of.dirty, of.devices) == (("abc",), False, ("GPU",)) and of.started_at == "2026-01-01"
    assert found.command == "./run_all.sh --batch-size max" and (found.workload.warmup, found.workload.steps) == (2, 5)
    assert [row.batch for row in found.steps] == [97] and found.steps[0].bytes_per_sequence == 2**30
    (tmp_path / "docs" / "gpu").mkdir(parents=True)
    shutil.copy(path, tmp_path / "docs" / "gpu")
    page = recorded(tmp_path / "docs")
    assert "1.93" in page and "### gpu" in page and "commit abc" in page  # 197 tokens a second of 102
    whole = path.read_text()
    for old, new, said in (
        ('"equal_batch": 2', '"equal_batch": "two"', "equal_batch"),
        ('"equal_tokens_per_s": 102.0', '"equal_tokens_per_s": 0', "2_sdpa lacks a figure"),
        ('"peak_bytes": 104152956928', '"peak_bytes": null', "2_sdpa lacks a figure"),
        ('"status": "ok"', '"status": "banana"', "unknown status"),
    ):
        assert old in whole
        path.write_text(whole.replace(old, new))
        with pytest.raises(RecordError, match=said):
            check(path)


def test_no_text_of_a_record_can_harm_the_page(tmp_path):
    """A command with lines, and steps and reasons with markup."""
    (tmp_path / "gpu").mkdir()
    rows = [asdict(Largest("2<b>", "failed", "why <script>"))]
    found = {"command": "x\n\n# odd\n<!-- results:end -->", "started_at": None, "environment": None, "workload": None}
    (tmp_path / "gpu" / LARGEST).write_text(json.dumps(found | {"steps": rows}))
    page = recorded(tmp_path)
    assert "\n# odd" not in page and "<b>" not in page and "<script>" not in page


def test_what_the_larger_batch_buys_is_said_and_where_it_costs():
    def row(step, faster):
        return Largest(step, "ok", equal_batch=1, equal_tokens_per_s=100.0, batch=2, tokens_per_s=100.0 * faster)

    (said,) = gains([row("2_c", 0.96), row("3_d", 1.2), Largest("4_e")])
    assert "trains 0.96 to 1.20 times the tokens a second" in said
    assert gains([row("2_c", 0.7), row("3_d", 1.0)])[1].startswith("Slower there: 2_c (0.70). Why is not measured.")
    assert gains([Largest("4_e")]) == []


def test_no_search_is_recorded_where_there_is_none(tmp_path):
    assert "No largest batches are recorded yet" in recorded(tmp_path)
