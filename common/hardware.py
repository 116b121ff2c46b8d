"""What this machine is: devices, precision, versions, commit, and a GPU's clock and power."""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from common.record import ALLOCATION, Environment
from common.text import ROOT, Skip, one_line

PACKAGES = ("triton", "transformer-engine", "torchao", "transformers")  # whose versions matter
CLONES: dict[str, Path] = {}  # of peers that are no packages: their folders, whose commits are their versions
# Variables of the environment that change what runs: the value that does not, and what others do.
VARIABLES = {
    "TORCHDYNAMO_DISABLE": ("0", "the compiler is off"),
    "TORCH_COMPILE_DISABLE": ("0", "the compiler is off"),
    "CUDA_LAUNCH_BLOCKING": ("0", "the host waits for every kernel"),
    "NVIDIA_TF32_OVERRIDE": ("1", "TF32 is off"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("0", "matmuls in FP32 run in TF32"),
    ALLOCATION: ("", "memory of the GPU is not allocated as by default"),
}
FP8_CAPABILITY = (8, 9)  # Ada, Hopper and newer multiply FP8
NO_FP8 = "FP8 needs an NVIDIA GPU of the generation Ada, Hopper or newer"
OLDEST_OF_TRITON = (7, 0)


def resolve_device(name: str, index: int = 0) -> torch.device:
    """`auto`, `cpu` or `cuda` to a device that is there, of several GPUs the one with this index. Raises
    ValueError for a GPU that this torch cannot use: a CPU takes its place only when asked for."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() or Path("/dev/nvidia0").exists() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if torch.version.hip or not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise ValueError(f"{why_no_gpu(index)}. --device cpu runs on the CPU")
    device = torch.device("cuda", index)
    check_generation(device)
    return device


def why_no_gpu(index: int = 0) -> str:
    """Why this torch cannot use a GPU of this index, in a clause."""
    own, hidden = f"torch {torch.__version__}", os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.hip:
        return f"{own} is for AMD's GPUs, and the steps are for NVIDIA's"
    if torch.version.cuda is None:
        return f"{own} is built for CPUs alone: install one with CUDA (pytorch.org)"
    if torch.cuda.is_available():
        return f"{own} can use {torch.cuda.device_count()} NVIDIA GPUs, not {index + 1}"
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden} hides the GPUs"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, or one that is too old
        return one_line(error, 150).rstrip(".")
    return f"{own} can use no NVIDIA GPU"


def check_generation(device: torch.device) -> None:
    """Raises ValueError for a GPU that this torch has no kernels for, or the compiler, Triton, cannot
    serve."""
    capability, archs = compute_capability(device), torch.cuda.get_arch_list()
    # sm_90 and sm_90f run on 9.x, sm_90a on 9.0 alone, and compute_90 is compiled for whatever is newer.
    matches = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch) for arch in archs]
    built = [(match[1], (int(match[2]), int(match[3])), match[4]) for match in matches if match]
    oldest = max(min((version for _, version, _ in built), default=(0, 0)), OLDEST_OF_TRITON)
    is_served = any(
        version <= capability and (kind == "compute" or version[0] == capability[0])
        for kind, version, only in built
        if only != "a" or version == capability
    )
    has = f"{device_name(device)} has compute capability {{}}.{{}}".format(*capability)
    if capability < oldest:
        raise ValueError("{}, and this torch needs {}.{} or newer".format(has, *oldest))
    if built and not is_served:
        raise ValueError(f"{has}, and this torch has no kernels for it: install a newer one")


def shares_memory(device: torch.device) -> bool:
    """Whether a GPU's memory is the host's, as of a GB10 or a Jetson."""
    is_gpu = device.type == "cuda"
    return is_gpu and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def about(device: torch.device) -> list[str]:
    """What a user should know of the device before anything runs on it."""
    name = f"{device_name(device)}, torch {torch.__version__}"
    lines = [f"{variable}={value}: {VARIABLES[variable][1]}" for variable, value in set_variables().items()]
    if device.type == "cuda":
        lines.append(f"GPU: {name}")
        if not has_bf16_matrix_instructions(device):
            lines.append(
                "This GPU does not multiply BF16: all steps stay FP32, and mixed precision gains nothing"
            )
        return lines
    lines.append(f"CPU: {name}. This run shows how each step works, and not what it gains on a GPU")
    has_gpu = shutil.which("nvidia-smi") or Path("/dev/dxg").exists()
    if has_gpu and not torch.cuda.is_available():
        lines.append(f"There seems to be an NVIDIA GPU, but it cannot be used: {why_no_gpu()}")
    return lines


def set_variables() -> dict[str, str]:
    """The variables of the environment that change what runs, and their values."""
    given = {name: os.environ.get(name, "") for name in VARIABLES}
    return {name: value for name, value in given.items() if value not in ("", VARIABLES[name][0])}


def has_bf16_matrix_instructions(device: torch.device) -> bool:
    """Whether BF16 matrix products run in hardware: emulated on a CPU, they are many times slower than
    FP32."""
    if device.type == "cuda":
        return compute_capability(device) >= (8, 0)
    return bool(
        {"amx_bf16", "avx512_bf16", "bf16"} & set(_proc_field("cpuinfo", "flags", "features").split())
    )


def compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device, for example (9, 0) for Hopper; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def require_fp8(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU that multiplies FP8. Raises Skip for any other device."""
    capability = compute_capability(device)
    if capability < FP8_CAPABILITY:
        raise Skip(NO_FP8)
    return capability


def fp8_unit(capability: tuple[int, int]) -> int:
    """What the sizes of an FP8 matmul must be divisible by: 16, or 32 where Transformer Engine's default
    recipe has one scale for 32 numbers (MXFP8). Source: `get_default_fp8_recipe` in its quantization.py."""
    return 32 if (10, 0) <= capability < (12, 0) else 16


def multiply_fp8(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> torch.Tensor:
    """(M, K) x (K, N) in FP8, the second by columns, each with one scale in FP32; the product in BF16."""
    if not hasattr(torch.nn.functional, "scaled_mm"):  # before PyTorch 2.10, where no product is public
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)
    one = torch.nn.functional.ScalingType.TensorWise
    return torch.nn.functional.scaled_mm(a, b, scale_a, one, scale_b, one, use_fast_accum=True)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
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


def clock_and_power(device: torch.device) -> tuple[float, float] | None:
    """MHz and watts of a GPU now, its power over the last second or less; None without the package
    nvidia-ml-py."""
    try:
        return float(torch.cuda.clock_rate(device)), torch.cuda.power_draw(device) / 1e3
    except Exception:  # ImportError, or whatever the driver's library raises
        return None


def describe(device: torch.device) -> Environment:
    """Machine, versions, commit."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions |= {name: _commit(folder) or "unknown" for name, folder in CLONES.items()}
    environment = Environment(
        device=device_name(device),
        device_type=device.type,
        cpu=device_name(torch.device("cpu")),
        cpu_threads=torch.get_num_threads(),
        versions=versions,
        variables=set_variables(),
        commit=_commit(ROOT),
    )
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda or "", "cudnn": str(torch.backends.cudnn.version())}
        properties = torch.cuda.get_device_properties(device)
        environment.gpu_uuid = hashlib.sha256(str(properties.uuid).encode()).hexdigest()[:8]
        environment.gpu_memory_bytes = properties.total_memory
        environment.compute_capability = compute_capability(device)
    return environment


def _commit(clone: Path) -> str | None:
    """The commit of a checkout, with -dirty where files differ from it, documents aside; None where git
    cannot tell, as in a folder that another checkout has."""
    # A container often runs as another user than the one who owns the mounted checkout.
    git = ["git", "-c", f"safe.directory={clone}", "-C", str(clone)]
    commands = (
        ["rev-parse", "--show-prefix"],
        ["rev-parse", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!README.md"],
    )
    try:
        prefix, commit, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if prefix:
        return None
    return f"{commit}-dirty" if changed else commit
