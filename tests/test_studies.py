"""Studies: every patch fits, a folder continues, what a study names its rows; the guide's loop."""

import contextlib
import json
import math
import re
import runpy
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT

from common.options import parse_args
from common.text import Skip
from ladder import ablations, loop, parity, patches, process, rows, running


@pytest.mark.parametrize("key", patches.variants())
def test_a_patch_applies_and_the_script_stays_python(key, tmp_path):
    variant = patches.variants()[key]
    script = patches.write_script(key, f"{variant['Script']}.py", tmp_path)
    assert variant["Variant"] and script.read_text() != (ROOT / f"{variant['Script']}.py").read_text()
    compile(script.read_text(), str(script), "exec")


@pytest.mark.slow
def test_fp16_with_loss_scaling_trains(tmp_path):
    script = patches.write_script("fp16-with-loss-scaling", "1_cublas.py", tmp_path)
    words = [
        "--device",
        "cpu",
        "--n-layer",
        "1",
        "--n-head",
        "2",
        "--n-embd",
        "32",
        "--seq-len",
        "32",
        "--steps",
        "40",
    ]
    args = parse_args(script, None, [*words, "--output", str(tmp_path / "x.json")])
    train_step, *_ = runpy.run_path(str(script))["main"](args)
    losses = [train_step(*batch).item() for batch in args.batches()]
    assert all(map(math.isfinite, losses)) and statistics.fmean(losses[-5:]) < 0.9 * losses[0]


