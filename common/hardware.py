"""What this machine is: devices, precision, versions, commit, and NVML's clocks, power and energy."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from common.record import Environment, GpuState
from common.text import one_line

ROOT = Path(__file__).resolve().parent.parent
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
# Variables that change which kernels run or what they compute. Transformer Engine reads a whole family.
NUMERIC_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDNN_SDPA_PREFERRED", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY", "LADDER_BESIDE",  # what ladder.plan ran meanwhile
)  # fmt: skip
SM_CLOCK = 1  # NVML_CLOCK_SM
SET_BY_LIBRARIES = ("NVTE_CUDA_INCLUDE_DIR",)  # by Transformer Engine's import: no choice of a user


@dataclass(frozen=True)
class World:
    """Which of the processes that torchrun started this is; alone without torchrun."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine
    local_size: int = 1

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def world() -> World:
    """What torchrun's environment variables say. Raises ValueError, one line."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return World()
    try:
        return World(*(int(os.environ[name]) for name in names))
    except ValueError:
        raise ValueError(f"{', '.join(names)} are not as torchrun sets them: unset them") from None


class DeviceError(ValueError):
    """The device asked for cannot be used; the message is one line that says what to do."""


def resolve_device(name: str, among: World = World()) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` to a device that works; of several processes, each has its own GPU.

    Raises DeviceError for a device that is not there, and for an NVIDIA GPU that this torch cannot use: a CPU takes
    the place of a GPU only when asked for. Raises torch.OutOfMemoryError where the GPU has no memory left.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() or driver_version() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, digits = name.partition(":")
    if kind != "cuda" or not (digits or "0").isdecimal():
        raise DeviceError(f"--device {name} is not one of auto, cpu, cuda, cuda:N")
    if digits and among.size > 1:
        raise DeviceError(f"--device {name} is one GPU, but each process has its own: give cuda, or leave it out")
    if not torch.cuda.is_available():
        raise DeviceError(_why_torch_has_no_gpu())
    if among.local_size > (count := torch.cuda.device_count()):
        raise DeviceError(f"{among.local_size} processes need as many GPUs, but torch sees {count}")
    if (index := int(digits or among.local_rank)) >= count:
        raise DeviceError(f"--device {name} is not there: torch sees {count} CUDA device(s)")
    device = torch.device("cuda", index)
    try:
        torch.zeros(1, device=device)
    except torch.OutOfMemoryError:
        raise  # a full GPU is an out-of-memory row, not a broken one
    except RuntimeError as error:
        raise DeviceError(f"this torch cannot use {name} ({one_line(error)}); --device cpu runs on the CPU") from None
    return device


def _why_torch_has_no_gpu() -> str:
    driver = driver_version()
    if driver is None:
        return "no CUDA device here: no NVIDIA driver was found; --device cpu runs on the CPU"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU: unset it, or pass --device cpu"
    build = f"torch {torch.__version__}, " + (f"for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only")
    return f"{build}, cannot use the GPU of driver {driver}: install a torch that fits, or pass --device cpu"


def compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device, for example (9, 0) for Hopper; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    return _linux_says(CPUINFO, "model name") or platform.processor() or platform.machine()


def _linux_says(file: Path, *fields: str) -> str:
    """The first of these fields in a file of /proc; empty where there is none."""
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.lower().startswith(fields)), "")


def free_memory_bytes(device: torch.device) -> int | None:
    """Bytes that a new process can have now, of the GPU or of the host; None where the host does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    kib = _linux_says(MEMINFO, "memavailable").partition(" ")[0]
    return int(kib) * 1024 if kib else None


