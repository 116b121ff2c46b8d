"""anatomy/ on a GPU: all experiments within four minutes, each with a prediction."""

import json
import time

import pytest
import torch
from conftest import run_python


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_experiments_run_within_four_minutes(tmp_path):
    torch.cuda.empty_cache()  # what other tests of this process have left is the experiments' memory too
    began, output = time.monotonic(), tmp_path / "all.json"
    ended = run_python("-m", "anatomy", "all", "--device", "cuda", "--json", output)
    failed = [line for line in ended.stdout.splitlines() if line.startswith("It failed")]
    assert ended.returncode == 0 and not failed, failed or ended.stderr
    assert time.monotonic() - began < 240, ended.stderr
    for experiment in json.loads(output.read_text())["experiments"]:
        rows = experiment["rows"]
        assert any(row["predicted"] and row["measured"] for row in rows), experiment["experiment"]
        assert not [row["what"] for row in rows if row["missing"] and "newer" not in row["missing"]]
