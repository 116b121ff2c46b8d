"""Parity: the statistics of a study, its command, and faults that a study must see."""

import json
import math
import signal
import subprocess
import sys
from statistics import stdev

import conftest
import numpy as np
import pytest
import torch
from test_documents import tables_of

from anatomy import ablations
from anatomy import parity as command
from common import benchmark, data
from common.record import write_json
from ladder import process
from report import parity, parity_page, recordings
from report.load import RecordError, read_json


def trained(row, heldout, kind="step", **fields):
    """A run of `row` per held-out loss, with seeds 1, 2, ...; its last training losses are 1 above it."""
    runs = [{"seed": seed, "heldout_loss": loss, "loss": [9.0] * 15 + [loss + 1] * 50}
            for seed, loss in enumerate(heldout, 1)]  # fmt: skip
    return [{"row": row, "script": "2_sdpa", "kind": kind, "status": "ok", **run, **fields} for run in runs]


def study_of(folder, *runs, name="parity"):
    """The study of these runs, written below `folder` and read again; by its default name with a skipped one more."""
    runs = [*runs, *([trained("4_x", [0.0], status="skipped", reason="no GPU")] if name == "parity" else [])]
    names = "preset lr warmup steps n_layer n_head n_embd seq_len vocab_size batch_size"
    path = folder / "machine" / name / parity.STUDY
    path.parent.mkdir(parents=True)
    content = {"command": "python", "environment": None, "workload": dict.fromkeys(names.split(), 1)}
    write_json(path, content | {"runs": [run for each in runs for run in each]})
    return parity.read_study(path)


def test_each_figure_is_what_arithmetic_gives(tmp_path):
    ran = {"settings": {"amp_dtype": "bfloat16"}}
    study = study_of(tmp_path, trained("2_sdpa", [2.0, 2.1, 2.3], **ran), trained("3_x", [2.2, 2.1, 2.4, 9.0]))
    plain, other = (parity.by_seed(study, row, parity.heldout_loss) for row in ("2_sdpa", "3_x"))
    assert plain == {1: 2.0, 2: 2.1, 3: 2.3} and parity.by_seed(study, "4_x", parity.heldout_loss) == {}
    assert parity.by_seed(study, "2_sdpa", parity.first_losses)[1] == pytest.approx((15 * 9 + 35 * 3) / 50)
    assert parity.mean(plain) == pytest.approx(6.4 / 3) and parity.mean({}) is None
    assert parity.deviation(plain) == pytest.approx(stdev([2.0, 2.1, 2.3])) and parity.deviation({1: 2.0}) is None
    assert parity.difference(other, plain) == pytest.approx(0.1) and parity.difference({4: 1.0}, plain) is None
    assert parity.deviations(other, plain) == pytest.approx(0.1 / stdev([2.0, 2.1, 2.3]))
    assert parity.precision(study, "2_sdpa") == "bfloat16" and parity.precision(study, "3_x") is None
    assert parity.smoothed([1.0] * 20 + [2.0] * 20 + [3.0]) == [1.0, 2.0]
    until = parity.by_seed(study, "2_sdpa", parity.losses_until(25))  # 10 of its 20 losses are the early ones
    assert until[1] == pytest.approx((9 + 3) / 2) and parity.by_seed(study, "2_sdpa", parity.losses_until(66)) == {}
    assert parity.relative({1: 3.0, 4: 1.0}, {1: 2.0}) == {1: 0.5}
    assert parity.curve(study, "2_sdpa")[-1] == pytest.approx((3.0 + 0.4 / 3, 3.0, 3.3))
    assert parity.curve(study, "3_x", "2_sdpa")[-1] == pytest.approx((0.1, 0.0, 0.2))
    plain = {1: 1.9, 2: 2.0, 3: 2.1}
    reach = 4.303 * 0.1 / math.sqrt(3)  # 0.248
    for shift in (0.24, -0.24, 0.26, -0.26):
        shifted = {seed: loss + shift + 0.1 * (seed - 2) for seed, loss in plain.items()}
        low, high = parity.interval(shifted, plain)
        assert (high - low) / 2 == pytest.approx(reach) and (low + high) / 2 == pytest.approx(shift)
        assert parity.verdict(shifted, plain) == (parity.ALIKE if abs(shift) < reach else parity.DIFFERENT)
    assert parity.verdict({1: 5.0, 2: 5.0, 4: 5.0}, plain) == parity.TOO_FEW
    assert parity.interval({1: 5.0}, plain) is None


