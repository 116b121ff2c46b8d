"""anatomy/ on a GPU: all experiments within four minutes, each with a prediction; and the bytes that ncu counts."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from anatomy import traffic

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_all_experiments_run_within_four_minutes(tmp_path):
    began, output = time.monotonic(), tmp_path / "all.json"
    command = [sys.executable, "-m", "anatomy", "all", "--device", "cuda", "--json", output]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0 and "It failed" not in ended.stdout, ended.stdout
    assert time.monotonic() - began < 240, ended.stderr
    for experiment in json.loads(output.read_text())["experiments"]:
        rows = experiment["rows"]
        assert any(row["predicted"] and row["measured"] for row in rows), experiment["experiment"]
        assert not [row["what"] for row in rows if row["missing"] and "newer" not in row["missing"]]


@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs Nsight Compute")
def test_attention_moves_at_least_about_what_is_predicted(capsys, monkeypatch):
    monkeypatch.setattr(traffic, "STEPS", [])
    monkeypatch.setattr(sys, "argv", ["x"])
    traffic.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("by hand", "fused"))]
    if rows[0][-1] == "-":
        pytest.skip("the counters cannot be read here")
    assert all(float(row[-1]) > 0.8 for row in rows)
