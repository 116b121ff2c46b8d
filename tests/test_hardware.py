"""Roofs: the workload's own matrix products, and what cannot be measured says so."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL

from common import flops, hardware
from common.model import PRESETS

CPU = torch.device("cpu")


@pytest.mark.parametrize("config", [SMALL, PRESETS["gpt3-xl"].config])
def test_the_products_are_all_of_a_step_outside_attention(config):
    products = hardware.matrix_products(config.n_layer, config.n_embd, config.vocab_size, tokens=128)
    total = sum(2 * m * n * k * count for (m, n, k), count in products.items())
    assert total == 6 * flops.matmul_parameters(config) * 128


def test_roofs_of_a_cpu():
    roofs = hardware.measure_roofs({(64, 64, 32): 2, (64, 32, 64): 1}, CPU)
    assert roofs["copy_bytes_per_s"] > 1e8
    slowest, fastest = sorted(shape["fp32_flops_per_s"] for shape in roofs["shapes"])
    assert slowest <= roofs["fp32_flops_per_s"] <= fastest
    assert roofs["fp8_flops_per_s"] is None and any("fp8 not measured" in note for note in roofs["notes"])
    assert roofs["square"]["fp32_flops_per_s"] > 0


def test_a_product_that_fails_is_a_note_and_the_rest_stands(monkeypatch):
    def broken(shape, precision, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried a lot\nmore")

    monkeypatch.setattr(hardware, "product_rate", broken)
    roofs = hardware.measure_roofs({(8, 8, 8): 1}, CPU)
    assert roofs["fp32_flops_per_s"] is None and roofs["copy_bytes_per_s"] > 0
    assert "fp32 not measured: CUDA out of memory. Tried a lot" in roofs["notes"]


def test_measuring_leaves_the_precision_as_it_was():
    torch.set_float32_matmul_precision("high")
    hardware.measure_roofs({(8, 8, 8): 1}, CPU)
    assert torch.get_float32_matmul_precision() == "high"


def test_the_command_writes_json(tmp_path):
    words = ["--device", "cpu", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "32"]
    command = [sys.executable, "-m", "common.hardware", *words, "--output", str(tmp_path / "roofs.json")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert json.loads((tmp_path / "roofs.json").read_text())["fp32_flops_per_s"] > 0


def test_roofs_use_every_thread_that_training_uses(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    hardware._seconds(lambda: seen.append(torch.__config__.parallel_info()), torch.device("cpu"))
    in_timer = seen[1:]  # the first call only warms up
    assert in_timer and all("at::get_num_threads() : 2" in said for said in in_timer)


def test_another_cudnn_than_torchs_own_is_said(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility: compiled  against (9, 19, 0), found (9, 14, 0)\nmore")

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert hardware.cudnn_note(gpu) is None
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert "LD_LIBRARY_PATH" in hardware.cudnn_note(gpu) and hardware.cudnn_note(torch.device("cpu")) is None
    assert hardware.cudnn_version().endswith("compiled against (9, 19, 0), found (9, 14, 0)")


def test_only_variables_that_a_user_chose_are_recorded(monkeypatch):
    monkeypatch.setenv("NVTE_CUDA_INCLUDE_DIR", "/set/by/an/import")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("UNRELATED", "1")
    variables = hardware.describe(torch.device("cpu"))["variables"]
    assert variables["NVTE_FUSED_ATTN"] == "0" and not {"NVTE_CUDA_INCLUDE_DIR", "UNRELATED"} & variables.keys()