def held_by_others_bytes(device: torch.device) -> int:
    """Bytes of a GPU that other processes hold; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was launched; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def has_bf16_matrix_instructions(device: torch.device) -> bool:
    """Whether BF16 matrix products run in hardware: emulated on a CPU, they are many times slower than FP32."""
    if device.type == "cuda":
        return compute_capability(device) >= (8, 0)
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(_linux_says(CPUINFO, "flags", "features").split()))


def resolve_amp_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The dtype of mixed precision for `--amp-dtype name`, and why where it is FP32. Raises DeviceError."""
    gpu, bf16 = device.type == "cuda", has_bf16_matrix_instructions(device)
    if name == "auto":
        if not bf16 and not gpu:
            return torch.float32, "FP32, because this CPU has no BF16 matrix instructions"
        name = "bf16" if bf16 else "fp16"
    if name == "fp32":
        return torch.float32, "mixed precision is off, as --amp-dtype fp32 asks"
    if name == "fp16" and not gpu:
        raise DeviceError("--amp-dtype fp16 needs a GPU; on a CPU use auto, bf16 or fp32")
    if name == "bf16" and gpu and not bf16:
        raise DeviceError("--amp-dtype bf16 needs an Ampere GPU or newer; this one multiplies fp16")
    return torch.bfloat16 if name == "bf16" else torch.float16, None


@functools.cache
def nvml() -> ModuleType | None:
    """NVIDIA's management library, initialized; None where the package nvidia-ml-py or the driver is absent."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, or whatever the driver's library raises
        return None
    return pynvml


def driver_version() -> str | None:
    """Version of the NVIDIA driver, also where torch cannot use it; None where there is no driver."""
    library = nvml()
    if library is None:
        return "of unknown version" if Path("/dev/nvidia0").exists() else None
    try:
        version = library.nvmlSystemGetDriverVersion() if library.nvmlDeviceGetCount() else None
    except library.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else version


def nvml_value(device: torch.device, query: str, *arguments) -> float | str | None:
    """What `nvmlDeviceGet<query>` answers of a device, in NVML's own unit; None where it cannot say, as of a CPU."""
    library = nvml()
    if library is None or device.type != "cuda":
        return None
    try:
        handle = library.nvmlDeviceGetHandleByUUID(gpu_uuid(device))
        return getattr(library, f"nvmlDeviceGet{query}")(handle, *arguments)
    except (library.NVMLError, AttributeError, TypeError):
        return None


