"""The record of a run: dataclasses that are its schema, and writing them with the standard library alone.

A script writes a Run with one row; the ladder merges the rows of its scripts. A field is null where it does
not apply or was not measured. `report/` reads records and checks every type against these classes. Of several
processes, losses are means, times those of the slowest, memory is of the largest, clock and power are of the
first one's GPU.
"""

import contextlib
import json
import os
import statistics
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

SCHEMA_VERSION = 3
# Files of a run folder.
PLAN, MERGED, ROOFS = "plan.json", "results.json", "roofs.json"
LARGER = "larger-batch"  # the row of a model with several of its batches in one, and its file
ALLOCATION = "PYTORCH_CUDA_ALLOC_CONF"  # how PyTorch gives out the memory of a GPU
PRECISIONS = ("fp32", "tf32", "bf16", "fp8")  # of matrix products
# Names in the file of the proof: `fc1.weight part 1/2`, of a further pass `pass 1 fc1.weight`, and of one
# with weights rounded to BF16 `pass rounded fc1.weight`.
PART, PASS, ROUNDED = " part ", "pass ", "rounded"
IN_TRAINING = "compared by gradients in training mode"  # in the note of a row that cannot be evaluated
LOSSES_IN_ONE = 5  # of a long training: the quarter of 1,500 steps that a verdict goes by has whole ones
HALF_FORMATS = ("bfloat16", "float16")  # of mixed precision
UNFUSED = ("by hand", "math")  # what a row with fused attention must not run
# The changes of --model in words, and rows of it: the file unchanged, where it does more than FP32, and with
# the recommended changes in it.
AMP, SDPA, COMPILE, GRAPH, FP8 = "AMP", "fused attention", "compile", "CUDA graph", "FP8"
AS_IT_IS, PATCHED = "0_as_it_is", "6_patched"
MY_FILE = "my_file"  # in lines to change, a file whose name Python cannot write
DRIFT = 0.05  # of a step, from which times that drift are doubted
WORTH = 1.03  # times faster, from which a change to a model of yours is recommended
NUMBERS = 509  # of a matrix, and sums of its gradient: a prime, so that a column spreads over all sums
STUDIES = ("sweep", "scaling", "ablations", "parity")
CATEGORIES = (  # of kernels, in the order of a stacked bar; common/kernels.py assigns each kernel to one
    "matrix products",
    "attention",
    "normalization and pointwise",
    "optimizer",
    "copies and casts",
    "loss",
    "communication",
    "other",
)


@dataclass
class Settings:
    """What really ran, observed on an untimed step."""

    # The narrowest dtype of PyTorch's matrix products and attention: bfloat16, ...
    amp_dtype: str | None = None
    float32_matmul_precision: str | None = None  # highest: FP32; high: TF32
    attention_kernel: str | None = None  # by hand, cudnn, flash, flash (CPU), efficient, math
    compiled: bool | None = None  # whether a compiled region ran
    captured: bool | None = None  # whether the timed steps were replays of a CUDA graph
    optimizer: str | None = None  # AdamW, and how: foreach, fused
    residual_dtype: str | None = None  # of what the head's LayerNorm reads
    fp8_recipe: str | None = None  # repr of the recipe; null where no module multiplied FP8
    head: str | None = None  # where the blocks multiply FP8, the format of the head's product: FP8, BF16

    def has_run(self, change: str) -> bool | None:
        """Whether a change was seen at work, by its word; None where the observation does not tell."""
        half = None if self.amp_dtype is None else self.amp_dtype in HALF_FORMATS
        fused = None if self.attention_kernel is None else self.attention_kernel not in UNFUSED
        in_fp8 = None if self == Settings(captured=self.captured) else self.fp8_recipe is not None
        seen = {AMP: half, SDPA: fused, COMPILE: self.compiled, GRAPH: self.captured, FP8: in_fp8}
        return seen.get(change)


@dataclass
class Symptoms:
    """What a step does that costs time without an error, observed as the settings are."""

    fp32_share: float | None = None  # of the FLOPs of matmuls, in FP32 or TF32; null where none was seen
    unaligned_share: float | None = None  # of these, in half precision with a size that does not divide by 8
    unaligned_sizes: list[int] = field(default_factory=list)  # of weights, of these matmuls
    is_masked: bool = False  # whether fused attention read a mask
    synchronizations: int = 0  # times that the host waited for a number of the GPU: .item(), x[mask]
    compiled_modules: int = 0  # that do not lie in another one
    compiled_calls: int = 0  # of compiled regions in a step: fewer, where the compiler gave up on a module
    graph_breaks: list[str] = field(
        default_factory=list
    )  # why the compiler broke its graphs, each reason once


@dataclass
class Kernel:
    """A kernel's total in a step, or one launch of it. A CPU's are operators, each without those inside
    it."""

    name: str
    category: Literal[CATEGORIES]
    ms: float
    launches: float = 1.0  # per step
    start_ms: float = 0.0  # of one launch: since its half of the block began


