"""The record of a run: dataclasses that are its schema (version 2), and writing them with the standard library alone.

A script writes a Run with one row; the ladder merges the rows of its scripts. A field is null where it does not apply
or was not measured. `report/` reads records and checks every type against these classes.
Of several processes, losses are means, times those of the slowest, memory is
that of the largest; what NVML says is of the first one's GPU.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from common.traced import Block, MemoryUse

SCHEMA_VERSION = 2
PLAN, MERGED, ROOFS, PREDICTED = "plan.json", "results.json", "roofs.json", "predicted.json"  # in a run folder
STATUSES = ("ok", "skipped", "oom", "failed", "timeout", "interrupted", "not run")
PRECISIONS = ("fp32", "tf32", "bf16", "fp8")  # of matrix products
LAUNCHED_ALONE = "1-launched"  # of a run with --scaling, the place of rows on one GPU that are not captured
CATEGORIES = (  # of kernels, in the order of a stacked bar; common/profile.py says which kernel belongs where
    "matrix products", "attention", "normalization and pointwise", "optimizer", "copies and casts", "loss",
    "communication", "other",
)  # fmt: skip


@dataclass
class Timing:
    warmup_s: float | None = None  # the first untimed steps, compilation included
    step_ms: list[float] = field(default_factory=list)  # every timed step
    median_ms: float | None = None  # with repetitions: the median of their medians
    p25_ms: float | None = None
    p75_ms: float | None = None
    settling_s: float | None = None  # further untimed steps until their times no longer drift; null on a CPU


@dataclass
class Settings:
    """What really ran, observed on an untimed step."""

    amp_dtype: str | None = None  # the narrowest dtype of PyTorch's matrix products and attention: bfloat16, ...
    float32_matmul_precision: str | None = None  # highest: FP32; high: TF32
    attention_kernel: str | None = None  # by hand, cudnn, flash, flash (CPU), efficient, math
    compiled: bool | None = None  # whether a compiled region ran
    captured: bool | None = None  # whether the timed steps were replays of a CUDA graph
    optimizer: str | None = None  # AdamW, and how: foreach, fused, compiled
    fp8_recipe: str | None = None  # repr of the recipe; null where no product ran in FP8
    unobserved: str | None = None  # why the fields above are null, where the profiler failed
    checkpointed: bool | None = None  # whether each block was recomputed in backward
    head: str | None = None  # beside a recipe, the format of the head's products, by the script: FP8, BF16


@dataclass
class CategoryTime:
    ms: float = 0.0  # per step
    launches: float = 0.0  # kernels per step; on a CPU, operators


@dataclass
class Kernel:
    name: str
    category: str  # one of CATEGORIES
    ms: float  # per step
    launches: float  # per step


@dataclass
class Profile:
    """Untimed steps under torch.profiler; categories and idle time add up to step_ms. A CPU's kernels are operators."""

    step_ms: float
    steps: int  # that were profiled
    categories: dict[str, CategoryTime]
    kernels: list[Kernel]  # longest first
    kernels_per_step: float
    gpu_busy_ms: float | None = None  # null on a CPU, as is every gpu_ field
    gpu_idle_ms: float | None = None  # gaps on the GPU's timeline
    autograd_nodes_attention: int | None = None  # backward nodes of one attention block; null where it has none
    bound_by: str | None = None  # the largest share: compute, memory, launch or communication; null on a CPU
    shares: dict[str, float] | None = None  # of the step, adding up to 1
    communication_ms: float | None = None  # of its kernels; the category has what of it overlaps no other kernel
    block: Block | None = None  # null where a step has fewer than two attentions


@dataclass
class GpuState:
    """What NVML reports when the last timed step has been launched."""

    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    power_w: float | None = None
    throttle_reasons: str | None = None  # NVML's bit mask, hexadecimal
    while_running: bool | None = None  # whether the GPU was still at work when this was read


@dataclass
class LeastBytes:
    value: int  # bytes that a step moves at least, see flops.least_bytes_per_step


@dataclass
class Reference:
    """A fixed piece of work, timed right before and right after the steps."""

    product_ms: list[float]  # of one matrix product: [before, after]
    copy_ms: list[float]  # of one copy
    clock_mhz: list[float] | None = None  # while the products ran; null on a CPU and without NVML


@dataclass
class Repetition:
    """One pass of `--repeat` over a row."""

    timing: Timing
    started_at: str | None = None
    reference_ms: Reference | None = None
    tokens_per_joule: float | None = None
    clock_mhz: float | None = None


