"""What this machine is: devices, precision, versions, commit, and a GPU's clock and power."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from common.record import Environment, code_sha256

ROOT = Path(__file__).resolve().parent.parent
# Of variables that change which kernels run or what they compute.
NUMERIC_PREFIXES = ("ATEN_", "CUBLAS_", "CUDA_", "MKL_", "NCCL_", "NVIDIA_TF32", "NVTE_", "OMP_", "ONEDNN_", "PYTORCH_")
NUMERIC_PREFIXES += ("TORCH", "TRITON_")
FP8_CAPABILITY = (8, 9)  # Ada, Hopper and newer multiply FP8


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` to a device that is there; of several processes, each has its own GPU.

    Raises ValueError, one line, for any other, and for an NVIDIA GPU that this torch cannot use: a CPU takes the place
    of a GPU only when asked for.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() or Path("/dev/nvidia0").exists() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, digits = name.partition(":")
    if kind != "cuda" or not (digits or "0").isdecimal():
        raise ValueError(f"--device {name} is not one of auto, cpu, cuda, cuda:N")
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        raise ValueError(f"torch {torch.__version__}, {built}, can use no NVIDIA GPU; --device cpu runs on the CPU")
    if (index := int(digits or local_rank)) >= torch.cuda.device_count():
        raise ValueError(f"--device cuda:{index} is not there: torch sees {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def resolve_amp_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The dtype of mixed precision for `--amp-dtype name`, and why where it is FP32. Raises ValueError."""
    bf16, what = has_bf16_matrix_instructions(device), "GPU" if device.type == "cuda" else "CPU"
    if name == "bf16" and what == "GPU" and not bf16:
        raise ValueError("--amp-dtype bf16 needs an Ampere GPU or newer")
    if name == "bf16" or (name == "auto" and bf16):
        return torch.bfloat16, None
    return torch.float32, "--amp-dtype fp32" if name == "fp32" else f"FP32, because this {what} does not multiply BF16"


def has_bf16_matrix_instructions(device: torch.device) -> bool:
    """Whether BF16 matrix products run in hardware: emulated on a CPU, they are many times slower than FP32."""
    if device.type == "cuda":
        return compute_capability(device) >= (8, 0)
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(_proc_field("cpuinfo", "flags", "features").split()))


def compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device, for example (9, 0) for Hopper; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    return _proc_field("cpuinfo", "model name") or platform.processor() or platform.machine()


def _proc_field(file: str, *fields: str) -> str:
    """The first of these fields in a file of /proc; empty where there is none."""
    path = Path("/proc", file)
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.lower().startswith(fields)), "")


def free_memory_bytes(device: torch.device) -> int | None:
    """Bytes that a new process can have now, of the GPU or of the host; None where the host does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    kib = _proc_field("meminfo", "memavailable").partition(" ")[0]
    return int(kib) * 1024 if kib else None


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was launched; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_and_power(device: torch.device) -> tuple[float, float] | None:
    """MHz and watts of a GPU now, its power over the last second or less; None without the package nvidia-ml-py."""
    try:
        return float(torch.cuda.clock_rate(device)), torch.cuda.power_draw(device) / 1e3
    except Exception:  # ImportError, or whatever the driver's library raises
        return None


def describe(device: torch.device) -> Environment:
    """Machine, versions, variables that change numerics, commit."""
    installed = {one.name.lower(): one.version for one in metadata.distributions() if one.name}
    names = ("triton", "transformer-engine", "torchao", "transformers")
    versions = {"python": platform.python_version(), "torch": torch.__version__, **{n: installed.get(n) for n in names}}
    found = Environment(
        device=device_name(device),
        device_type=device.type,
        cpu=cpu_name(),
        cpu_threads=torch.get_num_threads(),
        # Without paths, which are of this machine alone.
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(NUMERIC_PREFIXES) and "/" not in v},
        code_sha256=code_sha256(ROOT),
    )
    found.commit, found.dirty = _commit()
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        properties = torch.cuda.get_device_properties(device)
        found.gpu_uuid, found.gpu_memory_bytes = f"GPU-{properties.uuid}", properties.total_memory
    found.versions = {name: version for name, version in versions.items() if version}
    return found


def _commit() -> tuple[str | None, bool | None]:
    """The commit of this checkout, and whether files differ from it; None where git cannot tell."""
    # A container often runs as another user than the one who owns the mounted checkout.
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    asked = (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    try:
        answers = [subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout for words in asked]
    except (OSError, subprocess.SubprocessError):
        return None, None
    return answers[0].strip(), bool(answers[1])
