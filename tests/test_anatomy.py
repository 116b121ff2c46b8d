"""anatomy/: every experiment predicts and measures on a CPU, every patch fits, and the statistics are
right."""

import argparse
import importlib
import json
import math
import re
import runpy
import statistics
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_python

from anatomy import ablations, loop, masks, parity
from anatomy.__main__ import ALL, APART
from anatomy.lab import Lab, shown
from common.arguments import parse_args
from common.record import Row
from common.text import Skip
from ladder import patches, process, running, runs

ROOT = Path(__file__).resolve().parent.parent
EXACT = {
    "attention": "What autograd keeps",
    "capture": "Sides of",
    "compiler": "Graphs that",
    "layout": "Kernels",
}
NEAR = {"precision": "error", "techniques": "peak", "learning": "first loss"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name != "kernel"])  # which needs a GPU
def test_an_experiment_predicts_and_measures_on_a_cpu(name, monkeypatch):
    # It generates no code, which takes most of the time.
    compiler, plain = (torch.compile, {"backend": "aot_eager"})
    if name in ("fusion", "compiler", "techniques"):
        monkeypatch.setattr(torch, "compile", lambda f, mode=None, **how: compiler(f, **(plain | how)))
    lab = Lab(name, argparse.Namespace(device="cpu", iters=2, quick=True, json=None))
    sizes = {"vocab": 2000} if name == "learning" else {}
    sentence = importlib.import_module(f"anatomy.{name}").run(lab, **sizes)
    assert sentence.endswith(".") and any(letter.isdigit() for letter in sentence)
    assert all(word in lab.tables("github") for word in ("predicted", "measured", "ratio"))
    rows = json.loads(json.dumps(lab.record("?", sentence), allow_nan=False))["rows"]
    assert any(row["predicted"] and row["measured"] for row in rows)
    exact = [
        row for row in rows if row["table"].startswith(EXACT.get(name, "-")) and "BF16" not in row["what"]
    ]
    assert bool(exact) == (name in EXACT) and all(row["measured"] == row["predicted"] for row in exact)
    for row in rows:
        if NEAR.get(name, "-") in row["what"] and row["predicted"] and not row["at_most"]:
            assert row["measured"] == pytest.approx(row["predicted"], rel=0.2), row