RECORDS = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from common.record import Environment, Row, Run, write_json
words, script = sys.argv[1:], Path(__file__)
fault = "0 * self." + "mlp(" in script.read_text()
seed = int(words[words.index("--seed") + 1]) if "--seed" in words else 0
loss = 2 + 0.1 * seed + fault * (0.5 + 0.01 * seed)  # a fault is 0.5 nats worse, and slower
row = Row(script.stem, "ok", step_ms=[15.0 if fault else 10.0] * 3, loss=[loss] * 60)
row.heldout, row.warmup_s = [(1, loss)], 1.0
write_json(Path(words[-1]), Run("python x.py", None, Environment("GPU", "cuda"), None, [row]))
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Studies of stand-in scripts; returns what their commands do: study(module, words) -> exit code."""
    facts = {
        "device": "GPU",
        "pinned": {},
        "device_type": "cuda",
        "free_bytes": None,
        "messages": ["GPU: one"],
    }
    monkeypatch.setattr(rows, "check", lambda arguments, *_, **__: facts | {"workload": None})

    def script_command(script, words, processes):
        copy = tmp_path / "stand-in" / script.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(RECORDS + "\n".join(f"# {line}" for line in script.read_text().splitlines()))
        return [sys.executable, str(copy), *words]

    monkeypatch.setattr(process, "script_command", script_command)

    def run(module, *words):
        monkeypatch.setattr(sys, "argv", ["x", *words])
        return module.main()

    return run


def test_a_study_trains_every_row_with_every_seed_continues_and_is_reported(tmp_path, study, capfd):
    folder = tmp_path / "study"
    words = ["--rows", "0", "dead-mlp-all", "--output", str(folder), "--seeds"]
    assert study(parity, *words, "1") == 0 and "row" not in capfd.readouterr().err
    first = (folder / "0_baseline, seed 1" / "0_baseline.json").stat().st_mtime_ns
    begun = json.loads((folder / "plan.json").read_text()) | {"started_at": "2020-01-01"}
    (folder / "plan.json").write_text(json.dumps(begun))
    assert study(parity, *words, "1", "2", "3") == 0
    said = capfd.readouterr().out
    assert said.count("10.0 ms a step") == 2 and said.count("15.0 ms a step") == 2, (
        "what is there is not trained again"
    )
    assert (folder / "0_baseline, seed 1" / "0_baseline.json").stat().st_mtime_ns == first
    content = json.loads((folder / "results.json").read_text())
    once = "python -m ladder.parity --rows 0 dead-mlp-all --seeds 1"
    assert content["command"] == f"{once} && {once} 2 3" and content["kind"] == "parity"
    assert content["started_at"] == "2020-01-01", "when its first row began"
    assert (
        list(content["runs"])[:2] == ["0_baseline, seed 1", "dead-mlp-all, seed 1"]
        and len(content["runs"]) == 6
    )
    assert content["runs"]["dead-mlp-all, seed 2"]["rows"][0]["loss"][0] == pytest.approx(2.72)
    plan = json.loads((folder / "plan.json").read_text())
    device, code = {"device": "x"}, {"code": plan["code"] | {"0_baseline.py": "x"}}
    for more, other, said in (
        (["1", "--preset", "gpt2"], {}, "0_baseline, seed 1/0_baseline.json"),
        (["1"], device, "device differ"),
        (["1"], code, "the code of 0_baseline.py differ"),
    ):
        (folder / "plan.json").write_text(json.dumps(plan | other))
        with pytest.raises(SystemExit, match="2"):
            study(parity, *words, *more)
        assert "holds another run: " in (error := capfd.readouterr().err) and said in error
    with pytest.raises(SystemExit, match="2"):
        study(ablations, "--only", "captured", "--output", str(folder))
    assert "holds another run: kind" in capfd.readouterr().err
    (folder / "plan.json").write_text(json.dumps(plan | {"rows": None}))
    assert study(parity, *words, "1") == 0, "a plan whose rows were lost is made again"
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        study(ablations, "--only", "captured", "--output", str(tmp_path))
    assert (tmp_path / "mine").read_text() == "mine" and "files that are of no run" in capfd.readouterr().err


def test_a_row_and_a_seed_that_are_named_twice_are_one():
    planned = parity.rows_of(["0", "3", "0"], [1, 1, 2], [])
    assert [row.output.partition("/")[0] for row in planned] == [
        f"{name}, seed {seed}" for seed in (1, 2) for name in ("0_baseline", "3_compile")
    ]


def test_a_state_of_the_loop_is_no_argument_of_its_command():
    command = [sys.executable, "-m", "ladder.loop", loop.state_names()[0]]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "unrecognized arguments" in ran.stderr


def test_rows_of_a_folder_s_plan_that_are_not_mine_are_kept_and_not_run(tmp_path, study):
    folder = tmp_path / "study"
    words = ["--rows", "0", "--output", str(folder), "--seeds", "1"]
    assert study(parity, *words) == 0
    plan = json.loads((folder / "plan.json").read_text())
    foreign = plan["rows"][0] | {"script": "/tmp/foreign.py", "output": "x, seed 1/foreign.json"}
    (folder / "plan.json").write_text(json.dumps(plan | {"rows": [*plan["rows"], foreign]}))
    assert study(parity, *words) == 1, "the report names the row that has not run"
    assert not (folder / "x, seed 1").exists()
    assert json.loads((folder / "plan.json").read_text())["rows"][1] == foreign


def test_rows_may_differ_in_their_gpus_and_not_in_their_work():
    one = {"workload": {"batch_size": 8, "gpus": 1, "parallel": None, "warmup": 3}}
    two = {"workload": {"batch_size": 8, "gpus": 2, "parallel": "ddp", "warmup": 11}}
    more = {"workload": one["workload"] | {"batch_size": 9}}
    alike = [running.comparable(plan, "workload") for plan in (one, two, more)]
    assert alike[0] == alike[1] != alike[2]


def test_a_variant_is_compared_with_its_script_and_one_that_breaks_stays_a_row(
    tmp_path, study, capfd, monkeypatch
):
    absent = {"Variant": "none", "Script": "2_sdpa", "Predicted": "nothing"}
    broken = patches.variants() | {"absent": absent}
    monkeypatch.setattr(ablations, "variants", lambda: broken)
    words = ["--only", "dead-mlp-all", "absent", "--output", str(tmp_path / "study")]
    assert study(ablations, *words) == 1
    said = capfd.readouterr().out
    assert re.search(r"dead-mlp-all +2_sdpa +10.0 +15.0 +\+5.0", said) and "absent.patch does not fit" in said


def test_a_folder_of_results_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "ROOT", tmp_path)
    (tmp_path / "results").symlink_to(tmp_path / "not there" / "at all")
    with pytest.raises(Skip, match="-parity cannot be used: "):
        running.folder_of("parity", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(Skip, match="file cannot be used: "):
        running.folder_of("parity", tmp_path / "file")


def test_two_steps_of_one_number_are_meant_by_their_files(monkeypatch):
    monkeypatch.setattr(parity.rows, "scripts", lambda: ["2_sdpa.py", "3_compile.py", "3_other.py"])
    known = parity.known_rows()
    assert {"2", "3_compile", "3_other"} <= known.keys() and "3" not in known


def test_a_whole_name_means_one_variant():
    assert "cold-scales" in parity.known_rows()
    (row,) = parity.rows_of(["0"], [7], ["--lr", "1"])
    assert row.arguments == [*parity.DEFAULTS, "--lr", "1", "--seed", "7"]
    assert ablations.choose(["dead-mlp"]) == ["dead-mlp"] and len(ablations.choose(["dead"])) == 2
    names = [(row.output, row.patch) for row in ablations.rows_of(["dead-mlp"], [])]
    assert names == [("2_sdpa/2_sdpa.json", None), ("dead-mlp/2_sdpa.json", "dead-mlp")]


@pytest.mark.slow
def test_every_state_of_the_guide_s_loop_trains_alike(tmp_path, monkeypatch):
    """Rows run in this process: each would import torch again."""

    def run_here(self, row, record, name):
        with contextlib.chdir(tmp_path):
            loop.run_state(row.arguments[0], record)

    monkeypatch.setattr(running.Running, "run_script", run_here)
    monkeypatch.setattr(sys, "argv", ["loop", "--output", str(tmp_path / "loop")])
    assert loop.main() == 0
    recorded = json.loads((tmp_path / "loop" / "results.json").read_text())["rows"]
    assert [row["step"] for row in recorded] == loop.state_names()
    *trained, fp8 = recorded
    assert fp8["status"] == "skipped" and "transformer_engine" in fp8["reason"], "a CPU lacks it"
    assert fp8["changes"] == ["adamw", "amp", "attention", "compile", "graph", "fp8"]
    for row in trained:
        assert row["status"] == "ok" and len(row["step_ms"]) > 10 and row["loss"][-1] < 0.7 * row["loss"][0]
        assert row["loss"] == pytest.approx(trained[0]["loss"], rel=0.005), row["step"]
