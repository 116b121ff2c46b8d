"""anatomy/ on a GPU: all experiments within four minutes, each with a prediction; the guide's loop, captured
and in FP8."""

import json
import time

import pytest
import torch
from conftest import run_python

# Runs a state at the sizes that it has on a CPU.
TOY_STATE = """
import sys
from pathlib import Path

from ladder import loop

make = loop.make_states

def make_small(folder):
    states = make(folder)
    for path in states.values():
        source = path.read_text()
        for of_a_gpu, of_a_cpu in (
            ("(12, 12, 768, 1024, 50304, 8)", "(2, 2, 64, 64, 256, 4)"),
            ("(90, 2, 30)", "(20, 2, 10)"),
            ("(6e-4, 30)", "(5e-3, 3)"),
        ):
            assert of_a_gpu in source
            source = source.replace(of_a_gpu, of_a_cpu)
        path.write_text(source)
    return states

loop.make_states = make_small
loop.run_state(sys.argv[1], Path(sys.argv[2]))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("state, first, all_of_them", [("5-graph", 0.005, 0.05), ("6-fp8", 0.1, 0.2)])
def test_the_guide_s_loop_trains_alike_as_a_graph_and_in_fp8(state, first, all_of_them, tmp_path):
    from test_gpu import fp8_reason

    if state == "6-fp8" and (reason := fp8_reason()):
        pytest.skip(reason)
    losses = {}
    for name in ("3-attention", state):
        ended = run_python("-c", TOY_STATE, name, tmp_path / name)
        (row,) = json.loads((tmp_path / name).read_text())["rows"]
        assert row["status"] == "ok", f"{row['reason']}\n{ended.stderr}"
        losses[name] = row["loss"]
    launched, changed = losses["3-attention"], losses[state]
    assert changed[-1] < 0.7 * changed[0]
    assert changed[:4] == pytest.approx(launched[:4], rel=first)
    assert changed == pytest.approx(launched, rel=all_of_them)


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
