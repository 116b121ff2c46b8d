"""Peers run on the same benchmark; one that is absent or broken is a row that says so."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

PEERS = sorted((ROOT / "peers").glob("*.py"))
PACKAGES = {"te_layer": "transformer_engine", "torchao_float8": "torchao", "transformers_gpt2": "transformers"}
FAST = ["--device", "cpu", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "32", "--steps", "2"]


def test_there_are_three_peers():
    assert {path.stem for path in PEERS} == set(PACKAGES)


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("error", ["ImportError", "SyntaxError", "RuntimeError"])
def test_a_peer_whose_import_breaks_is_skipped_with_the_reason(path, error, tmp_path):
    package = tmp_path / PACKAGES[path.stem]
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}('does not fit')\n")
    output = tmp_path / "record.json"
    command = [sys.executable, str(path), *FAST, "--output", str(output)]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    (row,) = json.loads(output.read_text())["steps"]
    assert ran.returncode == 0 and row["status"] == "skipped" and row["step"] == path.stem, ran.stderr
    said = "needs an NVIDIA GPU" if path.stem == "te_layer" else "does not fit"
    assert said in row["reason"]


def test_the_peer_that_needs_no_gpu_trains(tmp_path):
    output = tmp_path / "record.json"
    command = [
        sys.executable,
        str(ROOT / "peers" / "transformers_gpt2.py"),
        *FAST,
        "--steps",
        "30",
        "--output",
        str(output),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    (row,) = json.loads(output.read_text())["steps"]
    assert ran.returncode == 0 and row["status"] == "ok", ran.stderr
    assert row["settings"]["compiled"] and row["settings"]["attention_kernel"] == "flash (CPU)"
    assert sum(row["loss"][-5:]) < sum(row["loss"][:5])
