"""The command line of a step: parser, presets and checks, which give Arguments."""

import argparse
import hashlib
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from common import data, flops, hardware
from common.model import PRESETS, GPTConfig
from common.record import Workload, read_object
from common.text import OneLineParser, Skip, positive_int

# Launched steps before anything else. DDP divides gradients into buckets anew, and times itself, in its first
# 10: no CUDA graph can hold that.
WARMUP, DDP_WARMUP = 3, 11
# Free GiB from which `auto` takes a preset at a batch size: what FP32 with attention by hand needs, and a
# tenth more.
AUTO = {83: ("gpt3-6.7b-slice", 8), **{2 * n + 2: ("gpt2", n) for n in (32, 16, 8, 4, 2)}}
RECORD_MARKS = {
    "schema_version",
    "launch_s",
    "experiment",
    "experiments",
}  # of the JSON that this project writes
CPU_STEPS = 14  # by default
FEWEST_STEPS, MOST_STEPS, STEPS_FLOPS = (
    8,
    30,
    5e14,
)  # by default on a GPU: as many steps as so many model FLOPs take


class Arguments(argparse.Namespace):
    """What one run does: the options of `build_parser` by name, checked, and what they mean here."""

    script: Path
    preset: str  # that defaults came from
    config: GPTConfig
    text: data.Text
    device: torch.device
    amp_dtype: torch.dtype
    amp: bool  # whether autocast has anything to do
    rank: int  # of this process, among `processes` that torchrun started; alone 0 of 1
    processes: int
    warmup: int  # launched steps, before a capture

    def require_fp8(self) -> None:
        """Raises Skip without an NVIDIA GPU that multiplies FP8, and where a matrix has a dimension that FP8
        does not divide: channels, tokens (the leading one of weight gradients), the vocabulary."""
        capability = hardware.compute_capability(self.device)
        if capability < hardware.FP8_CAPABILITY:
            raise Skip("FP8 needs an NVIDIA GPU of the generation Ada, Hopper or newer")
        unit = hardware.fp8_unit(capability)
        sizes = {
            "--n-embd": self.config.n_embd,
            "--batch-size x --seq-len": self.batch_size * self.config.seq_len,
        }
        for name, size in (sizes | {"--vocab-size": self.config.vocab_size}).items():
            if size % unit:
                raise Skip(f"FP8 needs {name} divisible by {unit}, not {size}")

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens and targets of all steps and of one untimed step after them, on the device: this process's
        share of what one process would draw that takes the sequences of all."""
        n_batches, first = self.steps + 1, self.rank * self.batch_size
        seq_len, of_all = self.config.seq_len, self.processes * self.batch_size
        starts = data.draw_starts(self.text, n_batches, of_all, seq_len, self.seed)
        return data.stage_batches(self.text, starts[:, first : first + self.batch_size], seq_len, self.device)

    def workload(self) -> Workload:
        """The record's workload."""
        return Workload(
            preset=self.preset if self.config == PRESETS[self.preset][0] else "custom",
            parameters=flops.parameters(self.config),
            tokens_per_step=self.batch_size * self.config.seq_len,
            flops_per_step=flops.flops_per_step(self.config, self.batch_size),
            text=self.text.name,
            text_sha256=hashlib.sha256(self.text.tokens).hexdigest()[:16],
            gpus=self.processes,
            **asdict(self.config),
            **{
                name: getattr(self, name)
                for name in ("batch_size", "seed", "lr", "warmup", "steps", "parallel")
            },
        )


def build_parser(name: str, description: str | None) -> OneLineParser:
    presets = [
        f"  {name:16} batch {batch_size} of {config}" for name, (config, batch_size) in PRESETS.items()
    ]
    parser = OneLineParser(prog=name, description=description, epilog="\n".join(["presets:", *presets]))
    shape = parser.add_argument_group("workload (what is trained; defaults come from the preset)")
    run = parser.add_argument_group("run (how it is measured)")
    text = "auto (default) takes tiny on a CPU, and on a GPU what fits its free memory"
    shape.add_argument("--preset", choices=["auto", *PRESETS], metavar="NAME", default="auto", help=text)
    run.add_argument(
        "--parallel", choices=["ddp", "fsdp"], help="how processes share the model (default: ddp)"
    )
    for group, option, kind, text in (
        (shape, "--n-layer", positive_int, "transformer blocks"),
        (shape, "--n-head", positive_int, "attention heads; divides --n-embd"),
        (shape, "--n-embd", positive_int, "channels of the residual stream"),
        (shape, "--seq-len", positive_int, "tokens per sequence"),
        (shape, "--vocab-size", positive_int, "token ids, 0 to N-1"),
        (shape, "--batch-size", positive_int, "sequences per training step, of each process"),
        (shape, "--lr", float, "AdamW's rate, constant, at most 1 (default: by layers and channels)"),
        (shape, "--seed", positive_int, "weights and batches (default: 1337)"),
        (
            run,
            "--steps",
            positive_int,
            "steps trained and timed, at least (default: 8 to 30, by size; CPU: 14)",
        ),
        (run, "--heldout-every", positive_int, "the loss on held-out text after every N trained steps"),
    ):
        group.add_argument(option, type=kind, metavar="X" if kind is float else "N", help=text)
    text = "a text as bytes, or uint16 .bin of nanoGPT, llm.c (default: Python's standard library)"
    shape.add_argument("--data", type=Path, metavar="FILE", help=text)
    run.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto, a GPU if any"
    )
    run.add_argument(
        "--output", type=Path, metavar="FILE", help="the record (default: results/ and the script's name)"
    )
    run.add_argument(
        "--profile", action="store_true", help="where the time goes: kernels, in the record and on stderr"
    )
    text = "launch each kernel from the host, also where the step could be captured as a CUDA graph"
    run.add_argument("--no-capture", action="store_false", dest="capture", help=text)
    text = "train without a rehearsal: FP8's first scales are unknown, and its first steps are lost"
    run.add_argument("--cold", action="store_true", help=text)
    parser.set_defaults(seed=1337)
    return parser