@pytest.mark.parametrize("seeds", [3, 6, 10, 12])
def test_rows_without_a_difference_are_different_in_one_case_of_twenty(seeds):
    drawn = np.random.default_rng(0).normal(size=(20_000, 2, seeds))
    said = [parity.verdict(dict(enumerate(a)), dict(enumerate(b))) for a, b in drawn]
    assert said.count(parity.DIFFERENT) / len(said) == pytest.approx(0.05, rel=0.15), "docs/parity.md says so"


def test_the_page_names_faults_that_a_study_does_not_see_and_rows_that_did_not_train(tmp_path):
    plain, sharp = trained("2_sdpa", [2.0, 2.1, 2.2]), trained("sharp", [3.0] * 3, parity.MUTATION)
    study = study_of(tmp_path, plain, sharp, trained("dead", [2.1, 2.0, 2.2], parity.MUTATION))
    text = parity_page.tables(tmp_path)
    heldout, _, early, faults, _ = tables_of(text)
    assert "The held-out loss sees: sharp." in text and "No measure sees: dead." in text
    assert "4_x, seed 1: skipped: no GPU" in text
    assert heldout["4_x"]["verdict"] == "skipped" and set(heldout) == {"2_sdpa", "4_x"}
    assert early == {"4_x": {"row": "4_x", "step 35": "-", "step 65": "-"}}
    assert [faults[name]["seen"] for name in ("sharp", "dead")] == ["yes", "no"]
    assert "- 2_sdpa, seed 3: not trained yet" not in text
    assert parity_page.curves_png(study).startswith(b"\x89PNG") and faults["sharp"]["difference"] == "+0.9000"
    assert "The held-out loss, in nats. \n" in text, "nothing is compared"
    others = trained("close", [2.05, 2.1, 2.2]), trained("low", [1.0] * 3), trained("high", [9.0] * 3)
    said = parity.describe_rows(study_of(tmp_path / "more", plain, *others, trained("new", [2.0])), parity.heldout_loss)
    ends = "No difference to 2_sdpa", "close.", "lower", "low.", "higher", "high.", "lack seeds", "new."
    assert [said.index(part) for part in ends] == sorted(said.index(part) for part in ends)
    absent = trained("absent", [0.0], parity.MUTATION, status="skipped")
    for runs, said in (
        ((plain, sharp, absent), "sees: sharp. These lack seeds: absent."),
        ((plain,), "No fault"),
        ((plain[:2], sharp), "These lack seeds: sharp."),
    ):
        assert said in parity.describe_faults(study_of(tmp_path / said, *runs))


def test_a_study_of_few_steps_has_no_first_losses(tmp_path):
    short, losses = {"loss": [9.0] * 20}, [2.0, 2.1, 2.2]
    runs = trained("2_sdpa", losses, **short), trained("sharp", [3.0] * 3, parity.MUTATION, **short)
    study = study_of(tmp_path, *runs, trained("3_x", [2.0, 2.2, 2.1], **short))
    assert list(parity.measures(study)) == ["held-out loss"] and parity.count_comparisons(study) == 1
    assert parity.describe_faults(study) == "The held-out loss sees: sharp."
    assert "first 50" not in parity_page.tables(tmp_path)


def test_a_row_that_lacks_a_seed_is_not_trained_yet_and_its_study_not_recorded(tmp_path):
    study = study_of(tmp_path, trained("2_sdpa", [2.0, 2.1]), trained("3_x", [2.2]))
    assert parity.missing(study) == [("3_x", 2), ("4_x", 2)] and parity.reference(study) == "2_sdpa"
    text = parity_page.tables(tmp_path)
    assert "\n- 3_x, seed 2: not trained yet\n" in text
    path = tmp_path / "machine" / "parity" / parity.STUDY
    planned = recordings.Recording("a/parity.json", None, (recordings.Piece(1, "x --rows 2 4_x --seeds 1"),))
    assert not recordings.is_whole([path], planned)
    write_json(path, read_json(path) | {"runs": [run for run in read_json(path)["runs"] if run["seed"] == 1]})
    assert recordings.is_whole([path], planned)
    more = recordings.Recording("a/parity.json", None, (recordings.Piece(1, "x --rows 2 'dead MLP'"),))
    assert not recordings.is_whole([path], more), "a row of its command is not in it"