@pytest.mark.parametrize(("T", "documents"), [(1024, 8), (512, 8), (1000, 3), (300, 2), (256, 1)])
def test_the_blocks_that_a_document_mask_keeps_are_counted(T, documents):
    mask = masks.dense_mask(masks.document_of(T, documents, torch.device("cpu")))
    edge = -(-T // masks.BLOCK)
    whole = torch.zeros(edge * masks.BLOCK, edge * masks.BLOCK, dtype=torch.bool)
    whole[:T, :T] = mask
    kept = whole.view(edge, masks.BLOCK, edge, masks.BLOCK).any(3).any(1).sum().item()
    assert masks.kept_share(T, documents) == pytest.approx(kept / (edge * (edge + 1) / 2))


@pytest.mark.slow
def test_the_commands_list_run_and_write_and_bad_input_is_one_line(tmp_path):
    files = {path.stem for path in ROOT.glob("anatomy/*.py")} - {"lab", "__init__", "__main__"}
    listed = run_python("-m", "anatomy").stdout
    assert files == {*ALL, *APART} and all(f"  {name} " in listed for name in files)
    words = ("graph", "--device", "cpu", "--quick", "--iters", "2", "--json", tmp_path / "x.json")
    ended = run_python("-m", "anatomy", *words)
    assert ended.returncode == 0 and "needs a GPU" in ended.stdout, ended.stderr
    written = json.loads((tmp_path / "x.json").read_text())
    assert (
        written["experiment"] == "graph"
        and written["rows"]
        and written["environment"]["device_type"] == "cpu"
    )
    bad = "anatomy nonsense; anatomy.graph --device tpu; anatomy.host --edge 0; anatomy all --json README.md"
    bad += "; anatomy.ablations --only captured nonsense; anatomy.parity --seed 2 --output x"
    bad += "; anatomy.learning --vocab 9; anatomy.loop --output README.md; anatomy.ablations --only"
    for words in f"{bad}; anatomy.memory --smallest 4096 --largest 1; anatomy.graph --dtype float32".split(
        "; "
    ):
        ended = run_python("-m", *words.split())
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert [shown(*pair) for pair in ((1.5e-5, "s"), (999.9e6, "B"), (None, "s"))] == [
        "15 us",
        "999.9 MB",
        "-",
    ]


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
        "pinned": [],
        "device_type": "cuda",
        "needed_bytes": {},
        "free_bytes": None,
        "said": ["GPU: one"],
    }
    monkeypatch.setattr(runs, "check", lambda arguments, *_, **__: facts | {"workload": None})

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
    once = "python -m anatomy.parity --output parity --rows 0 dead-mlp-all --seeds 1"
    assert content["command"] == f"{once} && {once} 2 3" and content["kind"] == "parity"
    assert content["started_at"] == "2020-01-01", "when its first row began"
    assert (
        list(content["runs"])[:2] == ["0_baseline, seed 1", "dead-mlp-all, seed 1"]
        and len(content["runs"]) == 6
    )
    assert content["runs"]["dead-mlp-all, seed 2"]["rows"][0]["loss"][0] == pytest.approx(2.72)
    for more in (["4", "--lr", "1"], ["1", "--preset", "gpt2"]):
        with pytest.raises(SystemExit, match="2"):
            study(parity, *words, *more)
        assert "rows of another workload, machine or code" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        study(ablations, "--only", "captured", "--output", str(folder))
    assert "of no study of ablations" in capfd.readouterr().err
    plan = json.loads((folder / "plan.json").read_text())
    for other in ({"device": "x"}, {"code": "x"}):
        (folder / "plan.json").write_text(json.dumps(plan | {"same": plan["same"] | other}))
        with pytest.raises(SystemExit, match="2"):
            study(parity, *words, "1")
        assert "rows of another workload, machine or code" in capfd.readouterr().err
    one = {"workload": {"batch_size": 8, "gpus": 1, "parallel": None, "warmup": 3}}
    two = {"workload": {"batch_size": 8, "gpus": 2, "parallel": "ddp", "warmup": 11}}
    more = {"workload": one["workload"] | {"batch_size": 9}}
    assert running.comparable(one) == running.comparable(two) != running.comparable(more), "of any GPUs"
    odd_rows = [{"script": "/tmp/evil.py", "output": "../mine.json"}, {"output": "\x1b[31m/0_baseline.json"}]
    odd_rows.append({"script": "0_baseline.py", "output": "/0_baseline.json"})
    for odd in [*odd_rows, {"gpus": 9999}]:
        rows = [plan["rows"][0] | odd, *plan["rows"][1:]]
        (folder / "plan.json").write_text(json.dumps(plan | {"rows": rows}))
        with pytest.raises(SystemExit, match="2"):
            study(parity, *words, "1")
        assert "that no study has written" in capfd.readouterr().err
    (folder / "plan.json").write_text(json.dumps(plan | {"rows": None}))
    assert study(parity, *words, "1") == 0, "a plan whose rows were lost is made again"
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        study(ablations, "--only", "captured", "--output", str(tmp_path))
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_variant_is_compared_with_its_script_and_one_that_breaks_stays_a_row(
    tmp_path, study, capfd, monkeypatch
):
    absent = {"Variant": "none", "Script": "2_sdpa", "Predicted": "nothing", "GPUs": "1"}
    broken = patches.variants() | {"absent": absent}
    monkeypatch.setattr(ablations, "variants", lambda: broken)
    words = ["--only", "dead-mlp-all", "absent", "--output", str(tmp_path / "study")]
    assert study(ablations, *words) == 1
    said = capfd.readouterr().out
    assert re.search(r"dead-mlp-all +2_sdpa +10.0 +15.0 +\+5.0", said) and "absent.patch does not fit" in said


def test_a_folder_of_results_that_cannot_be_made_is_one_line(tmp_path, study, capfd, monkeypatch):
    monkeypatch.setattr(running, "ROOT", tmp_path)
    (tmp_path / "results").symlink_to("/nowhere/at/all")
    with pytest.raises(SystemExit, match="2"):
        study(parity, "--rows", "0", "--seeds", "1")
    error = capfd.readouterr().err
    assert "cannot be used" in error and error.count("\n") == 1


def test_two_steps_of_one_number_are_meant_by_their_files(monkeypatch):
    monkeypatch.setattr(parity.runs, "scripts", lambda: ["2_sdpa.py", "3_compile.py", "3_other.py"])
    known = parity.known_rows()
    assert {"2", "3_compile", "3_other"} <= known.keys() and "3" not in known