@dataclass
class Profile:
    """Untimed steps under torch.profiler: milliseconds a step. On a GPU categories and idle time add up to
    the median of the timed steps, or to the kernels where they took longer."""

    idle_ms: float | None  # in which no kernel ran; null on a CPU
    categories: dict[Literal[CATEGORIES], float]  # of all kernels
    kernels: list[Kernel]  # the 40 longest, longest first
    launches: float  # of all kernels
    communication_ms: float = 0.0  # of its kernels; its category has what of it overlaps no other kernel
    # What one transformer block ran, from one attention's longest kernel to the next; empty for fewer than
    # two blocks.
    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)


@dataclass
class Proof:
    """How the gradients of a row compare with those of the first row, from the same weights and batch."""

    against: str  # name of the first row that has samples
    in_fp8: bool  # whether one of the two rows multiplied FP8
    paired: float  # share of the first row's weights whose gradients can be compared
    cosine: float | None = None  # the least, over these weights; null where too few are paired
    weight: str | None = None  # whose it is
    # The same of two passes of the first row: below 1 where its model draws random numbers. --model alone.
    repeated: float | None = None
    limit: float | None = None  # the least cosine of that weight at which rows agree; null in older records


@dataclass
class Row:
    step: str  # file name of the script without .py
    status: Literal["ok", "skipped", "oom", "failed", "timeout", "interrupted", "not run"] | None = None
    reason: str | None = None  # of a row without a time: one line with what to do
    note: str | None = None  # of an ok row: one line that qualifies it
    settings: Settings = field(default_factory=Settings)
    symptoms: Symptoms | None = None  # null in older records
    changes: list[str] = field(default_factory=list)  # in words, of --model: this row's own is the last
    settling_ms: list[float] = field(default_factory=list)  # every step between the rehearsal and these
    step_ms: list[float] = field(default_factory=list)  # every timed step
    recompiled: int = 0  # graphs that were compiled between these steps, each time that they were timed
    warmup_s: float | None = None  # of the rehearsal: compilation, capture, the weights put back
    rehearsed: int = 0  # steps trained before the weights were put back; 0: they were not
    # Fixed work before and after the timed steps; of a GPU alone, and of a CPU in older records.
    product_ms: list[float] = field(default_factory=list)  # a matmul
    copy_ms: list[float] = field(default_factory=list)
    launch_us: list[float] = field(default_factory=list)  # the host launches a tiny kernel
    passes: list["Row"] = field(default_factory=list)  # of --repeat, without profile and source
    loss: list[float] = field(default_factory=list)  # nats, of the first `steps` steps after the rehearsal
    loss_every: int = 1  # training steps that each loss is the mean of: LOSSES_IN_ONE with --heldout-every
    heldout: list[tuple[int, float]] = field(default_factory=list)  # (steps trained, nats): --heldout-every
    # Of CUDA's allocator; on a CPU of the process, with torch, compiler and a copy of the weights.
    peak_bytes: int | None = None
    clock_mhz: float | None = None  # mean over the timed steps; null on a CPU and without NVML
    power_w: float | None = None  # likewise
    overhead_s: float | None = None  # of the measurement, without warm-up and steps
    profile: Profile | None = None  # null without --profile
    proof: Proof | None = None  # of a merge: null of the first row, and of several processes
    source: str | None = None  # text of the script
    code: str | None = None  # of a model that is not ours: what a reader copies, in place of `source`
    code_sha256: str | None = None  # of what its timed step runs through, see common/fingerprint.py

    @property
    def text(self) -> str:
        """What a reader copies."""
        return self.code or self.source or ""

    @property
    def drift(self) -> float:
        """By which share the median of the second half of the timed steps is above that of the first; 0 of
        fewer than four steps."""
        half = len(self.step_ms) // 2
        if half < 2:
            return 0.0
        return statistics.median(self.step_ms[-half:]) / statistics.median(self.step_ms[:half]) - 1


@dataclass(kw_only=True)
class Workload:
    """Two runs did the same work, in whatever precision, if and only if their workloads are equal."""

    preset: str  # or `custom`
    model: str | None = None  # the file of --model: then the six fields below are null
    n_layer: int | None = None
    n_head: int | None = None
    n_embd: int | None = None
    seq_len: int | None = None
    vocab_size: int | None = None
    batch_size: int | None = None  # sequences per step, of one process
    parameters: int
    unit: Literal["tokens", "samples"] = "tokens"
    tokens_per_step: int  # of one process, or samples
    flops_per_step: int  # of one process, by the convention of common/flops.py or of mine/check.py
    text: str
    text_sha256: str  # of --model: of the file and of all numbers of its batches
    seed: int
    lr: float | None  # null where the file of --model has an optimizer of its own
    warmup: int  # steps launched first, before a capture
    steps: int  # trained steps that leave a loss; at least as many are timed
    gpus: int = 1  # processes, each with a GPU of its own
    parallel: str | None = None  # ddp, fsdp; null of one process

    def differing(self, other: "Workload") -> list[str]:
        """Names of the fields in which another workload differs."""
        return [
            field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)
        ]

    def has_shape(self) -> bool:
        """Whether it has all that tells how large a step of the ladder's model is."""
        shape = (self.n_layer, self.n_head, self.n_embd, self.seq_len, self.vocab_size, self.batch_size)
        return None not in shape


