"""anatomy/: every experiment predicts and measures on a CPU."""

import argparse
import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_python

from anatomy import layout, masks
from anatomy.__main__ import ALL
from anatomy.lab import Lab, shown

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
def test_an_experiment_predicts_and_measures_on_a_cpu(name, request, monkeypatch):
    if name in ("layout", "compiler"):  # which count what is generated, or by a backend of their own
        request.getfixturevalue("inductor")
    if name == "layout":  # a few of its compilations: a GPU has them all
        few = dict([*layout.REWRITES.items()][3:5])
        monkeypatch.setattr(layout, "REWRITES", few)
    if name == "compiler":
        compiler, plain = torch.compile, {"backend": "aot_eager"}
        monkeypatch.setattr(torch, "compile", lambda f, **how: compiler(f, **(plain | how)))
    lab = Lab(name, argparse.Namespace(device="cpu", quick=True, json=None))
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
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # modules run as commands in this process
def test_the_commands_list_run_and_write_and_bad_input_is_one_line(tmp_path, monkeypatch, refused):
    files = {path.stem for path in ROOT.glob("anatomy/*.py")} - {"lab", "__init__", "__main__"}
    listed = run_python("-m", "anatomy").stdout
    assert files == {*ALL} and all(f"  {name} " in listed for name in files)
    words = ("graph", "--device", "cpu", "--quick", "--json", tmp_path / "x.json")
    ended = run_python("-m", "anatomy", *words)
    assert ended.returncode == 0 and "needs a GPU" in ended.stdout, ended.stderr
    written = json.loads((tmp_path / "x.json").read_text())
    assert (
        written["experiment"] == "graph"
        and written["rows"]
        and written["environment"]["device_type"] == "cpu"
    )
    bad = "anatomy nonsense; anatomy graph --device tpu; anatomy host --edge 0; anatomy all --json README.md"
    bad += "; ladder.ablations --only captured nonsense; ladder.parity --seed 2 --output x"
    bad += "; anatomy learning --vocab 9; ladder.loop --output README.md; ladder.ablations --only"
    bad += "; anatomy memory --smallest 4096 --largest 1; anatomy graph --dtype float32"
    monkeypatch.setattr("os._exit", sys.exit)
    for name, *words in map(str.split, bad.split("; ")):
        monkeypatch.setattr(sys, "argv", [name, *words])
        refused(runpy.run_module, name, None, "__main__", True)
    assert [shown(*pair) for pair in ((1.5e-5, "s"), (999.9e6, "B"), (None, "s"))] == [
        "15 us",
        "999.9 MB",
        "-",
    ]
