"""What this machine is and what it can do: devices, precision, versions, clocks, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

# Variables that change which kernels run or what they compute; TE and Inductor read whole families.
NUMERIC_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_CUDNN_SDPA_PREFERRED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
)
NUMERIC_PREFIXES = ("NVTE_",)
CPUINFO = Path("/proc/cpuinfo")


class DeviceError(ValueError):
    """The device asked for cannot be used; the message is one line that says what to do."""


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` to a device that works.

    Raises DeviceError for a device that is not there, and for an NVIDIA GPU that this torch cannot
    use: the CPU is taken instead of a GPU only when asked for.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() or nvidia_smi("driver_version") else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name} is not one of auto, cpu, cuda, cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(_why_no_cuda())
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(f"--device {name} is not there: torch sees {torch.cuda.device_count()} CUDA device(s)")
    device = torch.device("cuda", index)
    try:
        torch.zeros(1, device=device)
    except torch.OutOfMemoryError:
        raise  # a full GPU is an out-of-memory row, not a broken one
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(
            f"torch {torch.__version__} cannot use {name} ({reason}); --device cpu runs on the CPU"
        ) from None
    return device


def _why_no_cuda() -> str:
    driver = nvidia_smi("driver_version")
    if driver and os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU: unset it, or pass --device cpu"
    if driver is None:
        return "no CUDA device here: nvidia-smi finds no NVIDIA GPU; --device cpu runs on the CPU"
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU-only build"
    return (
        f"torch {torch.__version__}, {build}, cannot use the NVIDIA GPU here (driver {driver}): "
        "install a torch that fits the driver, or pass --device cpu"
    )


def nvidia_smi(query: str, device: torch.device | None = None) -> str | None:
    """First line nvidia-smi prints for `--query-gpu=query`, or None where it cannot say."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    if device is not None:
        command.append(f"--id={_gpu_uuid(device)}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.splitlines()[0] if answer else None


def _gpu_uuid(device: torch.device) -> str:
    # The index nvidia-smi knows differs from torch's under CUDA_VISIBLE_DEVICES; the UUID does not.
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device, for example (9, 0) for Hopper; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_bf16_matrix_instructions(device: torch.device) -> bool:
    """Whether BF16 matrix products run in hardware.

    On a GPU that is Ampere and newer. On a CPU it needs AMX or AVX512_BF16 (x86) or the bf16
    extension (Arm): emulated, BF16 is many times slower than FP32.
    """
    if device.type == "cuda":
        return compute_capability(device) >= (8, 0)
    try:
        cpuinfo = CPUINFO.read_text()
    except OSError:
        return False
    flags = next((line for line in cpuinfo.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(flags.split()))


def resolve_amp_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The dtype of mixed precision for `--amp-dtype name`, and why when it is FP32.

    Raises DeviceError for a format the device cannot multiply.
    """
    bf16 = has_bf16_matrix_instructions(device)
    if name == "fp32":
        return torch.float32, "mixed precision is off, as --amp-dtype fp32 asks"
    if name == "fp16" and device.type == "cpu":
        raise DeviceError("--amp-dtype fp16 needs a GPU; on a CPU use auto, bf16 or fp32")
    if name == "bf16" and device.type == "cuda" and not bf16:
        raise DeviceError("--amp-dtype bf16 needs an Ampere GPU or newer; this one multiplies fp16")
    if name == "auto" and device.type == "cpu" and not bf16:
        return torch.float32, "FP32, because this CPU has no BF16 matrix instructions"
    if name == "fp16" or (name == "auto" and not bf16):
        return torch.float16, None
    return torch.bfloat16, None


def free_memory_bytes(device: torch.device) -> int:
    """Bytes free on a CUDA device now."""
    return torch.cuda.mem_get_info(device)[0]


def describe(device: torch.device) -> dict:
    """The record's `environment`: machine, versions, power limit, variables that change numerics, commit."""
    gpu = device.type == "cuda"
    environment = {
        "device": device_name(device),
        "device_type": device.type,
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if gpu else None,
        "cudnn": cudnn_version() if gpu else None,
        "triton": package_version("triton"),
        "transformer_engine": package_version("transformer-engine"),
        "driver": nvidia_smi("driver_version", device) if gpu else None,
        "power_limit_w": _number(nvidia_smi("power.limit", device)) if gpu else None,
        "compute_capability": ".".join(map(str, compute_capability(device))) if gpu else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory if gpu else None,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in NUMERIC_VARIABLES or name.startswith(NUMERIC_PREFIXES)
        },
    }
    return environment | commit()


def gpu_state(device: torch.device) -> dict | None:
    """Clocks (MHz), temperature (deg C), power (W) and throttle reasons now; None on a CPU."""
    if device.type != "cuda":
        return None
    fields = {
        "sm_clock_mhz": "clocks.sm",
        "max_sm_clock_mhz": "clocks.max.sm",
        "memory_clock_mhz": "clocks.mem",
        "temperature_c": "temperature.gpu",
        "power_w": "power.draw",
        "throttle_reasons": "clocks_throttle_reasons.active",
    }
    answer = nvidia_smi(",".join(fields.values()), device)
    if answer is None:
        return None
    return {name: _number(value) for name, value in zip(fields, answer.split(", "), strict=False)}


def _number(text: str | None) -> float | str | None:
    """nvidia-smi's `1980` as a number, `[N/A]` as None, a bit mask as it is."""
    if text is None or text.startswith("["):
        return None
    try:
        return float(text)
    except ValueError:
        return text


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cudnn_version() -> int | str | None:
    """As torch reports it, for example 91900; its complaint where another library's cuDNN was loaded first."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> dict:
    """`commit` (hash or null), `dirty` (uncommitted changes), `commit_reason` (why null), of this checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        head = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except FileNotFoundError:
        return {"commit": None, "dirty": None, "commit_reason": "git is not installed"}
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return {"commit": None, "dirty": None, "commit_reason": said[0] if said else "git cannot tell"}
    return {"commit": head, "dirty": bool(changes), "commit_reason": None}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