@dataclass
class Environment:
    device: str
    device_type: str  # cpu, cuda
    cpu: str | None = None
    cpu_threads: int | None = None
    versions: dict[str, str] = field(default_factory=dict)  # python, torch, cuda, cudnn, packages
    variables: dict[str, str] = field(default_factory=dict)  # of the environment, that change what runs
    gpu_uuid: str | None = None  # a hash of it, which tells equal cards apart
    gpu_memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None  # of a GPU: (9, 0) is Hopper
    commit: str | None = None  # ends in -dirty where files differ from it


@dataclass
class ProductRate:
    """A matrix product (M, K) x (K, N) of random numbers."""

    precision: str  # one of PRECISIONS
    m: int
    n: int
    k: int
    count: int  # how often a step runs it; 0 for a product that is no part of the workload
    burst_flops_per_s: float  # the fastest of short bursts, between which a GPU's clock recovers
    flops_per_s: float | None = None  # back to back; null where that was not measured


@dataclass
class Roofs:
    """What the machine reaches when it does nothing else."""

    copy_bytes_per_s: float | None = None  # bytes read and written
    products: list[ProductRate] = field(default_factory=list)
    # Between the products: a kernel of predict/roofs.py, numbers in its tensor, seconds.
    kernels: list[tuple[str, int, float]] = field(default_factory=list)
    # Fused causal attention, forward and backward: T, D, FLOP/s by the convention of common/flops.py.
    attention: list[tuple[int, int, float]] = field(default_factory=list)
    launch_s: float | None = None  # the host's, for one kernel of a training step; of a GPU alone
    # A step of the workload in which nothing is lost, by precision: see ladder/roofs.py.
    allows_ms: dict[str, float] = field(default_factory=dict)
    code_sha256: str | None = None  # of what times them
    notes: list[str] = field(default_factory=list)  # what could not be measured, and why
    environment: Environment | None = None

    def rate(self, precision: str, burst: bool = False) -> float | None:
        """FLOP/s over the products of the workload, each as often as it runs; None where one was not
        measured."""
        work, seconds = 0, 0.0
        for product in self.products:
            if product.precision == precision and product.count:
                rate = product.burst_flops_per_s if burst else product.flops_per_s
                flops = 2 * product.m * product.n * product.k * product.count
                if not rate or not flops:
                    return None
                work, seconds = work + flops, seconds + flops / rate
        return work / seconds if work else None


@dataclass
class Run:
    command: str  # to run again, without the folders of this machine
    started_at: str | None  # UTC, ISO 8601
    environment: Environment | None  # null where no row left one
    workload: Workload | None
    rows: list[Row]
    peers: list[Row] = field(default_factory=list)
    roofs: Roofs | None = None
    problems: list[str] = field(default_factory=list)  # what a merge had to leave out, and rows that differ
    schema_version: int = SCHEMA_VERSION
    larger: "Run | None" = None  # of --model: the recommended changes, with several batches in one

    @property
    def is_of_ladder(self) -> bool:
        """Whether it trained the ladder's own model, and not one that somebody brought."""
        return not (self.workload and self.workload.model)


@dataclass
class Study:
    """Many runs that belong together: a sweep, a scaling, ablations, parity."""

    kind: Literal[STUDIES]
    command: str
    started_at: str | None
    runs: dict[str, Run]  # by name: a shape, a number of GPUs, a variant, a step and its seed
    schema_version: int = SCHEMA_VERSION


def in_means(row: Row, every: int = LOSSES_IN_ONE) -> Row:
    """The row with means of so many losses in place of each; a last one is of fewer."""
    means = [statistics.fmean(row.loss[k : k + every]) for k in range(0, len(row.loss), every)]
    return replace(row, loss=means, loss_every=every)


def middle_half(times: list[float]) -> tuple[float, float]:
    """The first and the third quartile: rows whose middle halves overlap are not called different."""
    if len(times) == 1:
        return times[0], times[0]
    first, _, third = statistics.quantiles(times, method="inclusive")
    return first, third


def sketches_of(record: Path) -> Path:
    """The file next to a row's record that holds sketches of its gradients, see common/proof.py."""
    return record.with_name(f"{record.name.removesuffix('.json')}.sketches.npz")


def read_object(path: Path) -> dict:
    """The object in a JSON file, unchecked; empty where there is none."""
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: object) -> None:
    """Write dataclasses, objects and lists as JSON. Raises OSError."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False, default=asdict) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file by temporary file and rename: a reader sees the old file or the new, never half of one,
    and a link or a pipe is replaced. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a full disk left a part of it
            temporary.unlink()
        error.filename, error.filename2 = str(path), None
        raise
