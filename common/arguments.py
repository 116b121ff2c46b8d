"""The command line of a step: parser, presets and checks, which give Arguments."""

import argparse
import hashlib
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from common import data, flops, hardware
from common.model import PRESETS, GPTConfig
from common.record import Workload, read_object, write_bytes
from common.text import OneLineParser, Skip, portable_command, positive_int

# Steps that are launched kernel by kernel before one may be captured as a CUDA graph. In its first 10 steps
# DDP divides gradients into buckets anew and times itself, which no CUDA graph can hold.
WARMUP, DDP_WARMUP = 3, 11
# What `auto` takes on a GPU: the first row whose GiB are free. They are what FP32 with attention by hand
# needs, and a tenth more.
AUTO = (  # GiB, preset, batch size
    (83, "gpt3-6.7b-slice", 8),
    (66, "gpt2", 32),
    (34, "gpt2", 16),
    (18, "gpt2", 8),
    (10, "gpt2", 4),
    (6, "gpt2", 2),
    (0, "gpt2", 1),
)
# A JSON file with one of these keys was written by this project, and may be written again.
OWN_KEYS = {"schema_version", "launch_s", "experiment", "experiments"}
# Training steps by default: 14 on a CPU; on a GPU as many as take 5e14 model FLOPs, but 8 to 30.
CPU_STEPS = 14
FEWEST_STEPS, MOST_STEPS = 8, 30
STEPS_FLOPS = 5e14
# Bytes a parameter in training: FP32 weight, gradient and two moments. On a CPU the rehearsal's copy of the
# weights lies in the same memory.
GPU_BYTES, CPU_BYTES = 16, 20


class Place(NamedTuple):
    """Where this process stands among those that torchrun started; alone 0 of 1."""

    rank: int
    processes: int
    local_rank: int  # on its own machine: the index of its GPU


@dataclass(kw_only=True)
class Measurement(ABC):
    """How a row is run, measured and recorded, whatever it trains."""

    name: str  # of the row
    source: str | None  # what makes it, as the report shows it
    changes: list[str] = field(default_factory=list)  # see common.record.Row
    output: Path  # of the record
    seed: int  # of weights and batches
    lr: float | None
    device: torch.device
    amp: bool  # whether the device multiplies BF16, so that autocast pays
    amp_dtype: torch.dtype  # BF16, or without `amp` FP32
    rank: int  # of this process, 0 to processes - 1
    local_rank: int = 0  # on its own machine
    processes: int  # one a GPU
    parallel: str | None  # how several processes share the model: ddp, fsdp
    warmup: int  # steps that are launched before a capture
    steps: int  # trained and timed, at least
    heldout_every: int | None  # steps between two losses on text that is not trained on
    capture: bool  # the step as a CUDA graph, where its script can be captured
    cold: bool  # without the rehearsal of common/rehearsal.py
    profile: bool
    is_ours: bool = True  # whether the model is the ladder's: of another one more is checked
    # The share of a loss by which that of a replay may differ from a launched step's; None: not checked.
    replay_off: float | None = None

    def command(self) -> str:
        """What makes this row again."""
        return portable_command(f"python {self.name}.py", sys.argv[1:])

    @abstractmethod
    def about(self) -> list[str]:
        """Lines for a person on what is trained."""

    @abstractmethod
    def batches(self) -> list[tuple]:
        """What `train_step` takes in each step, and in an untimed one after them."""

    @abstractmethod
    def workload(self) -> Workload:
        """The record's workload."""