def test_faults_that_were_recorded_apart_are_those_of_the_study_of_the_same_workload(tmp_path):
    plain, sharp = trained("2_sdpa", [2.0, 2.1, 2.2]), trained("sharp", [3.0] * 3, parity.MUTATION)
    study_of(tmp_path, trained("3_compile", [2.0, 2.1, 2.2]))
    study_of(tmp_path, plain, sharp, name="parity-faults")
    ((folder, study),) = parity_page.recorded_studies(tmp_path)
    assert folder.name == "parity" and parity.rows(study) == ["3_compile", "4_x", "2_sdpa"]
    assert "The held-out loss sees: sharp." in parity_page.tables(tmp_path)
    study_of(tmp_path, plain, name="parity-again")
    with pytest.raises(RecordError, match="parity-faults trains 2_sdpa with seed 1 again"):
        parity.studies(tmp_path / "machine")


def test_rows_have_names_and_numbers_and_faults_run_by_name_only():
    named, default = command.rows_named(["3", "te_layer", "dead MLP", "3_compile"]), command.rows_named(None)
    assert [one.row for one in named] == ["3_compile", "peers/te_layer", "dead MLP"]
    assert {"0_baseline", "peers/te_layer", "fused AdamW, step 3"} <= {one.row for one in default}
    chosen = [ablations.chosen_variants(ablations.variants(), words) for words in (None, ["2_sdpa"], ["dead"])]
    assert all(rows and not any(one.kind == parity.MUTATION for one in rows) for rows in (default, *chosen[:2]))
    assert [one.name for one in chosen[2]] == ["dead MLP", "dead MLP, step 4"]


def test_a_study_is_continued_another_workload_is_refused_and_ctrl_c_keeps_what_ran(
    tmp_path, monkeypatch, capsys, refused
):
    path = tmp_path / "x.json"
    words = ["--output", str(path), *conftest.FAST]
    monkeypatch.setattr(process.Stop, "listen", lambda _: None)

    def study(*more):
        monkeypatch.setattr(sys, "argv", ["", *words, *more])
        command.main()

    def says(*more):
        with pytest.raises(SystemExit) as ended:
            study(*more)
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert "seed 1, dead MLP: ok" in says("--seeds", "1", "--rows", "dead MLP", "4", "--at-once", "2")
    said = says("--seeds", "1", "2", "--rows", "dead MLP")
    assert "seed 2, dead MLP: ok" in said and "seed 1" not in said
    for wrong, said in ((["--lr", "1"], "another workload"), (["--seed", "3"], "--seeds")):
        assert said in refused(study, "--seeds", "1", "--rows", "dead MLP", *wrong)
    said = says("--seeds", "1", "2", "--rows", "dead MLP")
    assert "ok" not in said, "nothing was left to train"
    assert said.split("\n")[1:] == ["The mean of the first 50 training losses needs 50 training steps.",
                                    "These lack seeds: dead MLP.", ""]  # fmt: skip
    for wrong, said in ((["--seeds", "-1"], "--seeds"), (["--at-once", "2", "--device=cuda:1"], "divide the GPUs")):
        assert said in refused(study, "--rows", "dead MLP", *wrong)
    held = json.loads(path.read_text())
    for damage in ({"environment": "abc"}, {"runs": [held["runs"][0] | {"loss": [math.nan]}]}, {"runs": [{}]}):
        (tmp_path / "damaged.json").write_text(json.dumps(held | damage))
        assert "holds no study" in refused(study, "--output", str(tmp_path / "damaged.json"))
    beside = command.Study(path, held["workload"], held["environment"]["device"], "")
    write_json(path, held | {"runs": [run | {"seed": run["seed"] + 10} for run in held["runs"]] + held["runs"]})
    beside.add(command.rows_named(["4"])[0], 9, None, {"status": "skipped"})
    assert len(parity.read_study(path).runs) == 2 * len(held["runs"]) + 1, "another call wrote to it meanwhile"
    write_json(path, held)
    skipped, first, other = parity.read_study(path).runs
    assert (first.row, first.status, other.seed, skipped.status) == ("dead MLP", "ok", 2, "skipped")
    assert len(first.loss) == 3 and first.loss != other.loss and first.settings.optimizer
    path.unlink()
    module, pipe = [sys.executable, "-m", "anatomy.parity"], subprocess.PIPE
    long = [*module, *words, "--rows", "4", "2", "--steps", "100000"]
    child = subprocess.Popen(long, cwd=conftest.ROOT, stdout=pipe, stderr=pipe, text=True)
    assert ": skipped" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130 and child.stderr.read().count("\n") == 1
    assert [run.row for run in parity.read_study(path).runs] == ["4_transformer_engine"]


