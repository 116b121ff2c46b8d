"""Machines by stand-ins that answer as they do: which GPUs run, what each multiplies, what a user is told of
one that cannot be used."""

from types import SimpleNamespace

import pytest
import torch
from conftest import STEPS, arguments

from common import hardware, options
from common.text import Skip, explain
from report.cells import scaling
from report.peaks import peak_flops_per_s

GPU = torch.device("cuda", 0)
BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # as PyTorch's wheels of CUDA 12.8


@pytest.fixture
def machine(monkeypatch):
    """Pretends a GPU: machine(name, (9, 0), ...)."""

    def pretend(name, capability, built=BUILT, count=1, **properties):
        answers = {
            "get_device_name": name,
            "get_device_capability": capability,
            "mem_get_info": (2**36, 2**37),
        }
        answers["get_device_properties"] = SimpleNamespace(uuid="GPU-1", total_memory=2**37, **properties)
        for question, answer in answers.items():
            monkeypatch.setattr(torch.cuda, question, lambda device=None, answer=answer: answer)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.version, "hip", None)

    return pretend


# Name, compute capability, whether it multiplies BF16, what FP8's sizes divide by (None: no FP8), TFLOP/s of
# BF16.
CARDS = [
    ("Tesla V100-SXM2-16GB", (7, 0), False, None, None),
    ("Tesla T4", (7, 5), False, None, None),
    ("NVIDIA A100-SXM4-80GB", (8, 0), True, None, 312),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0), True, None, None),
    ("NVIDIA A10", (8, 6), True, None, 125),
    ("NVIDIA A10G", (8, 6), True, None, None),
    ("NVIDIA L4", (8, 9), True, 16, 121),
    ("NVIDIA L40S", (8, 9), True, 16, 362.05),
    ("NVIDIA GeForce RTX 4090", (8, 9), True, 16, 165.2),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), True, 16, None),
    ("NVIDIA GeForce RTX 4090 D", (8, 9), True, 16, None),
    ("NVIDIA H100 80GB HBM3", (9, 0), True, 16, 989.4),
    ("NVIDIA H100 PCIe", (9, 0), True, 16, 756),
    ("NVIDIA H100 NVL", (9, 0), True, 16, 835.5),
    ("NVIDIA H200", (9, 0), True, 16, 989.4),
    ("NVIDIA H200 NVL", (9, 0), True, 16, 835.5),
    ("NVIDIA GH200 480GB", (9, 0), True, 16, 989.4),
    ("NVIDIA B200", (10, 0), True, 32, 2250),
    ("NVIDIA GB200", (10, 0), True, 32, 2500),
    ("NVIDIA B300 SXM6 AC", (10, 3), True, 32, 2250),
    ("NVIDIA GeForce RTX 5090", (12, 0), True, 16, 209.5),
    ("NVIDIA GB10", (12, 1), True, 16, None),
]


@pytest.mark.parametrize(
    ("name", "capability", "bf16", "unit", "peak"), CARDS, ids=[card[0] for card in CARDS]
)
def test_what_a_card_runs(name, capability, bf16, unit, peak, machine):
    machine(name, capability, [*BUILT, "sm_70"])
    assert hardware.resolve_device("auto") == GPU
    told = hardware.about(GPU)
    assert told[0].startswith(f"GPU: {name}") and len(told) == 1 + (not bf16)
    assert hardware.has_bf16_matrix_instructions(GPU) is bf16 and (bf16 or "stay FP32" in told[1])
    if unit:
        assert hardware.fp8_unit(hardware.require_fp8(GPU)) == unit
    else:
        with pytest.raises(Skip, match="Ada, Hopper or newer"):
            hardware.require_fp8(GPU)
    assert peak_flops_per_s(name, "bf16") == (peak and peak * 1e12)
    assert hardware.describe(GPU).compute_capability == capability


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("NVIDIA B200", (75, 1125, 2250, 4500)),
        ("NVIDIA B300 SXM6 AC", (75, 1125, 2250, 4500)),
        ("NVIDIA GB300", (80, 1250, 2500, 5000)),
        ("NVIDIA H200", (67, 494.7, 989.4, 1978.9)),
        ("NVIDIA H100 NVL", (60, 417.5, 835.5, 1670.5)),
        ("NVIDIA H100 PCIe", (51, 378, 756, 1513)),
        ("NVIDIA A100-SXM4-80GB", (19.5, 156, 312, None)),
        ("NVIDIA A10", (31.2, 62.5, 125, None)),
        ("NVIDIA L40S", (91.6, 183, 362.05, 733)),
        ("NVIDIA L4", (30.3, 60, 121, 242.5)),
        ("NVIDIA GeForce RTX 4090", (82.6, 82.6, 165.2, 330.3)),
        ("NVIDIA GeForce RTX 5090", (104.8, 104.8, 209.5, 419)),
    ],
)
def test_peaks_are_those_of_datasheets(name, peaks):
    seen = [peak_flops_per_s(name, precision) for precision in ("fp32", "tf32", "bf16", "fp8")]
    assert seen == [peak and peak * 1e12 for peak in peaks]


