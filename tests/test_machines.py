"""README's table of machines: what it says a step does is what common/ does there."""

import dataclasses

import pytest
import runs
import torch

from common import hardware, roofs
from common.record import Settings
from report import readme

GENERATIONS = [(name, capability) for name, row in readme.MACHINES.items() for capability in row[0]]


@pytest.mark.parametrize("name, capability", GENERATIONS)
def test_a_gpu_has_the_formats_that_its_row_names(name, capability, monkeypatch):
    found = tuple(map(int, capability.split(".")))
    monkeypatch.setattr(hardware, "compute_capability", lambda device: found)
    _, products, graph, fp8 = readme.MACHINES[name]
    device = torch.device("cuda", 0)
    dtype, _ = hardware.resolve_amp_dtype("auto", device)
    assert ("BF16" in products) == (dtype is torch.bfloat16) == (roofs.unavailable("bf16", device) is None)
    assert ("FP16" in products) == (dtype is torch.float16) == ("not captured" in graph)
    assert ("TF32" in products) == (roofs.unavailable("tf32", device) is None)
    assert ("FP8" in fp8) == (roofs.unavailable("fp8", device) is None)


@pytest.mark.parametrize("name, flags", [(readme.WIDE_CPU, "flags: amx_bf16"), (readme.OTHER_CPU, "flags: avx2")])
def test_a_cpu_has_them_too(name, flags, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    dtype, _ = hardware.resolve_amp_dtype("auto", torch.device("cpu"))
    assert readme.MACHINES[name][1] == {torch.bfloat16: "BF16", torch.float32: "FP32"}[dtype]


@pytest.mark.parametrize("name", ["mps", "xpu", "mps:0"])
def test_other_devices_are_refused(name):
    with pytest.raises(hardware.DeviceError, match=f"^--device {name} is not one of auto, cpu, cuda, cuda:N$"):
        hardware.resolve_device(name)


def test_what_was_recorded_stands_in_its_row_and_the_rest_was_not_run(tmp_path):
    work = dataclasses.replace(runs.WORKLOAD, preset="gpt2", batch_size=8)
    rows = [runs.step("0_a", peak_allocated_bytes=9 * 2**30), runs.step("1_b", settings=Settings("bfloat16"))]
    gpu = {"device": "Card", "compute_capability": "8.6", "workload": work}
    for name, environment in {"a": gpu, "b": {"device": "Chip", "device_type": "cpu"}}.items():
        runs.write(runs.run(*rows, **environment), tmp_path / "machine" / name)
    said = readme.machines_table(tmp_path)
    told = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in said.splitlines() if "|" in line}
    assert told["Ampere (8.0, 8.6)"] == "Card" and told[readme.WIDE_CPU] == "Chip"
    assert told["Hopper (9.0)"] == told[readme.OTHER_CPU] == "not run"
    assert "`gpt2` with batch 8, 3 to 9 GiB" in said and "tiny" not in said