def parse_args(
    script: Path, description: str | None, argv: list[str] | None = None, trains: bool = True
) -> Arguments:
    """Read and check the command line. Anything wrong prints one line and exits with code 2. `trains`:
    here."""
    parser = build_parser(script.name, description)
    args = parser.parse_args(argv, Arguments(script=script))
    try:
        resolve(args, trains)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        parser.error(str(error))
    return args


def learning_rate(config: GPTConfig) -> float:
    """AdamW's default rate: one rule, by which a model of any shape learns from the first step on.

    Adam's first steps move every weight by the rate, and all layers push the residual stream one way: it
    grows with n_layer n_embd times the rate, and a logit with n_embd times that. 600 and 4 were found on an
    H200, at 2 to 24 layers and 320 to 8192 channels. A rate that falls with n_embd alone made the loss of
    wide models rise there.
    """
    return min(1e-3, 600 / ((config.n_layer + 4) * config.n_embd**2))


def check_output(output: Path) -> None:
    """Know before any work that a record can be written. Raises ValueError where not, and for a file that is
    none."""
    ours = output.is_file() and (not output.stat().st_size or RECORD_MARKS & read_object(output).keys())
    if output.exists() and not ours:
        raise ValueError(f"--output {output} exists and is no record: it stays as it is")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise ValueError(f"cannot write --output {output}: {error.strerror or error}") from None


def resolve(args: Arguments, trains: bool) -> None:
    """Put what the options mean on this machine in their place. Raises ValueError, one line, for what cannot
    run."""
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}  # which torchrun sets
    args.rank, args.processes, local_rank = (
        int(os.environ.get(name, alone)) for name, alone in names.items()
    )
    if args.parallel and args.processes == 1:
        raise ValueError(
            "--parallel is for several processes: torchrun --nproc-per-node N, or ./run_all.sh --gpus N"
        )
    args.parallel = args.parallel or ("ddp" if args.processes > 1 else None)
    args.device = hardware.resolve_device(args.device, local_rank)
    args.amp = hardware.has_bf16_matrix_instructions(args.device)
    args.amp_dtype = torch.bfloat16 if args.amp else torch.float32
    args.preset, batch_size = resolve_preset(args.preset, args.device)
    args.batch_size, preset = args.batch_size or batch_size, PRESETS[args.preset][0]
    args.config = replace(
        preset, **{name: getattr(args, name) or value for name, value in asdict(preset).items()}
    )
    if args.config.n_embd % args.config.n_head:
        raise ValueError(f"--n-embd {args.config.n_embd} is not divisible by --n-head {args.config.n_head}")
    shares = args.processes if args.parallel == "fsdp" else 1
    on_gpu = args.device.type == "cuda"
    # FP32 weight, gradient and two moments; the rehearsal's copy of the weights lies in the host's memory.
    each = 16 if on_gpu or args.cold else 20
    needed = each * flops.parameters(args.config) // shares
    free = hardware.free_memory_bytes(args.device)
    if trains and free and needed > free:
        memory = f"{args.device} has {free / 2**30:,.0f} GiB free"
        asked = f"{needed / 2**30:,.0f} GiB in training ({each} bytes a parameter)"
        raise ValueError(f"the model needs {asked}, but {memory}")
    per_step = flops.flops_per_step(args.config, args.batch_size)
    by_size = max(FEWEST_STEPS, min(MOST_STEPS, int(STEPS_FLOPS / per_step)))
    args.steps = args.steps or (by_size if on_gpu else CPU_STEPS)
    args.warmup = DDP_WARMUP if on_gpu and args.processes > 1 else WARMUP
    args.lr = learning_rate(args.config) if args.lr is None else args.lr
    if not 0 < args.lr <= 1:
        raise ValueError(f"--lr {args.lr} is not above 0 and at most 1")
    args.output = args.output or hardware.ROOT / "results" / f"{args.script.stem}.json"
    if trains:
        check_output(args.output)
    args.text = data.load_text(args.data, args.config.seq_len, args.config.vocab_size)


def resolve_preset(name: str, device: torch.device) -> tuple[str, int]:
    """The preset and its batch size; `auto` takes what fits."""
    if name == "auto" and device.type == "cuda":
        free = hardware.free_memory_bytes(device) / 2**30
        return next((chosen for needed, chosen in AUTO.items() if needed <= free), ("gpt2", 1))
    name = "tiny" if name == "auto" else name
    return name, PRESETS[name][1]