@dataclass
class Row:
    step: str  # file name of the script without .py
    source: str | None = None  # text of the script
    status: str | None = None  # one of STATUSES
    reason: str | None = None  # of a row without a time: one line that says what to do
    note: str | None = None  # of an ok row: one line that qualifies it
    settings: Settings = field(default_factory=Settings)
    timing: Timing = field(default_factory=Timing)
    repetitions: list[Repetition] = field(default_factory=list)  # empty where the row ran once
    tokens_per_s: float | None = None  # gpus x tokens_per_step / median
    model_flops_per_s: float | None = None  # of one GPU: flops_per_step / median, by the convention of common/flops.py
    peak_allocated_bytes: int | None = None  # CUDA allocator, over capture and trained steps; null on a CPU
    peak_rss_bytes: int | None = None  # host memory of the process at its largest, compiler and torch included
    loss: list[float] = field(default_factory=list)  # nats, one a training step, warm-up included
    heldout_loss: float | None = None  # nats, after those steps, on text that is never trained on; null without any
    host_syncs: int | None = None  # waits of the host for the GPU in one launched step; null on a CPU
    gpu_state: GpuState | None = None
    energy_j_per_step: float | None = None  # these four: means over a window of at least 5 s after the timed steps,
    tokens_per_joule: float | None = None  # of the whole GPU; null on a CPU and without NVML
    clock_mhz: float | None = None
    power_w: float | None = None
    reference_ms: Reference | None = None
    predicted_ms: float | None = None  # by ladder.predict, from the roofs alone
    bytes_per_step: LeastBytes | None = None
    profile: Profile | None = None  # null without --profile
    memory: MemoryUse | None = None  # null without --profile and on a CPU; a captured step's own peak may differ


@dataclass
class Data:
    name: str  # of the text
    tokens: int
    batches_sha256: str | None  # equal for two runs that trained on the same batches; null where none fits in memory


@dataclass
class Workload:
    """Two runs did the same work, in whatever precision, if and only if their workloads are equal."""

    preset: str
    n_layer: int
    n_head: int
    n_embd: int
    seq_len: int
    vocab_size: int
    batch_size: int  # sequences per step, of one process
    parameters: int
    tokens_per_step: int  # of one process, as is flops_per_step
    flops_per_step: int
    data: Data
    seed: int
    lr: float
    warmup: int  # untimed steps
    steps: int  # trained steps after them; timed: those on a CPU, as many and at most 100 on a GPU
    gpus: int = 1  # processes, each with a GPU of its own
    parallel: str | None = None  # ddp, fsdp; null of one process
    accumulate: int = 1  # micro-batches that batch_size is divided into
    checkpoint: bool = False  # each block is recomputed in backward; flops_per_step does not count that


@dataclass
class Environment:
    device: str
    device_type: str  # cpu, cuda
    cpu: str | None = None
    cpu_threads: int | None = None
    os: str | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    cudnn: int | str | None = None  # as torch reports it; its complaint where another cuDNN was loaded first
    triton: str | None = None
    transformer_engine: str | None = None
    torchao: str | None = None
    transformers: str | None = None
    driver: str | None = None
    power_limit_w: float | None = None
    gpu_uuid: str | None = None  # tells equal cards apart
    compute_capability: str | None = None
    gpu_memory_bytes: int | None = None
    nodes: int = 1  # machines
    link: str | None = None  # NVLink, PCIe: between the GPUs of a node; null of one GPU, and where NVML cannot say
    nvml_reason: str | None = None  # why NVML's figures are null on a GPU
    variables: dict[str, str] = field(default_factory=dict)  # environment variables that change numerics
    commit: str | None = None
    dirty: bool | None = None  # uncommitted changes
    commit_reason: str | None = None  # why commit is null


@dataclass
class Rates:
    """FLOP/s of matrix products by precision, back to back; null where a precision could not be measured."""

    fp32_flops_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    # FLOP/s by precision, in short bursts with pauses in which a GPU's clock recovers: nothing is faster.
    ceilings: dict[str, float] = field(default_factory=dict)


@dataclass
class ProductRate(Rates):
    """A matrix product (M, K) x (K, N) of random numbers."""

    m: int = 0
    n: int = 0
    k: int = 0
    count: int = 1  # how often a step runs it


