"""Kernels and experiments of anatomy/ that need a GPU: right results, and figures in their order."""

import argparse
import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from anatomy import experiment, learning, memory_hierarchy, misses, traffic

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")


def result_of(module, *words):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    given = argparse.Namespace(device=torch.device("cuda", 0), dtype=None, iters=5, quick=True)
    result = module.run(parser.parse_args(words, given))
    result.explain()
    json.dumps(result.record(), allow_nan=False)
    return result


def test_triton_kernels_are_right():
    from anatomy import on_chip
    from anatomy.product_kernel import product

    a, b = torch.randn(2, 512, 512, device="cuda").bfloat16() / 16
    torch.testing.assert_close(product(a, b), a @ b, rtol=0.02, atol=0.02)
    x, y = torch.randn(2, 2**20 + 8, device="cuda")
    on_chip.copy_with(x, y, 7)
    assert torch.equal(x, y), "a size that no block divides"
    out = torch.empty(on_chip.BLOCK, device="cuda")
    assert on_chip.read_l1(x, out, 2 * on_chip.PARTS) == 2 * on_chip.PARTS * out.nbytes
    sums = x[: on_chip.PARTS * on_chip.BLOCK].view(on_chip.PARTS, -1).sum(0)
    torch.testing.assert_close(out, 2 * sums)


def test_each_level_is_faster_than_the_next():
    figures = result_of(memory_hierarchy, "--largest", "512").figures
    rates = [figures["on_chip"][level]["bytes_per_s"] for level in ("registers", "L1 or shared memory")]
    assert rates[0] > rates[1] > figures["copy_bytes_per_s"]
    by_programs = [row["bytes_per_s"] for row in figures["occupancy"].values()]
    assert by_programs[0] < 0.7 * max(by_programs)


def test_fp16_loses_gradients_without_scaling_and_bf16_does_not():
    trained = result_of(learning, "--steps", "3").figures["trained"]
    lost = {name: row["zero_share"] for name, row in trained.items()}
    assert lost["FP16"] > 0.9 and max(lost["FP16, loss scaled"], lost["BF16"], lost["FP32"]) < 0.1


def test_a_call_that_waits_for_the_host_and_one_whose_kernels_are_slow_are_told_apart():
    device, few, many = torch.device("cuda", 0), torch.ones(16, device="cuda"), torch.ones(2**28, device="cuda")

    def said(call):
        again = misses.time_again(call)
        return misses.kernels_cause(
            experiment.Check("x", again.seconds / 9, again.seconds, "us"), call, device, again, ""
        )

    assert said(lambda: [few.add_(1) for _ in range(50)]).startswith("the host needs ")
    assert said(lambda: many.add_(1)).startswith("its kernels alone take ")


@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs Nsight Compute")
def test_counted_bytes_of_a_step(tmp_path):
    words = ["--scripts", "2", "--n-layer", "1", "--n-head", "4", "--n-embd", "256", "--seq-len", "256"]
    words += ["--batch-size", "2", "--output", str(tmp_path / "x.json")]
    subprocess.run([sys.executable, "-m", "anatomy.traffic", *words], cwd=ROOT, check=True, timeout=600)
    step = json.loads((tmp_path / "x.json").read_text())["steps"]["2_sdpa"]
    if "reason" in step:
        pytest.skip(step["reason"])
    assert 0 < len(step["kernels"]) <= traffic.KERNELS and step["bytes"] > 0
    assert step["seconds"] >= sum(kernel["seconds"] for kernel in step["kernels"])