def test_runs_at_the_same_time_divide_gpus_and_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    for variable in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)

    def environments(count, gpus):
        free = command.places(count, {"device_type": "cuda", "gpus": gpus})
        return [free.get() for _ in range(count)]

    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments(3, 2)] == ["0", "1", "0"]
    assert environments(2, 1) == [{"OMP_NUM_THREADS": "8"}] * 2 and environments(1, 2) == [{}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,-1,8")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments(3, 2)] == ["5", "7", "5"]


def trained_runs(monkeypatch, folder, row, seeds, kind=parity.MUTATION):
    """Runs of the 2_sdpa.py in a folder, on letters of which nine in ten follow from the two before by a random table:
    attention finds the two, the MLP combines them. On real text so small a model hides a dead MLP for a thousand steps.
    One head of 64 shows a missing scale; with fewer tokens a step, seeds differ more than a fault does, and with fewer
    steps some still learn the table."""
    monkeypatch.setattr(conftest, "ROOT", folder)
    random = np.random.default_rng(0)
    table, letters = random.integers(5, size=(5, 5)), random.integers(5, size=200_000)
    for k in np.flatnonzero(random.random(len(letters)) < 0.9)[2:]:
        letters[k] = table[letters[k - 1], letters[k - 2]]
    config = conftest.GPTConfig(n_layer=2, n_head=1, n_embd=64, seq_len=16, vocab_size=5)
    more = {"batch_size": 32, "steps": 240, "warmup": 0, "lr": 3e-3, "text": data.Text(letters.astype(np.uint8), "")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads wait for each other
    heldout = []
    for seed in seeds:
        one = conftest.built("2_sdpa", monkeypatch, config=config, seed=seed, **more)
        for batch in one.batches[:-1]:
            one.train_step(*batch)
        heldout.append(benchmark.heldout_loss(one.model, one.args))
    torch.set_num_threads(threads)
    return trained(row, heldout, kind)


def test_a_study_sees_every_fault_and_other_seeds_of_the_same_script_differ_less(tmp_path, monkeypatch):
    runs = [trained_runs(monkeypatch, conftest.ROOT, "2_sdpa", (1, 2, 3), "step")]
    runs.append(trained_runs(monkeypatch, conftest.ROOT, "other seeds", (4, 5, 6)))
    faults = [one for one in command.every_row() if one.kind == parity.MUTATION and one.script == "2_sdpa"]
    for one in faults:
        one.path(tmp_path)
        runs.append(trained_runs(monkeypatch, tmp_path, one.row, (1, 2, 3)))
    study = study_of(tmp_path, *runs)
    said = [parity.fault_verdict(study, one.row, parity.heldout_loss) for one in faults]
    assert len(faults) == 3 and said == [parity.DIFFERENT] * 3
    losses = {row: parity.by_seed(study, row, parity.heldout_loss) for row in ("2_sdpa", *parity.rows(study, True))}
    apart = {row: abs(parity.mean(each) - parity.mean(losses["2_sdpa"])) for row, each in losses.items()}
    # Their verdict would be DIFFERENT by chance on one processor in twenty, as each rounds in its own way.
    assert all(apart[one.row] > 3 * apart["other seeds"] for one in faults)
