"""The command line of a step: parser, presets and checks, which give Arguments."""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from common import data, flops, hardware
from common.errors import Skip
from common.model import PRESETS, GPTConfig
from common.record import Data, Workload, check_writable, describe_shape
from common.text import OneLineParser, positive_int

DDP_WARMUP = 11  # DDP divides gradients into buckets anew, and times itself, until then: no CUDA graph holds that
ROOT = Path(__file__).resolve().parent.parent
FIRST_SAYS_S = 5  # in which torchrun sees that the first process of a machine ended
ESTIMATE_MARGIN = 1.1  # mixed precision keeps a little more than the estimate of a plain step


@dataclass(frozen=True)
class Arguments:
    """What one run does."""

    script: Path
    base_preset: str  # that defaults came from
    config: GPTConfig
    batch_size: int  # sequences per step, of this process
    accumulate: int  # micro-batches that they are divided into
    steps: int
    warmup: int
    lr: float
    seed: int
    text: data.Text
    device: torch.device
    amp_dtype: torch.dtype
    amp_note: str | None  # why mixed precision is FP32, where it is
    profile: bool
    output: Path
    notes: tuple[str, ...]  # lines for the header
    world: hardware.World = field(default_factory=hardware.World)
    parallel: str | None = None  # ddp, fsdp; None alone
    checkpoint: bool = False  # recompute each block in backward
    capture: bool = True  # as a CUDA graph, a step that asks for it
    quick: bool = False  # only train and time

    @property
    def step(self) -> str:
        return self.script.stem

    @property
    def preset(self) -> str:
        """The preset whose shape this is, or `custom`."""
        return self.base_preset if self.config == PRESETS[self.base_preset].config else "custom"

    @property
    def adamw(self) -> dict:
        """The optimizer's keywords, the same for all steps.

        Those of Llama 2 (Touvron et al. 2023, section 2.2), without schedule or clipping. The eps of 1e-5 matters
        here: below it the loss of `gpt2` was seen to jump, in FP32 as well. The likely reason is that byte tokens
        leave most rows of a large vocabulary without a target, and Adam scales their vanishing gradients to full
        steps.
        """
        return {"lr": self.lr, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}

    @property
    def micro_batch_size(self) -> int:
        """Sequences that pass through the model at once."""
        return self.batch_size // self.accumulate

    @property
    def mixed_precision(self) -> bool:
        """Whether autocast has anything to do."""
        return self.amp_dtype is not torch.float32

    def require_gpu(self, what: str) -> None:
        """Raises Skip on a CPU."""
        if self.device.type != "cuda":
            raise Skip(f"{what} needs an NVIDIA GPU")

    def require_multiples_of(self, unit: int, what: str, vocab: bool = True) -> None:
        """Raises Skip where the matrices that `what` multiplies have a dimension that `unit` does not divide.

        The dimensions are channels, tokens (the leading one of weight gradients) and, with `vocab`, the head's outputs.
        """
        tokens = self.micro_batch_size * self.config.seq_len
        batch = "--batch-size x --seq-len" + (" / --accumulate" if self.accumulate > 1 else "")
        sizes = {"--n-embd": self.config.n_embd, batch: tokens}
        sizes |= {"--vocab-size": self.config.vocab_size} if vocab else {}
        for name, size in sizes.items():
            if size % unit:
                raise Skip(f"{what} needs {name} divisible by {unit}, not {size}")

    def batch_starts(self) -> np.ndarray:
        """Where the excerpts of the trained batches begin, and of one spare batch for untimed steps after them."""
        first = self.world.rank * self.batch_size
        return self.starts_of_all()[:, first : first + self.batch_size]

    def starts_of_all(self) -> np.ndarray:
        """`batch_starts` of all processes side by side: those of one process that takes as many sequences."""
        n_batches, batch_size = self.warmup + self.steps + 1, self.world.size * self.batch_size
        return data.draw_starts(self.text, n_batches, batch_size, self.config.seq_len, self.seed)

    def workload(self) -> Workload:
        """The record's workload."""
        try:
            batches = data.fingerprint(self.text, self.starts_of_all(), self.config.seq_len)
        except (MemoryError, ValueError):  # a batch that large ends as an oom row, which needs its workload
            batches = None
        return Workload(
            preset=self.preset, **asdict(self.config), batch_size=self.batch_size,
            parameters=flops.parameters(self.config), tokens_per_step=self.batch_size * self.config.seq_len,
            flops_per_step=flops.flops_per_step(self.config, self.batch_size),
            data=Data(self.text.name, len(self.text.tokens), batches),
            seed=self.seed, lr=self.lr, warmup=self.warmup, steps=self.steps, accumulate=self.accumulate,
            gpus=self.world.size, parallel=self.parallel, checkpoint=self.checkpoint,
        )  # fmt: skip