@pytest.mark.parametrize(
    ("capability", "built", "said"),
    [
        ((6, 1), ["sm_50"], "6.1, and this torch needs 7.0 or newer"),
        ((7, 0), ["sm_75", "sm_90"], "7.0, and this torch needs 7.5 or newer"),
        ((10, 0), ["sm_80", "sm_90"], "10.0, and this torch has no kernels for it: install a newer one"),
        ((12, 1), ["sm_80", "sm_90", "sm_100", "sm_120a"], "12.1, and this torch has no kernels for it"),
        ((12, 1), ["sm_80", "sm_120"], None),
        ((10, 0), ["sm_80", "compute_90"], None),
        ((9, 0), ["sm_90a"], None),
        ((10, 3), ["sm_90", "sm_100f"], None),
        ((8, 7), ["sm_75", "sm_90"], "8.7, and this torch has no kernels for it"),
    ],
)
def test_a_gpu_that_this_torch_has_no_kernels_for_is_one_line(capability, built, said, machine):
    machine("X", capability, built)
    if said is None:
        assert hardware.resolve_device("cuda") == GPU
        return
    with pytest.raises(ValueError, match=f"X has compute capability {said}"):
        hardware.resolve_device("cuda")


def no_driver():
    raise RuntimeError(
        "The NVIDIA driver on your system is too old (found version 11040). Please update\nit."
    )


WHY = {
    "of AMD": ({"hip": "6.4"}, {}, 1, "is for AMD's GPUs, and the steps are for NVIDIA's"),
    "for CPUs": ({"cuda": None}, {}, 0, "is built for CPUs alone: install one with CUDA"),
    "hidden": ({}, {"CUDA_VISIBLE_DEVICES": ""}, 0, "CUDA_VISIBLE_DEVICES= hides the GPUs"),
    "an old driver": ({}, {}, 0, "driver on your system is too old (found version 11040)"),
    "a second one": ({}, {}, 1, "can use 1 NVIDIA GPUs, not 2"),
}


@pytest.mark.parametrize("kind", WHY)
def test_why_a_gpu_cannot_be_used_is_told_with_its_cause(kind, machine, monkeypatch):
    versions, variables, count, said = WHY[kind]
    machine("X", (9, 0), count=count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in versions.items():
        monkeypatch.setattr(torch.version, name, value)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(ValueError) as refused:
        hardware.resolve_device("cuda", 1 if kind == "a second one" else 0)
    line = str(refused.value)
    assert said in line and line.endswith(". --device cpu runs on the CPU") and "\n" not in line
    monkeypatch.setattr(hardware.shutil, "which", lambda name: "/bin/nvidia-smi")
    if not count:
        assert said in hardware.about(torch.device("cpu"))[-1], "where auto took the CPU"


def test_memory_that_is_the_host_s_holds_the_copy_of_the_weights_too(machine, monkeypatch):
    config = arguments(STEPS[0]).config
    monkeypatch.setattr("common.flops.parameters", lambda config: 2**36 // options.GPU_BYTES)
    machine("NVIDIA B200", (10, 0))
    options.check_memory(config, GPU, 1, cold=False)
    machine("NVIDIA GB10", (12, 1), is_integrated=1)
    options.check_memory(config, GPU, 1, cold=True)
    with pytest.raises(ValueError, match="needs 80 GiB in training"):
        options.check_memory(config, GPU, 1, cold=False)


def test_a_ptxas_that_is_too_old_is_told_with_what_to_do():
    error = RuntimeError(
        "PTXAS error: Internal Triton PTX codec error\n`ptxas` stderr:\n"
        "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'\n"
    )
    status, reason = explain(error)
    assert status == "failed" and "TRITON_PTXAS_PATH" in reason
    assert reason.endswith("(ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name')")


def test_a_path_with_a_space_is_told_where_the_compiler_fails_at_it():
    said = "C++ compile error\n\n/usr/bin/ld: cannot find -ltorch: No such file or directory\n"
    assert "path of Python or of its packages has a space" in explain(RuntimeError(said))[1]
    assert explain(RuntimeError("ld: cannot find -lcuda")) == ("failed", "ld: cannot find -lcuda")
    said = "C++ compile error\n\ng++: fatal error: input file '/tmp/a' is the same as output file\n"
    assert "TMPDIR or TORCHINDUCTOR_CACHE_DIR has a space (g++: fatal error" in explain(RuntimeError(said))[1]


@pytest.mark.parametrize("folder", ["lib/site-packages/torch", "torchinductor_me/ab"])
def test_an_error_has_the_line_that_is_no_packages(folder, tmp_path):
    scope = {}
    exec(compile("def f():\n    raise ValueError('too wide')", tmp_path / folder / "inner.py", "exec"), scope)
    with pytest.raises(ValueError) as raised:
        exec(compile("\n\ninner()", tmp_path / "net.py", "exec"), {"inner": scope["f"]})
    assert explain(raised.value) == ("failed", "net.py, line 3: too wide")
    raised.value.__traceback__ = raised.value.__traceback__.tb_next.tb_next
    assert explain(raised.value) == ("failed", "too wide"), "of packages alone"


@pytest.mark.parametrize(
    ("recipe", "label"),
    [
        (None, "-"),
        ("recipe_type=DelayedScaling, margin=0", "delayed"),
        ("recipe_type=Float8CurrentScaling, format=HYBRID", "current"),
        ("torchao, tensorwise", "current"),
        ("recipe_type=MXFP8BlockScaling, margin=0, format=E4M3", "MXFP8"),
        ("recipe_type=Float8BlockScaling, format=E4M3", "by blocks"),
        ("recipe_type=NVFP4BlockScaling, fp4_format=E2M1", "NVFP4"),
    ],
)
def test_a_recipe_has_a_label(recipe, label):
    assert scaling(recipe) == label
