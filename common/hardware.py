"""What this machine is and what it can do: devices, precision, versions, clocks, commit, measured roofs.

python -m common.hardware ARGUMENT ...    the roofs of this machine at the shapes of that workload; the
                                          arguments are those of a step, --output names the JSON
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from common.analysis import PRECISIONS

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
SET_BY_LIBRARIES = ("NVTE_CUDA_INCLUDE_DIR",)  # by Transformer Engine's import: no choice of a user
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
        if device.index:
            raise DeviceError(f"--device {name} is not there: there is one cpu")
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
        "torchao": package_version("torchao"),
        "transformers": package_version("transformers"),
        "driver": nvidia_smi("driver_version", device) if gpu else None,
        "power_limit_w": _number(nvidia_smi("power.limit", device)) if gpu else None,
        "gpu_uuid": _gpu_uuid(device) if gpu else None,  # which of several equal cards
        "compute_capability": ".".join(map(str, compute_capability(device))) if gpu else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(device).total_memory if gpu else None,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if (name in NUMERIC_VARIABLES or name.startswith(NUMERIC_PREFIXES)) and name not in SET_BY_LIBRARIES
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
        return " ".join(str(error).strip().splitlines()[0].split())


def cudnn_note(device: torch.device) -> str | None:
    """What mends it where parts of another cuDNN than PyTorch's were loaded, as Transformer Engine may do; or None."""
    if device.type != "cuda" or not isinstance(cudnn_version(), str):
        return None
    return "attention ran on a cuDNN that is not PyTorch's own: put site-packages/nvidia/cudnn/lib on LD_LIBRARY_PATH"


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError, OSError):  # absent, or its metadata cannot be read
        return None


def commit() -> dict:
    """`commit` (hash or null), `dirty` (uncommitted changes), `commit_reason` (why null), of this checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        head = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except OSError as error:
        why = "is not installed" if isinstance(error, FileNotFoundError) else f"cannot be run: {error.strerror}"
        return {"commit": None, "dirty": None, "commit_reason": f"git {why}"}
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return {"commit": None, "dirty": None, "commit_reason": said[0] if said else "git cannot tell"}
    return {"commit": head, "dirty": bool(changes), "commit_reason": None}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=True)
    return done.stdout.strip()


# --- roofs ----------------------------------------------------------------------------------------


def matrix_products(n_layer: int, n_embd: int, vocab_size: int, tokens: int) -> dict[tuple[int, int, int], int]:
    """(M, N, K) of every matrix product of a training step outside attention, and how often it runs.

    Each weight (N, K) has three: forward (tokens, N, K), input gradient (tokens, K, N) and weight
    gradient (N, K, tokens).
    """
    C = n_embd
    weights = [(3 * C, C, n_layer), (C, C, n_layer), (4 * C, C, n_layer), (C, 4 * C, n_layer), (vocab_size, C, 1)]
    products: dict[tuple[int, int, int], int] = {}
    for N, K, count in weights:
        for shape in ((tokens, N, K), (tokens, K, N), (N, K, tokens)):
            products[shape] = products.get(shape, 0) + count
    return products


def measure_roofs(products: dict[tuple[int, int, int], int], device: torch.device) -> dict:
    """The record's `roofs`: what this device reaches when it does nothing else.

    copy_bytes_per_s counts bytes read and written. <precision>_flops_per_s is over all `products`, each as
    often as the step runs it; `shapes` has each alone, `square` one large product. Null where the device lacks
    the precision or the memory; `notes` says which and why.
    """
    gpu = device.type == "cuda"
    notes = []
    busy = _number(nvidia_smi("utilization.gpu", device)) if gpu else None
    if isinstance(busy, float) and busy > 20:
        notes.append(f"the GPU was {busy:.0f} % busy before the roofs were measured: they may be too low")
    edge = 8192 if gpu else 1024
    shapes = [{"m": m, "n": n, "k": k, "count": count} for (m, n, k), count in products.items()]
    square = {"m": edge, "n": edge, "k": edge}
    roofs = {"copy_bytes_per_s": _or_note(lambda: copy_rate(device), "copy", notes)}
    for precision in PRECISIONS:
        if reason := why_not(precision, device):
            notes.append(f"{precision} not measured: {reason}")
        for shape in [*shapes, square]:
            rate = None if reason else _or_note(partial(product_rate, shape, precision, device), precision, notes)
            shape[f"{precision}_flops_per_s"] = rate
        roofs[f"{precision}_flops_per_s"] = _combined_rate(shapes, f"{precision}_flops_per_s")
    return roofs | {"shapes": shapes, "square": square, "notes": list(dict.fromkeys(notes))}


def _combined_rate(shapes: list[dict], name: str) -> float | None:
    """FLOP/s over all shapes, each as often as it runs; None where one of them has none, or there is no shape."""
    if not shapes or any(shape[name] is None for shape in shapes):
        return None
    flops = [2 * s["m"] * s["n"] * s["k"] * s["count"] for s in shapes]
    return sum(flops) / sum(f / s[name] for f, s in zip(flops, shapes, strict=True))


def why_not(precision: str, device: torch.device) -> str | None:
    """Why matrix products in `precision` (one of PRECISIONS) are not to be had on a device; None where they are."""
    capability = compute_capability(device)
    if precision == "tf32" and capability < (8, 0):
        return "needs an Ampere GPU or newer"
    if precision == "bf16" and not has_bf16_matrix_instructions(device):
        return "no BF16 matrix instructions"
    if precision == "fp8" and capability < (8, 9):
        return "needs an Ada or Hopper GPU or newer"
    return None


def _or_note(measure: Callable[[], float], what: str, notes: list[str]) -> float | None:
    try:
        return measure()
    except RuntimeError as error:  # too little memory, or a shape that the format cannot take
        notes.append(f"{what} not measured: {str(error).strip().splitlines()[0][:150]}")
        return None


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of one call, back to back."""
    work()
    return (
        Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())  # its default is one
        .blocked_autorange(min_run_time=0.1 if device.type == "cuda" else 0.02)
        .median
    )


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of copying at most 1 GiB within a device's memory. Raises RuntimeError."""
    size = min(2**30, free_memory_bytes(device) // 4) if device.type == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def product_rate(shape: dict, precision: str, device: torch.device) -> float:
    """FLOP/s of (M, K) times (K, N), both random: zeros draw less power and run faster.

    `shape` has m, n and k; raises RuntimeError for too little memory or a shape that `precision` cannot take.
    """
    m, n, k = shape["m"], shape["n"], shape["k"]
    dtype = torch.bfloat16 if precision in ("bf16", "fp8") else torch.float32
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype).t()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        if precision == "fp8":
            a, b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
            # Not public, but the only FP8 product PyTorch has.
            product = partial(torch._scaled_mm, a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            product = partial(torch.matmul, a, b)
        return 2 * m * n * k / _seconds(product, device)
    finally:
        torch.set_float32_matmul_precision(before)


def main() -> None:
    from common import benchmark, record  # which import this module

    args = benchmark.parse_args(Path("common/hardware.py"), "The roofs of this machine at the shapes of a workload.")
    config = args.config
    products = matrix_products(config.n_layer, config.n_embd, config.vocab_size, args.batch_size * config.seq_len)
    record.write_json(args.output, measure_roofs(products, args.device))


if __name__ == "__main__":
    main()
