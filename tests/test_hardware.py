"""What this machine is, and what cannot be known of it."""

from types import SimpleNamespace

import pytest
import torch
from conftest import git

from common import hardware

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class NVMLError(Exception):
    pass


def raising(*_):
    raise NVMLError("Not Supported")


def test_mixed_precision_and_free_memory_of_a_cpu_are_what_linux_says(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(hardware, "MEMINFO", tmp_path / "meminfo")
    assert hardware.free_memory_bytes(CPU) is None, "or unknown"
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1000 kB\n")
    assert hardware.free_memory_bytes(CPU) == 1_024_000
    for flags, bf16 in (("fma avx2", False), ("avx512_bf16", True), ("amx_bf16 amx_tile", True), ("", False)):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        dtype, note = hardware.resolve_amp_dtype("auto", CPU)
        assert dtype is (torch.bfloat16 if bf16 else torch.float32) and (note is None) is bf16


def test_nvml_answers_in_its_units_and_what_it_cannot_say_is_null(monkeypatch):
    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1500}[kind],
        nvmlDeviceGetMaxClockInfo=raising,
        nvmlDeviceGetPowerUsage=lambda handle: 250_500,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4,
    )
    monkeypatch.setattr(hardware, "nvml", lambda: library)
    monkeypatch.setattr(hardware, "gpu_uuid", lambda device: "GPU-1")
    state = hardware.gpu_state(GPU)
    assert (state.sm_clock_mhz, state.power_w) == (1500, 250.5)
    assert state.throttle_reasons == "0x4" and state.max_sm_clock_mhz is None
    assert hardware.driver_version() == "580.1"
    library.nvmlDeviceGetCount = lambda: 0
    assert hardware.driver_version() is None, "a driver without a GPU is none"
    monkeypatch.setattr(hardware, "nvml", lambda: None)
    assert hardware.gpu_state(GPU) is None and hardware.nvml_value(GPU, "PowerUsage") is None


def test_gpus_that_are_hidden_are_named(monkeypatch):
    monkeypatch.setattr(hardware, "driver_version", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(hardware.DeviceError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        hardware.resolve_device("auto")


def test_another_cudnn_than_torchs_own_is_said_and_only_variables_that_a_user_chose_are_recorded(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility: compiled  against (9, 19, 0), found (9, 14, 0)\nmore")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert "LD_LIBRARY_PATH" in hardware.cudnn_note(GPU) and hardware.cudnn_note(CPU) is None
    for name, value in (("NVTE_CUDA_INCLUDE_DIR", "/set/by/an/import"), ("NVTE_FUSED_ATTN", "0"), ("UNRELATED", "1")):
        monkeypatch.setenv(name, value)
    variables = hardware.describe(CPU).variables
    assert variables["NVTE_FUSED_ATTN"] == "0" and not {"NVTE_CUDA_INCLUDE_DIR", "UNRELATED"} & variables.keys()


def test_a_commit_is_recorded_with_whether_files_differ(tmp_path, monkeypatch):
    assert hardware.commit_of(tmp_path) == (None, None, "not a git checkout")
    git(tmp_path, "init")
    assert hardware.commit_of(tmp_path) == (None, None, "git cannot tell"), "no commit yet"
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "first")
    commit, dirty, reason = hardware.commit_of(tmp_path)
    assert len(commit) == 40 and dirty is False and reason is None
    (tmp_path / "a").write_text("2")
    assert hardware.commit_of(tmp_path)[1] is True
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.commit_of(tmp_path) == (None, None, "git is not installed")