def test_a_variant_of_several_gpus_is_meant_by_its_name_alone():
    assert "sharded-optimizer" not in parity.known_rows() and "cold-scales" in parity.known_rows()
    (row,) = parity.rows_of(["0"], [7], ["--lr", "1"])
    assert row.arguments == [*parity.DEFAULTS, "--lr", "1", "--seed", "7"]
    assert "sharded-optimizer" not in [*ablations.chosen(None), *ablations.chosen(["2_sdpa"])]
    assert ablations.chosen(["sharded-optimizer"]) == ["sharded-optimizer"]
    assert ablations.chosen(["dead-mlp"]) == ["dead-mlp"] and len(ablations.chosen(["dead"])) == 2
    names = [(row.output, row.gpus) for row in ablations.rows_of(["sharded-optimizer"], [])]
    assert names == [("2_sdpa, 2 GPUs/2_sdpa.json", 2), ("sharded-optimizer/2_sdpa.json", 2)]


def test_a_patch_whose_gpus_are_no_number_is_refused(tmp_path, monkeypatch):
    (tmp_path / "anatomy" / "variants").mkdir(parents=True)
    head = "Variant: x\nScript: 2_sdpa\nPredicted: nothing\nGPUs: two\n\n--- a/2_sdpa.py\n"
    (tmp_path / "anatomy" / "variants" / "x.patch").write_text(head)
    monkeypatch.setattr(patches, "ROOT", tmp_path)
    with pytest.raises(Skip, match=r"x\.patch has the line GPUs: without a number"):
        patches.variants()


@pytest.mark.slow
def test_a_variant_of_two_processes_is_compared_with_its_script_in_as_many(tmp_path):
    sizes = ["--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "32", "--steps", "8"]
    words = ["--device", "cpu", *sizes, "--only", "sharded-optimizer", "--output", tmp_path / "study"]
    ended = run_python("-m", "anatomy.ablations", *words, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"sharded-optimizer +2_sdpa, 2 GPUs +[\d.]+\?? +[\d.]+\?? +[-+]", ended.stdout)
    content = json.loads((tmp_path / "study" / "results.json").read_text())["runs"]
    assert [run["workload"]["gpus"] for run in content.values()] == [2, 2]
    whole, sharded = (run["rows"][0]["loss"] for run in content.values())
    assert sharded == pytest.approx(whole, rel=1e-4), "the rehearsal is undone in both"


def test_a_state_of_the_loop_that_trains_less_has_no_time():
    first = {"tokens": 64, "shape": [2, 2, 64, 64, 256], "rate": 0.1, "loss": [4.0, 3.0]}
    row = Row("4-compile", "ok", step_ms=[1.0])
    loop.refuse_other_work(row, first | {"loss": [5.0, 2.0]}, first)
    assert row.status == "ok" and row.step_ms
    loop.refuse_other_work(row, first | {"tokens": 32, "shape": [1, 2, 64, 64, 256], "loss": [4.0]}, first)
    assert (row.status, row.step_ms) == ("failed", [])
    assert row.reason == "its patch changes the work: tokens, shape, number of training steps"


@pytest.mark.slow
def test_every_state_of_the_guide_s_loop_trains_alike(tmp_path):
    ended = run_python("-m", "anatomy.loop", "--output", tmp_path / "loop", timeout=300)
    assert ended.returncode == 0 and "Report: " in ended.stdout, ended.stderr
    rows = json.loads((tmp_path / "loop" / "results.json").read_text())["rows"]
    assert [row["step"] for row in rows] == ["0-as-it-is", *(path.stem for path in loop.patches())]
    *trained, fp8 = rows
    assert fp8["status"] == "skipped" and "transformer_engine" in fp8["reason"], "a CPU lacks it"
    assert fp8["changes"] == ["adamw", "amp", "attention", "compile", "graph", "fp8"]
    for row in trained:
        assert row["status"] == "ok" and len(row["step_ms"]) > 10 and row["loss"][-1] < 0.7 * row["loss"][0]
        assert row["loss"] == pytest.approx(trained[0]["loss"], rel=0.005), row["step"]
    again = run_python("-m", "anatomy.loop", "--output", tmp_path / "loop")
    assert again.returncode == 2 and "is no empty folder" in again.stderr and again.stderr.count("\n") == 1