class StepParser(OneLineParser):
    """Of several processes on a machine, the first says what is wrong; torchrun then ends the others.

    One of the others that is still there after a while found something of its own, as of its GPU, and says it.
    """

    def error(self, message: str):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(FIRST_SAYS_S)
        super().error(message)


def seed_int(text: str) -> int:
    """0, or what positive_int takes."""
    return 0 if text == "0" else positive_int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a finite positive number")
    return value


def describe_presets() -> str:
    lines = ["presets:"]
    for name, preset in PRESETS.items():
        shape = argparse.Namespace(**asdict(preset.config), batch_size=preset.batch_size)
        lines.append(f"  {name:16} {describe_shape(shape)}, lr {preset.lr:g}")
    return "\n".join(lines)


def build_parser(script: Path, description: str | None) -> StepParser:
    parser = StepParser(prog=script.name, description=description, epilog=describe_presets())
    shape = parser.add_argument_group("workload (what is trained; defaults come from the preset)")
    run = parser.add_argument_group("run (how it is measured)")
    presets = ", ".join(f"{name} ({preset.purpose})" for name, preset in PRESETS.items())
    auto = "auto takes tiny on a CPU, and on a GPU what fits its free memory (default: auto)"
    shape.add_argument("--preset", choices=["auto", *PRESETS], metavar="NAME", help=f"auto, {presets}; {auto}")
    for group, name, kind, metavar, text in (
        (shape, "--n-layer", positive_int, "N", "transformer blocks"),
        (shape, "--n-head", positive_int, "N", "attention heads; divides --n-embd"),
        (shape, "--n-embd", positive_int, "N", "channels of the residual stream"),
        (shape, "--seq-len", positive_int, "N", "tokens per sequence"),
        (shape, "--vocab-size", positive_int, "N", "token ids, 0 to N-1"),
        (shape, "--batch-size", positive_int, "N", "sequences per training step, of each process"),
        (shape, "--global-batch-size", positive_int, "N", "the same of all processes together"),
        (shape, "--accumulate", positive_int, "K", "micro-batches that a step's batch is divided into (default: 1)"),
        (shape, "--lr", positive_float, "X", "AdamW's learning rate, constant"),
        (shape, "--seed", seed_int, "N", "weights and batches (default: 1337)"),
        (shape, "--data", Path, "FILE", "bytes, or uint16 .bin of nanoGPT, llm.c (default: Python's standard library)"),
        (shape, "--data-tokens", positive_int, "N", "only the first N tokens of the text"),
        (run, "--steps", positive_int, "N", "steps trained and timed, a GPU times at most 100 (default: 30; CPU: 10)"),
        (run, "--warmup", positive_int, "N", "untimed steps first (default: 5 on a GPU, 11 on several, 3 on a CPU)"),
        (run, "--device", str, "NAME", "auto, cpu, cuda, cuda:N (default: auto)"),
        (run, "--output", Path, "FILE", f"the record (default: results/{script.stem}.json)"),
    ):
        group.add_argument(name, type=kind, metavar=metavar, help=text)
    auto = "auto is bf16 where the hardware multiplies it, else fp16 on a GPU and fp32 on a CPU (default: auto)"
    run.add_argument("--amp-dtype", choices=["auto", "bf16", "fp16", "fp32"], help=f"mixed precision; {auto}")
    text = "profile untimed steps afterwards: a kernel table on stderr, a Chrome trace beside the record"
    run.add_argument("--profile", action="store_true", help=text)
    text = "recompute each block in backward: less memory, more time"
    shape.add_argument("--checkpoint", action="store_true", help=text)
    text = "launch each kernel of a step from the host, also where it could be captured as a CUDA graph"
    run.add_argument("--no-capture", action="store_true", help=text)
    text = "train and time the steps and no more (with --profile, profile them): no settling, energy, held-out loss"
    run.add_argument("--quick", action="store_true", help=text)
    run.add_argument("--parallel", choices=["ddp", "fsdp"], help="how processes share the model (default: ddp)")
    parser.set_defaults(preset="auto", seed=1337, device="auto", amp_dtype="auto", accumulate=1)
    return parser