@dataclass(kw_only=True)
class Arguments(Measurement):
    """What a step does: the options of `build_parser`, checked, and what they mean on this machine."""

    preset: str  # from which defaults came
    config: GPTConfig
    batch_size: int  # sequences a training step, of each process
    text: data.Text

    def about(self) -> list[str]:
        parameters = f"{flops.parameters(self.config) / 1e6:.1f} M parameters"
        return [
            f"{self.preset}: {self.config}, {parameters}",
            f"batch {self.batch_size}, text: {self.text.name}",
        ]

    def require_fp8(self) -> None:
        """Raises Skip without an NVIDIA GPU that multiplies FP8, and for a size that is no multiple of what
        FP8 needs: channels, the vocabulary, and tokens, along which weight gradients are summed."""
        unit = hardware.fp8_unit(hardware.require_fp8(self.device))
        tokens = self.batch_size * self.config.seq_len
        vocabulary = self.config.vocab_size
        sizes = (
            (self.config.n_embd, "--n-embd"),
            (tokens, "--batch-size x --seq-len"),
            (vocabulary, "--vocab-size"),
        )
        for size, name in sizes:
            if size % unit:
                raise Skip(f"FP8 needs {name} divisible by {unit}, not {size}")

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens and targets, each (batch_size, seq_len), of all steps and of an untimed one after them.

        All processes together train on the sequences that one process of `processes` times the batch size
        would draw. Each takes its share of every batch.
        """
        begin, seq_len = self.rank * self.batch_size, self.config.seq_len
        whole_batch = self.processes * self.batch_size
        starts = data.draw_starts(self.text, self.steps + 1, whole_batch, seq_len, self.seed)
        return data.stage_batches(self.text, starts[:, begin : begin + self.batch_size], seq_len, self.device)

    def workload(self) -> Workload:
        return Workload(
            preset=self.preset if self.config == PRESETS[self.preset][0] else "custom",
            parameters=flops.parameters(self.config),
            tokens_per_step=self.batch_size * self.config.seq_len,
            flops_per_step=flops.flops_per_step(self.config, self.batch_size),
            text=self.text.name,
            text_sha256=hashlib.sha256(self.text.tokens).hexdigest()[:16],
            gpus=self.processes,
            batch_size=self.batch_size,
            seed=self.seed,
            lr=self.lr,
            warmup=self.warmup,
            steps=self.steps,
            parallel=self.parallel,
            **asdict(self.config),
        )


def build_parser(name: str, description: str | None) -> OneLineParser:
    presets = [
        f"  {name:16} batch {batch_size} of {config}" for name, (config, batch_size) in PRESETS.items()
    ]
    parser = OneLineParser(prog=name, description=description, epilog="\n".join(["presets:", *presets]))
    add_workload(parser.add_argument_group("workload (what is trained; defaults come from the preset)"))
    add_run(parser.add_argument_group("run (how it is measured)"))
    return parser


def add_workload(group) -> None:
    text = "auto (default) takes tiny on a CPU, and on a GPU what fits its free memory"
    group.add_argument("--preset", choices=["auto", *PRESETS], metavar="NAME", default="auto", help=text)
    counts = {
        "--n-layer": "transformer blocks",
        "--n-head": "attention heads; divides --n-embd",
        "--n-embd": "channels of the residual stream",
        "--seq-len": "tokens per sequence",
        "--vocab-size": "token ids, 0 to N-1",
        "--batch-size": "sequences per training step, of each process",
    }
    for option, text in counts.items():
        group.add_argument(option, type=positive_int, metavar="N", help=text)
    add_rate_and_seed(group)
    text = "a text as bytes, or tokens: .bin of nanoGPT or llm.c, .npy (default: Python's standard library)"
    group.add_argument("--data", type=Path, metavar="FILE", help=text)


def add_rate_and_seed(group) -> None:
    text = "AdamW's rate, constant, at most 1 (default: by layers and channels)"
    group.add_argument("--lr", type=float, metavar="X", help=text)
    text = "weights and batches (default: 1337)"
    group.add_argument("--seed", type=positive_int, metavar="N", default=1337, help=text)


def add_run(group) -> None:
    add_how(group)
    text = "the loss on held-out text after every N trained steps"
    group.add_argument("--heldout-every", type=positive_int, metavar="N", help=text)
    text = "how processes share the model (default: ddp)"
    group.add_argument("--parallel", choices=["ddp", "fsdp"], help=text)


def add_how(group) -> None:
    """How a row is measured, whatever it trains."""
    text = "default: auto, a GPU if any"
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=text)
    text = "steps trained and timed, at least (default: 8 to 30, by size; CPU: 14)"
    group.add_argument("--steps", type=positive_int, metavar="N", help=text)
    text = "the record (default: results/ and the script's name)"
    group.add_argument("--output", type=Path, metavar="FILE", help=text)
    text = "where the time goes: kernels, in the record and on stderr"
    group.add_argument("--profile", action="store_true", help=text)
    text = "launch each kernel from the host, also where the step could be captured as a CUDA graph"
    group.add_argument("--no-capture", action="store_false", dest="capture", help=text)
    text = "train without a rehearsal: FP8's first scales are unknown, and its first steps are lost"
    group.add_argument("--cold", action="store_true", help=text)


def parse_args(
    script: Path, description: str | None, argv: list[str] | None = None, trains: bool = True
) -> Arguments:
    """Read and check the command line of a script. Anything wrong prints one line and exits with code 2.

    `trains` is whether the model will be trained on this machine: then it must fit its free memory, and the
    record must be writable.
    """
    parser = build_parser(script.name, description)
    options = parser.parse_args(argv)
    try:
        return resolve(options, script, trains)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        parser.error(str(error))


def resolve(options: argparse.Namespace, script: Path, trains: bool) -> Arguments:
    """What the options of `build_parser` mean on this machine. Raises ValueError, one line, for what cannot
    run."""
    place = place_of_process()
    parallel = resolve_parallel(options.parallel, place.processes)
    device = hardware.resolve_device(options.device, place.local_rank)
    preset, preset_batch_size = resolve_preset(options.preset, device)
    batch_size = options.batch_size or preset_batch_size
    config, amp = resolve_config(options, preset), hardware.has_bf16_matrix_instructions(device)
    lr = resolve_rate(options.lr, config)
    output = options.output or hardware.ROOT / "results" / f"{script.stem}.json"
    if trains:
        shares = place.processes if parallel == "fsdp" else 1
        check_memory(config, device, shares, options.cold)
        check_output(output)
    return Arguments(
        name=script.stem,
        source=script.read_text() if script.is_file() else None,
        output=output,
        preset=preset,
        config=config,
        batch_size=batch_size,
        text=data.load_text(options.data, config.seq_len, config.vocab_size),
        seed=options.seed,
        lr=lr,
        device=device,
        amp=amp,
        amp_dtype=torch.bfloat16 if amp else torch.float32,
        rank=place.rank,
        local_rank=place.local_rank,
        processes=place.processes,
        parallel=parallel,
        warmup=DDP_WARMUP if device.type == "cuda" and place.processes > 1 else WARMUP,
        steps=options.steps or default_steps(flops.flops_per_step(config, batch_size), device),
        heldout_every=options.heldout_every,
        capture=options.capture,
        cold=options.cold,
        profile=options.profile,
    )


def place_of_process() -> Place:
    """What torchrun tells this process in its environment. Raises ValueError for what another launcher has
    left there: the processes would wait for each other for ever."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "TORCHELASTIC_RUN_ID" in os.environ and all(os.environ.get(name, "").isdecimal() for name in names):
        return Place(*(int(os.environ[name]) for name in names))
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(f"WORLD_SIZE={processes}, but torchrun did not start this: unset {' '.join(names)}")
    return Place(rank=0, processes=1, local_rank=0)


