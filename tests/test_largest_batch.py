"""--batch-size max: the line through two peaks, the attempts along it, and what each way of ending says."""

import json
from pathlib import Path

import pytest
from conftest import ROOT

from common.errors import explain
from ladder import largest_batch, process
from ladder.__main__ import build_parser


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
    assert "10.50" in largest_batch.table([found]) and found.tokens_per_s == 840.0
    broken = trials.largest(ROOT / "2_sdpa.py", 200)
    assert broken.status == "oom" and "try --batch-size" in largest_batch.table([broken])


def test_a_search_in_which_nothing_trains_says_so_and_keeps_the_equal_batch(trials):
    trials.fits = 8
    found = trials.largest(ROOT / "2_sdpa.py", 8)
    assert found.status == "failed" and found.batch is None and found.equal_batch == 8 and found.tried == [87, 84, 80]
    assert found.reason == "no attempt trained: batch 87 oom, batch 84 oom, batch 80 oom"
    assert found.reason in largest_batch.table([found]) and " 18.0 " in largest_batch.table([found])


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


def test_each_batch_has_a_process_of_its_own(tmp_path, monkeypatch):
    started = []

    def run_cells(script, todo, log, seconds, *_):
        started.append([cell["name"] for cell in todo])
        assert seconds == 60
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
