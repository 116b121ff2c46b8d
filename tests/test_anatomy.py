"""anatomy/: every experiment predicts and measures on a CPU, every patch fits, and the statistics are right."""

import argparse
import importlib
import json
import math
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_python

from anatomy import ablations, parity
from anatomy.__main__ import ALL, APART
from anatomy.lab import Lab, shown
from common.arguments import parse_args
from common.text import Skip

ROOT = Path(__file__).resolve().parent.parent
EXACT = {"attention": "What autograd keeps", "capture": "Sides of", "compiler": "Graphs that", "layout": "Kernels"}
NEAR = {"precision": "error", "techniques": "peak", "learning": "first loss"}


@pytest.mark.parametrize("name", [name for name in ALL.split() if name != "kernel"])  # which needs a GPU
def test_an_experiment_predicts_and_measures_on_a_cpu(name, monkeypatch):
    compiler, plain = torch.compile, {"backend": "aot_eager"}  # it generates no code, which takes most of the time
    if name in ("fusion", "compiler", "techniques"):
        monkeypatch.setattr(torch, "compile", lambda f, mode=None, **how: compiler(f, **(plain | how)))
    lab = Lab(name, argparse.Namespace(device="cpu", iters=2, quick=True, json=None))
    sizes = {"vocab": 2000} if name == "learning" else {}
    sentence = importlib.import_module(f"anatomy.{name}").run(lab, **sizes)
    assert sentence.endswith(".") and any(letter.isdigit() for letter in sentence)
    assert all(word in lab.tables("github") for word in ("predicted", "measured", "ratio"))
    rows = json.loads(json.dumps(lab.record("?", sentence), allow_nan=False))["rows"]
    assert any(row["predicted"] and row["measured"] for row in rows)
    exact = [row for row in rows if row["table"].startswith(EXACT.get(name, "-")) and "BF16" not in row["what"]]
    assert bool(exact) == (name in EXACT) and all(row["measured"] == row["predicted"] for row in exact)
    for row in rows:
        if NEAR.get(name, "-") in row["what"] and row["predicted"] and not row["at_most"]:
            assert row["measured"] == pytest.approx(row["predicted"], rel=0.2), row


def test_the_commands_list_run_and_write_and_bad_input_is_one_line(tmp_path):
    files = {path.stem for path in ROOT.glob("anatomy/*.py")} - {"lab", "__init__", "__main__"}
    listed = run_python("-m", "anatomy").stdout
    assert files == {*ALL.split(), *APART.split()} and all(f"  {name} " in listed for name in files)
    words = ("graph", "--device", "cpu", "--quick", "--iters", "2", "--json", tmp_path / "x.json")
    ended = run_python("-m", "anatomy", *words)
    assert ended.returncode == 0 and "needs a GPU" in ended.stdout, ended.stderr
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["experiment"] == "graph" and written["rows"] and written["environment"]["device_type"] == "cpu"
    bad = "anatomy nonsense; anatomy.graph --device tpu; anatomy.host --edge 0; anatomy all --json README.md"
    bad += "; anatomy.ablations --only launched nonsense; anatomy.parity --seed 2 --output x"
    bad += "; anatomy.learning --vocab 9"
    for words in f"{bad}; anatomy.memory --smallest 4096 --largest 1; anatomy.graph --dtype float32".split("; "):
        ended = run_python("-m", *words.split())
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert [shown(*pair) for pair in ((1.5e-5, "s"), (999.9e6, "B"), (None, "s"))] == ["15 us", "999.9 MB", "-"]


@pytest.mark.parametrize("key", ablations.variants())
def test_a_patch_applies_and_the_script_stays_python(key, tmp_path):
    variant = ablations.variants()[key]
    script = ablations.write_script(key, variant["Script"], tmp_path)
    assert variant["Variant"] and script.read_text() != (ROOT / f"{variant['Script']}.py").read_text()
    compile(script.read_text(), str(script), "exec")


def test_fp16_with_loss_scaling_trains(tmp_path):
    script = ablations.write_script("fp16-with-loss-scaling", "1_cublas", tmp_path)
    words = ["--device", "cpu", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "32", "--steps", "40"]
    args = parse_args(script, None, [*words, "--output", str(tmp_path / "x.json")])
    train_step, *_ = runpy.run_path(str(script))["main"](args)
    losses = [train_step(*batch).item() for batch in args.batches()]
    assert all(map(math.isfinite, losses)) and statistics.fmean(losses[-5:]) < 0.9 * losses[0]


def test_a_study_trains_every_row_with_every_seed_continues_and_is_reported(tmp_path, monkeypatch):
    started, reported, output, code = [], [], tmp_path / "study" / "results.json", "old"

    def ran(command, **_):  # in place of git, and of a script: a fault is 0.5 nats worse and takes 15 ms a step, not 10
        if "--seed" in command:
            seed, fault = int(command[command.index("--seed") + 1]), "0_baseline" not in str(command[1])
            loss = 2 + 0.1 * seed + fault * (0.5 + 0.01 * seed)
            row = {"status": "ok", "loss": [loss], "heldout": [(1, loss)], "step_ms": [15 if fault else 10]}
            record = {"rows": [row], "workload": {"seed": seed}, "environment": {"device": "cpu", "code_sha256": code}}
            record["command"] = " ".join(map(str, ["python", "x", *command[2:-2]]))
            Path(command[-1]).write_text(json.dumps(record))
            started.append(seed)
        elif "report" in command:
            reported.append(command[-1])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(ablations.subprocess, "run", ran)
    words = ["x", "--rows", "0", "dead-mlp-all", "--output", str(output.parent), "--seeds"]
    for seeds, count in (("1",), 2), (("1", "2", "3"), 6):
        monkeypatch.setattr(sys, "argv", [*words, *seeds])
        assert parity.main() == 0 and len(started) == count, "what is there is not trained again"
    study = json.loads(output.read_text())
    code = "new"
    for more in (["4"], ["1", "--preset", "gpt2"]):
        sys.argv = [*words, *more]
        with pytest.raises(SystemExit, match="2"):
            parity.main()
    assert reported == [output.parent] * 2 and len(json.loads(output.read_text())["runs"]) == 6, "nothing is mixed"
    once = "python -m anatomy.parity --output parity --rows 0 dead-mlp-all --seeds 1"
    assert study["command"] == f"{once} && {once} 2 3" and study["kind"] == "parity"
    assert list(study["runs"])[:2] == ["0_baseline, seed 1", "dead-mlp-all, seed 1"]
    with pytest.raises(Skip, match="than a study of ablations"):
        ablations.Runs("ablations", output.parent)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(Skip, match="of no study"):
        ablations.Runs("ablations", tmp_path)
    one, other, swapped = map(ablations.option_pairs, ("--a 1 --b 2", "--b 2 --a 1", "--a 2 --b 1"))
    assert one == other != swapped