def resolve_preset(name: str, device: torch.device) -> tuple[str, int]:
    """The preset and its batch size; `auto` takes what fits."""
    if name == "auto" and device.type == "cuda":
        free = hardware.free_memory_bytes(device) / 2**30
        return next((preset, batch_size) for gib, preset, batch_size in AUTO if gib <= free)
    name = "tiny" if name == "auto" else name
    return name, PRESETS[name][1]


def resolve_config(options: argparse.Namespace, preset: str) -> GPTConfig:
    """The preset's shape, with what the options change of it. Raises ValueError for heads that do not divide
    it."""
    config = PRESETS[preset][0]
    changed = {name: getattr(options, name) for name in asdict(config) if getattr(options, name)}
    config = replace(config, **changed)
    if config.n_embd % config.n_head:
        raise ValueError(f"--n-embd {config.n_embd} is not divisible by --n-head {config.n_head}")
    return config


def resolve_parallel(parallel: str | None, processes: int) -> str | None:
    """How several processes share the model; None for a single one. Raises ValueError where a single one is
    told how to share."""
    if processes > 1:
        return parallel or "ddp"
    if parallel:
        raise ValueError(
            "--parallel is for several processes: torchrun --nproc-per-node N, or ./run_all.sh --gpus N"
        )
    return None


def resolve_rate(lr: float | None, config: GPTConfig) -> float:
    """The rate, or AdamW's default rate. Raises ValueError for one that trains nothing."""
    if lr is None:
        return default_rate(config)
    check_rate(lr)
    return lr


def check_rate(lr: float) -> None:
    """Raises ValueError for a rate that trains nothing."""
    if not 0 < lr <= 1:
        raise ValueError(f"--lr {lr} is not above 0 and at most 1")


def default_rate(config: GPTConfig) -> float:
    """AdamW's default rate: one rule, by which a model of any shape learns from the first step on.

    Adam's first steps move every weight by the rate, and all layers push the residual stream one way: it
    grows with n_layer * n_embd * rate, and a logit with n_embd times that. The numbers 600 and 4 were found
    on an H200, at 2 to 24 layers and 320 to 8192 channels. A rate that falls with n_embd alone made the loss
    of wide models rise there.
    """
    return min(1e-3, 600 / ((config.n_layer + 4) * config.n_embd**2))


def default_steps(flops_per_step: int, device: torch.device) -> int:
    """How many training steps a script trains by default, by the model FLOPs of one: see CPU_STEPS above."""
    if device.type == "cpu":
        return CPU_STEPS
    by_size = int(STEPS_FLOPS / max(1, flops_per_step))
    return max(FEWEST_STEPS, min(MOST_STEPS, by_size))


def check_memory(config: GPTConfig, device: torch.device, shares: int, cold: bool) -> None:
    """Raises ValueError for a model whose weights, gradients and moments, divided into `shares`, do not fit
    the device's free memory."""
    per_parameter = GPU_BYTES if device.type == "cuda" or cold else CPU_BYTES
    needed = per_parameter * flops.parameters(config) // shares
    free = hardware.free_memory_bytes(device)
    if free and needed > free:
        asked = f"{needed / 2**30:,.0f} GiB in training ({per_parameter} bytes a parameter)"
        raise ValueError(f"the model needs {asked}, but {device} has {free / 2**30:,.0f} GiB free")


def check_output(output: Path) -> None:
    """Know before any work that a record can be written. Raises ValueError where it cannot, and for a file
    that this project has not written."""
    if output.exists() and not is_own(output):
        raise ValueError(f"--output {output} exists and is no record: it stays as it is")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(output.with_name(f"{output.name}.trial"), b"")
        output.with_name(f"{output.name}.trial").unlink()
    except OSError as error:
        raise ValueError(f"cannot write {output}: {error.strerror or error}") from None


def is_own(file: Path) -> bool:
    """Whether this project may have written a file: a record, or an empty file, as mktemp makes it."""
    if not file.is_file():
        return False
    return not file.stat().st_size or bool(OWN_KEYS & read_object(file).keys())
