"""Roofs: the workload's own matrix products, and what cannot be measured says so."""

import itertools
import json
import os
import statistics
import subprocess
import sys
from functools import partial

import pytest
import runs
import torch
from conftest import FAST
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import passes, roofs
from common.record import ProductRate, Reference
from report.doubts import busy

CPU = torch.device("cpu")


def test_roofs_of_a_cpu():
    torch.set_float32_matmul_precision("high")
    measured = roofs.measure({(64, 64, 32): 2, (64, 32, 64): 1}, CPU)
    assert torch.get_float32_matmul_precision() == "high", "it stays as it was"
    assert measured.copy_bytes_per_s > 0 and measured.square.fp32_flops_per_s > 0
    slowest, fastest = sorted(shape.fp32_flops_per_s for shape in measured.shapes)
    assert slowest <= measured.fp32_flops_per_s <= fastest
    for rates in (*measured.shapes, measured.square, measured.zeros, measured):
        assert rates.fp32_flops_per_s <= rates.ceilings["fp32"]
    assert measured.fp8_flops_per_s is None and any("fp8 not measured" in note for note in measured.notes)


def test_a_product_that_fails_is_a_note_and_the_rest_stands(monkeypatch):
    def broken(shape, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried a lot\nmore")

    monkeypatch.setattr(roofs, "product_rates", broken)
    measured = roofs.measure({(8, 8, 8): 1}, CPU)
    assert measured.fp32_flops_per_s is None and measured.copy_bytes_per_s > 0
    assert "fp32 not measured: CUDA out of memory. Tried a lot" in measured.notes


def test_the_command_writes_json_with_a_grid(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["roofs", *FAST, "--output", str(tmp_path / "roofs.json")])
    roofs.main()
    written = json.loads((tmp_path / "roofs.json").read_text())
    assert written["fp32_flops_per_s"] > 0 and len(written["grid"]) == 8


def test_the_time_of_a_product_is_linear_in_each_dimension():
    def seconds(m, n, k):
        return (5e3 + 3 * m * n + 2 * n * k + 7 * m * k + m * n * k) * 1e-9

    grid = [
        ProductRate(m=m, n=n, k=k, ceilings={"bf16": 2 * m * n * k / seconds(m, n, k)})
        for m, n, k in itertools.product((64, 256, 1024), repeat=3)
    ]
    for shape in ((64, 64, 64), (100, 90, 200), (1000, 256, 65), (9999, 1024, 40)):
        assert roofs.product_seconds(grid, "bf16", *shape) == pytest.approx(seconds(*shape))
    assert roofs.product_seconds(grid, "bf16", 64, 1, 64) == roofs.product_seconds(grid, "bf16", 64, 32, 64)


def test_the_recorded_grid_foretells_the_products_that_were_measured_beside_it():
    recorded, off = runs.recorded().roofs, []
    for shape in [*recorded.shapes, recorded.square]:
        for precision, ceiling in shape.ceilings.items():
            found = roofs.product_seconds(recorded.grid, precision, shape.m, shape.n, shape.k)
            off.append(abs(2 * shape.m * shape.n * shape.k / found / ceiling - 1))
    assert statistics.median(off) < 0.02 and max(off) < 0.10


def test_each_pass_reads_tensors_of_the_format_in_its_name():
    class Read(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.dtypes |= {one.dtype for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
            return function(*args, **(kwargs or {}))

    every = dict(passes.kernels(2**12, CPU))  # all made before any runs
    for name, work in every.items():
        with Read() as read:
            read.dtypes = set()
            work()
        of_name = {"fp32": torch.float32, "half": torch.bfloat16}[name.split()[-1]]
        if name.startswith("to "):
            of_name = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[of_name]
        assert read.dtypes - {torch.bool} == {of_name}, name


def test_passes_over_memory_and_attention_are_timed_and_a_cpu_launches_nothing():
    timer = partial(roofs.steady_seconds, device=CPU, for_s=1e-4)
    timed = passes.pass_times(CPU, timer)
    assert all(one.seconds > 0 for one in timed)
    lengths = [length for length in passes.LENGTHS if length <= passes.TOKENS["cpu"]]
    few = [one.numbers for one in timed if one.kernel == f"{passes.FEW}, {passes.HEAD_DIMS[0]}"]
    assert few == [passes.FEW_HEADS * passes.HEAD_DIMS[0] * length for length in lengths]
    assert not any(one.kernel.startswith(passes.TE_NORM) for one in timed)
    assert {rate.head_dim for rate in passes.attention_rates(CPU, timer)} == set(passes.HEAD_DIMS)
    assert passes.launch_seconds(CPU) is None


def test_transformer_engine_that_breaks_costs_none_of_the_other_passes(monkeypatch, capsys):
    def broken(te, numbers, width, device):
        raise AssertionError("no tuned kernel\nfor this width")

    def measured():
        timed = passes.pass_times(CPU, partial(roofs.steady_seconds, device=CPU, for_s=1e-4))
        assert {one.kernel for one in timed} >= {"copy fp32", f"{passes.FEW}, 64"}
        return capsys.readouterr().out

    monkeypatch.setattr(passes, "LENGTHS", (256,))
    assert measured() == "", "a CPU has no FP8"
    monkeypatch.setattr(passes.hardware, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(passes, "optional", lambda *_: None)
    assert measured() == "Transformer Engine's LayerNorm not measured: transformer_engine does not import\n"
    monkeypatch.setattr(passes, "optional", lambda *_: passes)
    monkeypatch.setattr(passes, "transformer_engine_norm", broken)
    assert measured() == "Transformer Engine's LayerNorm not measured: no tuned kernel\n"


def test_a_row_beside_competing_processes_makes_the_machine_busy(monkeypatch):
    monkeypatch.setattr(roofs, "REFERENCE_S", 0.25)

    def row(name):
        product_ms, copy_ms, _ = roofs.reference(CPU)
        return runs.step(name, reference_ms=Reference([product_ms], [copy_ms]))

    crowd = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6 * os.cpu_count())]
    try:
        crowded = row("0_x")
    finally:
        for process in crowd:
            process.kill()
            process.wait()
    verdict = busy(runs.run(crowded, row("1_x"), row("2_x"), device_type="cpu"))
    assert verdict.startswith("machine busy") and "beside 0_x" in verdict