@dataclass
class Conditions:
    """What NVML reported while one precision was measured."""

    clock_mhz: float | None = None  # back to back
    power_w: float | None = None
    ceiling_clock_mhz: float | None = None  # in bursts, pauses included
    ceiling_power_w: float | None = None


@dataclass
class PassTime:
    kernel: str  # one of common/passes.py
    numbers: int  # in its tensor
    seconds: float


@dataclass
class AttentionRate:
    """Fused causal attention, forward and backward. FLOPs by the convention of common/flops.py."""

    seq_len: int
    head_dim: int
    flops_per_s: float


@dataclass
class Roofs(Rates):
    """What the machine reaches when it does nothing else. Rates are over all `shapes`, each as often as it runs."""

    copy_bytes_per_s: float | None = None  # bytes read and written
    shapes: list[ProductRate] = field(default_factory=list)
    square: ProductRate | None = None  # one large product
    zeros: Rates | None = None  # the same product of zeros: what the data cost
    conditions: dict[str, Conditions] = field(default_factory=dict)  # by precision
    grid: list[ProductRate] = field(default_factory=list)  # ceilings alone, of all sizes
    passes: list[PassTime] = field(default_factory=list)  # kernels between the products, each at several sizes
    attention: list[AttentionRate] = field(default_factory=list)
    launch_s: float | None = None  # host time of a step that is launched from Python, a kernel; null on a CPU
    notes: list[str] = field(default_factory=list)  # what could not be measured, and why


@dataclass
class Run:
    command: str  # to run again, without the folders of this machine
    started_at: str | None  # UTC, ISO 8601
    environment: Environment | None  # null where no row left one
    workload: Workload | None
    steps: list[Row]
    roofs: Roofs | None = None
    peers: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what a merge had to leave out, and rows that differ
    schema_version: int = SCHEMA_VERSION


@dataclass
class Plan:
    """What the ladder writes before its first row, so that an ended run is known to be incomplete."""

    command: str
    arguments: list[str]  # of every script
    rows: list[str]  # names of scripts without .py; peers as `peers/<name>`
    left_out: list[str] = field(default_factory=list)  # by --only
    roofs: bool = True
    repeat: int = 1  # passes over the rows
    gpus: int = 1  # processes of a row
    started_at: str | None = None
    workload: Workload | None = None


def scaling_places(folder: Path) -> list[str]:
    """Names of the run folders that a run with --scaling consists of, fewest GPUs first; empty of any other run."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    places = [name for name in names if re.fullmatch(rf"[1-9]\d*(-(ddp|fsdp))?|{LAUNCHED_ALONE}", name)]
    return sorted(places, key=lambda name: (int(name.partition("-")[0]), name))


def differing_fields(a: object, b: object) -> list[str]:
    """Names of the fields in which two records of one class differ, in the order of the class."""
    return [f.name for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]


def describe_shape(shape: object) -> str:
    """The fields that make a workload's shape, by name: `n_layer 2, n_head 4, ...`."""
    names = ("n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "batch_size")
    return ", ".join(f"{name} {getattr(shape, name)}" for name in names)


def check_writable(path: Path, *keys: str) -> None:
    """Raises ValueError, one line, where `path` cannot become a record; makes its folder.

    A file that is there is replaced only if it is empty, or a JSON object with one of `keys` and at most one row: a
    whole run, or anything else of the user's, stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ValueError(f"--output {path} is not a regular file")
        if path.exists() and not _is_replaceable(path.read_bytes(), keys):
            raise ValueError(f"--output {path} exists and is no record of this kind: it stays as it is")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write --output {path}: {error.strerror or error}") from None


def _is_replaceable(content: bytes, keys: tuple[str, ...]) -> bool:
    try:
        record = json.loads(content)
        rows = [*(record.get("steps") or []), *record.get("peers", [])]
        return any(key in record for key in keys) and len(rows) <= 1
    except (ValueError, RecursionError, TypeError, AttributeError):  # no JSON, or not of this shape
        return not content.strip()


def read_object(path: Path) -> dict:
    """The object in a JSON file, unchecked; empty where there is none."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_run(path: Path, run: Run) -> None:
    """Write a run as JSON. Raises OSError."""
    write_json(path, asdict(run))


def write_json(path: Path, content: dict | list) -> None:
    """`write_bytes` of an object as JSON."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write by temporary file and rename: a reader sees the old file or the new, never half of one. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".record-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
