"""Peers run on the same benchmark; one that is absent or broken is a row that says so."""

import json
import os
import subprocess
import sys

import pytest
from conftest import COMPILED, FAST, ROOT, built

PACKAGES = {"te_layer": "transformer_engine", "torchao_float8": "torchao", "transformers_gpt2": "transformers"}


def run_peer(name, folder, *words, **variables):
    command = [sys.executable, str(ROOT / "peers" / f"{name}.py"), *FAST, "--output", str(folder / "x.json"), *words]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    (row,) = json.loads((folder / "x.json").read_text())["steps"]
    assert ran.returncode == 0, ran.stderr
    return row


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "peers").glob("*.py")))
def test_a_peer_whose_import_breaks_is_skipped_with_the_reason(name, tmp_path):
    package = tmp_path / PACKAGES[name]
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('does not fit')\n")
    row = run_peer(name, tmp_path, PYTHONPATH=str(tmp_path))
    assert row["status"] == "skipped" and row["step"] == name
    assert ("does not fit" if name == "transformers_gpt2" else "needs an NVIDIA GPU") in row["reason"]


def test_the_peer_that_needs_no_gpu_trains_as_the_baseline_does(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    row = run_peer("transformers_gpt2", tmp_path, "--steps", "30")
    assert row["status"] == "ok" and row["settings"]["attention_kernel"] == "flash (CPU)"
    assert row["settings"]["compiled"] and sum(row["loss"][-5:]) < sum(row["loss"][:5])
    baseline = built("0_baseline", monkeypatch, config=COMPILED, warmup=1, steps=30)
    losses = [baseline.train_step(*batch).item() for batch in baseline.batches[:31]]
    assert row["loss"] == pytest.approx(losses, rel=1e-4), "the same weights, batches and function"