def gpu_uuid(device: torch.device) -> str:
    """Which card this is: NVML's numbering differs from torch's under CUDA_VISIBLE_DEVICES, the UUID does not."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def gpu_state(device: torch.device) -> GpuState | None:
    """Clocks, power and throttle reasons now; None on a CPU and without NVML."""
    if device.type != "cuda" or nvml() is None:
        return None
    reasons = nvml_value(device, "CurrentClocksThrottleReasons")
    return GpuState(
        sm_clock_mhz=nvml_value(device, "ClockInfo", SM_CLOCK),
        max_sm_clock_mhz=nvml_value(device, "MaxClockInfo", SM_CLOCK),
        power_w=watts(nvml_value(device, "PowerUsage")),
        throttle_reasons=None if reasons is None else hex(reasons),
    )


class Meter:
    """Means of a GPU's clock and power over a `with` block; None on a CPU, without NVML, and of a block too short.

    A thread asks NVML. The energy counter advances every 100 ms or so: power is what it counted between the first and
    the last advance inside the block, divided by the time between them.
    """

    PERIOD_S = 0.01

    def __init__(self, device: torch.device):
        self.device, self.clock_mhz, self.power_w = device, None, None

    def __enter__(self) -> Meter:
        self._ended, self._samples = threading.Event(), []  # (seconds, MHz, mJ)
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if self.device.type == "cuda" and nvml():
            self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(self.PERIOD_S):
            energy = nvml_value(self.device, "TotalEnergyConsumption")
            self._samples.append((time.perf_counter(), nvml_value(self.device, "ClockInfo", SM_CLOCK), energy))

    def __exit__(self, *_) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        clocks = [clock for _, clock, _ in self._samples if clock is not None]
        self.clock_mhz = statistics.fmean(clocks) if clocks else None
        pairs = itertools.pairwise((second, mj) for second, _, mj in self._samples if mj is not None)
        advances = [after for before, after in pairs if after[1] != before[1]]
        if len(advances) > 1:
            (first_s, first_mj), (last_s, last_mj) = advances[0], advances[-1]
            self.power_w = (last_mj - first_mj) / 1e3 / (last_s - first_s)


def describe(device: torch.device) -> Environment:
    """Machine, versions, power limit, variables that change numerics, commit."""
    packages = ("triton", "transformer-engine", "torchao", "transformers")
    environment = Environment(
        device=device_name(device), device_type=device.type, cpu=cpu_name(), cpu_threads=torch.get_num_threads(),
        os=f"{platform.system()} {platform.machine()}", python=platform.python_version(), torch=torch.__version__,
        **{name.replace("-", "_"): package_version(name) for name in packages},
    )  # fmt: skip
    for name, value in sorted(os.environ.items()):
        if (name in NUMERIC_VARIABLES or name.startswith("NVTE_")) and name not in SET_BY_LIBRARIES:
            environment.variables[name] = one_line(value)
    environment.nodes = world().nodes
    environment.commit, environment.dirty, environment.commit_reason = commit_of(ROOT)
    if device.type == "cuda":
        environment.cuda, environment.cudnn, environment.driver = torch.version.cuda, cudnn_version(), driver_version()
        environment.power_limit_w = watts(nvml_value(device, "EnforcedPowerLimit"))
        environment.gpu_uuid = gpu_uuid(device)
        environment.compute_capability = ".".join(map(str, compute_capability(device)))
        environment.gpu_memory_bytes = torch.cuda.get_device_properties(device).total_memory
        environment.link = link_between_gpus(world().local_size)
        environment.nvml_reason = None if nvml() else "nvidia-ml-py is not installed, or finds no driver"
    return environment


def link_between_gpus(count: int) -> str | None:
    """NVLink or PCIe: how the first GPU of `count` here reaches the others; None where NVML cannot say."""
    library = nvml()
    if library is None or count == 1:
        return None
    try:
        first, *others = (library.nvmlDeviceGetHandleByUUID(gpu_uuid(torch.device("cuda", k))) for k in range(count))
        by_nvlink = library.NVML_P2P_CAPS_INDEX_NVLINK
        states = [library.nvmlDeviceGetP2PStatus(first, other, by_nvlink) for other in others]
    except (library.NVMLError, AttributeError):
        return None
    return "PCIe" if any(states) else "NVLink"  # 0 is NVML_P2P_STATUS_OK


def cudnn_version() -> int | str | None:
    """As torch reports it, for example 91900; its complaint where another library's cuDNN was loaded first."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:
        return " ".join(one_line(error).split())


def cudnn_note(device: torch.device) -> str | None:
    """What to do where parts of a cuDNN other than PyTorch's own were loaded, as Transformer Engine may do."""
    if device.type != "cuda" or not isinstance(cudnn_version(), str):
        return None
    return "attention ran on a cuDNN that is not PyTorch's own: put site-packages/nvidia/cudnn/lib on LD_LIBRARY_PATH"


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError, OSError):  # absent, or its metadata cannot be read
        return None


def commit_of(root: Path) -> tuple[str | None, bool | None, str | None]:
    """The commit that is checked out at `root`, whether files differ from it, and why the commit is None."""
    if not (root / ".git").exists():
        return None, None, "not a git checkout"
    try:
        head = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except FileNotFoundError:
        return None, None, "git is not installed"
    except (OSError, subprocess.SubprocessError):
        return None, None, "git cannot tell"
    return head, bool(changes), None


def _git(root: Path, *arguments: str) -> str:
    # A container often runs as another user than the one who owns the mounted checkout.
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=True)
    return done.stdout.strip()