def parse_args(script: Path, description: str | None, argv: list[str] | None = None) -> Arguments:
    """Read and check the command line. Anything wrong prints one line and exits with code 2."""
    parser = build_parser(script, description)
    given = parser.parse_args(argv)
    try:
        world = hardware.world()
        device = hardware.resolve_device(given.device, world)
        amp_dtype, amp_note = hardware.resolve_amp_dtype(given.amp_dtype, device)
        preset, batch_size, notes = resolve_preset(given.preset, device, given.accumulate, given.checkpoint)
        batch_size = resolve_batch_size(given, batch_size, world.size)
        config = PRESETS[preset].config
        config = replace(config, **{k: getattr(given, k) or default for k, default in asdict(config).items()})
        if config.n_embd % config.n_head:
            raise ValueError(f"--n-embd {config.n_embd} is not divisible by --n-head {config.n_head}")
        text = data.load_text(given.data, given.data_tokens)
        data.check_text(text, config.seq_len, config.vocab_size)
        output = given.output or ROOT / "results" / f"{script.stem}.json"
        check_writable(output, "steps", "copy_bytes_per_s")
    except torch.OutOfMemoryError:
        parser.error(f"--device {given.device} has no free memory left for even one tensor")
    except ValueError as error:
        parser.error(str(error))
    steps, warmup = (10, 3) if device.type == "cpu" else (30, 5 if world.size == 1 else DDP_WARMUP)
    return Arguments(
        script=script, base_preset=preset, config=config, batch_size=batch_size,
        accumulate=given.accumulate, steps=given.steps or steps, warmup=given.warmup or warmup,
        lr=given.lr or PRESETS[preset].lr, seed=given.seed,
        text=text, device=device, amp_dtype=amp_dtype, amp_note=amp_note, profile=given.profile, output=output,
        checkpoint=given.checkpoint, capture=not given.no_capture, quick=given.quick, notes=notes, world=world,
        parallel=(given.parallel or "ddp") if world.size > 1 else None,
    )  # fmt: skip


def resolve_batch_size(given: argparse.Namespace, default: int, processes: int) -> int:
    """Sequences per step of one process. Raises ValueError where options contradict, or do not divide, each other."""
    whole, batch_size = given.global_batch_size, given.batch_size or default
    if given.parallel and processes == 1:
        raise ValueError("--parallel is for several processes: torchrun --nproc-per-node N, or ./run_all.sh --gpus N")
    if whole and given.batch_size:
        raise ValueError("--batch-size and --global-batch-size exclude each other")
    if whole and whole % processes:
        raise ValueError(f"--global-batch-size {whole} is not divisible by {processes} processes")
    batch_size = whole // processes if whole else batch_size
    if batch_size % given.accumulate:
        raise ValueError(f"a batch of {batch_size} is not divisible by --accumulate {given.accumulate}")
    return batch_size


def resolve_preset(
    name: str, device: torch.device, accumulate: int = 1, checkpoint: bool = False
) -> tuple[str, int, tuple[str, ...]]:
    """The preset, its batch size, and header lines that say why `auto` chose them.

    On a GPU `auto` takes the slice where a plain FP32 step of it fits the free memory, else gpt2 at the largest power
    of two that fits.
    """
    if name != "auto":
        return name, PRESETS[name].batch_size, ()
    if device.type == "cpu":
        return "tiny", PRESETS["tiny"].batch_size, ("auto: preset tiny, because this runs on a CPU",)
    free = hardware.free_memory_bytes(device)
    choices = [("gpt3-6.7b-slice", PRESETS["gpt3-6.7b-slice"].batch_size), *(("gpt2", 2**k) for k in range(5, -1, -1))]
    for preset, batch_size in choices:  # the last one is taken in any case
        peak = flops.unfused_peak_bytes(PRESETS[preset].config, batch_size, accumulate, checkpoint)
        if ESTIMATE_MARGIN * peak <= free:
            break
    why = f"auto: preset {preset}, batch {batch_size}, because {free / 2**30:.0f} GiB are free on {device}"
    return preset, batch_size, (why,)
