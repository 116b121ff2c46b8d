"""Roofs: the workload's own matrix products, and what cannot be measured says so."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import FAST, ROOT

from common import roofs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(roofs, "COPY_BYTES", 2**22)


def test_roofs_of_a_cpu():
    torch.set_float32_matmul_precision("high")
    measured = roofs.measure({(64, 64, 32): 2, (64, 32, 64): 1}, CPU)
    assert torch.get_float32_matmul_precision() == "high", "it stays as it was"
    assert measured.copy_bytes_per_s > 0 and measured.square.fp32_flops_per_s > 0
    slowest, fastest = sorted(shape.fp32_flops_per_s for shape in measured.shapes)
    assert slowest <= measured.fp32_flops_per_s <= fastest
    assert measured.fp8_flops_per_s is None and any("fp8 not measured" in note for note in measured.notes)


def test_a_product_that_fails_is_a_note_and_the_rest_stands(monkeypatch):
    def broken(shape, precision, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried a lot\nmore")

    monkeypatch.setattr(roofs, "product_rate", broken)
    measured = roofs.measure({(8, 8, 8): 1}, CPU)
    assert measured.fp32_flops_per_s is None and measured.copy_bytes_per_s > 0
    assert "fp32 not measured: CUDA out of memory. Tried a lot" in measured.notes


def test_the_command_writes_json(tmp_path):
    command = [sys.executable, "-m", "common.roofs", *FAST, "--output", str(tmp_path / "roofs.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert json.loads((tmp_path / "roofs.json").read_text())["fp32_flops_per_s"] > 0


def test_roofs_use_every_thread_that_training_uses(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    roofs.seconds(lambda: seen.append(torch.__config__.parallel_info()), CPU)
    in_timer = seen[1:]  # the first call only warms up
    assert in_timer and all("at::get_num_threads() : 2" in said for said in in_timer)
