"""The command line of a step: parser, presets and checks, which give Arguments."""

import argparse
import os
from dataclasses import asdict, replace
from pathlib import Path

import torch

from common import data, flops, hardware
from common.model import PRESETS, GPTConfig
from common.parallel import World, find_world
from common.record import Workload, read_object
from common.text import OneLineParser, Skip, positive_int

DDP_WARMUP = 11  # DDP divides gradients into buckets anew, and times itself, until then: no CUDA graph holds that
ESTIMATE_MARGIN = 1.1  # mixed precision keeps a little more than the estimate of a plain step
FEWEST_STEPS, MOST_STEPS, STEPS_FLOPS = 5, 30, 5e14  # by default on a GPU: as many steps as so many model FLOPs take
RECORD_MARKS = ("schema_version", "launch_s")
STAGED_BYTES = 2**30  # of batches, at most


class Arguments(argparse.Namespace):
    """What one run does: the options of `build_parser` by name, checked, and what they mean here."""

    script: Path
    preset: str  # that defaults came from
    config: GPTConfig
    text: data.Text
    device: torch.device
    amp_dtype: torch.dtype
    amp_note: str | None  # why mixed precision is FP32, where it is
    notes: list[str]  # lines for the header
    world: World

    @property
    def step(self) -> str:
        return self.script.stem

    @property
    def amp(self) -> bool:
        """Whether autocast has anything to do."""
        return self.amp_dtype is not torch.float32

    @property
    def adamw(self) -> dict:
        """The optimizer's keywords, the same for all steps.

        Those of Llama 2 (Touvron et al. 2023, section 2.2), without schedule or clipping. The eps of 1e-5 matters
        here: below it the loss of `gpt2` was seen to jump, in FP32 as well. The likely reason is that byte tokens
        leave most rows of a large vocabulary without a target, and Adam scales their vanishing gradients to full
        steps.
        """
        return {"lr": self.lr, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}

    def require_fp8(self) -> None:
        """Raises Skip without an NVIDIA GPU that multiplies FP8, and where a matrix has a dimension that FP8 does not
        divide: channels, tokens (the leading one of weight gradients), the vocabulary."""
        capability = hardware.compute_capability(self.device)
        if capability < hardware.FP8_CAPABILITY:
            raise Skip("FP8 needs an NVIDIA GPU of the generation Ada, Hopper or newer")
        if not self.amp:
            raise Skip(f"FP8 is multiplied under BF16 mixed precision, not under {self.amp_note}")
        unit = 32 if capability >= (10, 0) else 16  # one scale for 32 numbers (MXFP8) from Blackwell on
        sizes = {"--n-embd": self.config.n_embd, "--batch-size x --seq-len": self.batch_size * self.config.seq_len}
        for name, size in (sizes | {"--vocab-size": self.config.vocab_size}).items():
            if size % unit:
                raise Skip(f"FP8 needs {name} divisible by {unit}, not {size}")

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tokens and targets of all steps and of one untimed step after them, on the device."""
        first = self.world.rank * self.batch_size
        starts = self._starts()[:, first : first + self.batch_size]
        return data.stage_batches(self.text, starts, self.config.seq_len, self.device)

    def _starts(self):
        """Where the excerpts of all processes begin: those of one process that takes as many sequences."""
        n_batches, batch_size = self.warmup + self.steps + 1, self.world.size * self.batch_size
        return data.draw_starts(self.text, n_batches, batch_size, self.config.seq_len, self.seed)

    def workload(self) -> Workload:
        """The record's workload."""
        return Workload(
            preset=self.preset if self.config == PRESETS[self.preset].config else "custom",
            parameters=flops.parameters(self.config),
            tokens_per_step=self.batch_size * self.config.seq_len,
            flops_per_step=flops.flops_per_step(self.config, self.batch_size),
            text=self.text.name,
            text_tokens=len(self.text.tokens),
            batches_sha256=data.fingerprint(self.text, self._starts(), self.config.seq_len),
            gpus=self.world.size,
            **asdict(self.config),
            **{name: getattr(self, name) for name in ("batch_size", "seed", "lr", "warmup", "steps", "parallel")},
        )


def build_parser(name: str, description: str | None) -> OneLineParser:
    presets = [f"  {name:16} {p.purpose}: batch {p.batch_size} of {p.config}" for name, p in PRESETS.items()]
    parser = OneLineParser(prog=name, description=description, epilog="\n".join(["presets:", *presets]))
    shape = parser.add_argument_group("workload (what is trained; defaults come from the preset)")
    run = parser.add_argument_group("run (how it is measured)")
    text = "auto (default) takes tiny on a CPU, and on a GPU what fits its free memory"
    shape.add_argument("--preset", choices=["auto", *PRESETS], metavar="NAME", default="auto", help=text)
    text = "mixed precision; auto (default) is bf16 where the hardware multiplies it, else fp32"
    run.add_argument("--amp-dtype", choices=["auto", "bf16", "fp32"], default="auto", help=text)
    run.add_argument("--parallel", choices=["ddp", "fsdp"], help="how processes share the model (default: ddp)")
    for group, option, kind, text in (
        (shape, "--n-layer", positive_int, "transformer blocks"),
        (shape, "--n-head", positive_int, "attention heads; divides --n-embd"),
        (shape, "--n-embd", positive_int, "channels of the residual stream"),
        (shape, "--seq-len", positive_int, "tokens per sequence"),
        (shape, "--vocab-size", positive_int, "token ids, 0 to N-1"),
        (shape, "--batch-size", positive_int, "sequences per training step, of each process"),
        (shape, "--lr", float, "AdamW's rate, constant, at most 1 (default: by layers and channels)"),
        (shape, "--seed", positive_int, "weights and batches (default: 1337)"),
        (run, "--steps", positive_int, "steps trained and timed, at least (default: 5 to 30, by size; CPU: 10)"),
        (run, "--heldout-every", positive_int, "the loss on held-out text after every N trained steps"),
        (run, "--warmup", positive_int, f"untimed steps first (default: 3; {DDP_WARMUP} on several GPUs)"),
    ):
        group.add_argument(option, type=kind, metavar="X" if kind is float else "N", help=text)
    text = "a text as bytes, or uint16 .bin of nanoGPT, llm.c (default: Python's standard library)"
    shape.add_argument("--data", type=Path, metavar="FILE", help=text)
    run.add_argument("--device", metavar="NAME", default="auto", help="auto (default), cpu, cuda, cuda:N")
    run.add_argument("--output", type=Path, metavar="FILE", help="the record (default: results/ and the script's name)")
    run.add_argument("--profile", action="store_true", help="where the time goes: kernels, in the record and on stderr")
    run.add_argument("--trace", action="store_true", help="write a Chrome trace of a launched step next to the record")
    text = "launch each kernel from the host, also where the step could be captured as a CUDA graph"
    run.add_argument("--no-capture", action="store_false", dest="capture", help=text)
    parser.set_defaults(seed=1337)
    return parser


def parse_args(script: Path, description: str | None, argv: list[str] | None = None, trains: bool = True) -> Arguments:
    """Read and check the command line. Anything wrong prints one line and exits with code 2. `trains`: here."""
    parser = build_parser(script.name, description)
    args = parser.parse_args(argv, Arguments(script=script))
    try:
        resolve(args, trains)
    except torch.OutOfMemoryError:
        parser.error(f"--device {args.device} has no free memory left for even one tensor")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def learning_rate(config: GPTConfig) -> float:
    """AdamW's default rate: one rule, by which a model of any shape learns from the first step on.

    Adam's first steps move every weight by the rate, and all layers push the residual stream one way: it grows with
    n_layer n_embd times the rate, and a logit with n_embd times that. 600 and 4 were found on an H200, at 2 to 24
    layers and 320 to 8192 channels. A rate that falls with n_embd alone made the loss of wide models rise there.
    """
    return min(1e-3, 600 / ((config.n_layer + 4) * config.n_embd**2))


def check_output(output: Path, *marks: str) -> None:
    """Know before any work whether JSON can be written. Raises ValueError where not, and for a file of something else:
    one without any of these keys, by default those of a record or of roofs."""
    probe = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        if output.exists() and not output.is_file():
            raise ValueError(f"--output {output} is not a regular file")
        if output.exists() and output.stat().st_size and not read_object(output).keys() & {*(marks or RECORD_MARKS)}:
            raise ValueError(f"--output {output} exists and is no record: it stays as it is")
        output.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write --output {output}: {error.strerror or error}") from None


def resolve(args: Arguments, trains: bool) -> None:
    """Put what the options mean on this machine in their place. Raises ValueError, one line, for what cannot run."""
    args.world = find_world()
    if args.parallel and args.world.size == 1:
        raise ValueError("--parallel is for several processes: torchrun --nproc-per-node N, or ./run_all.sh --gpus N")
    args.parallel = args.parallel or ("ddp" if args.world.size > 1 else None)
    args.device = hardware.resolve_device(args.device, args.world.local_rank)
    args.amp_dtype, args.amp_note = hardware.resolve_amp_dtype(args.amp_dtype, args.device)
    args.preset, batch_size, args.notes = resolve_preset(args.preset, args.device)
    args.batch_size = args.batch_size or batch_size
    preset = PRESETS[args.preset].config
    args.config = replace(preset, **{name: getattr(args, name) or value for name, value in asdict(preset).items()})
    if args.config.n_embd % args.config.n_head:
        raise ValueError(f"--n-embd {args.config.n_embd} is not divisible by --n-head {args.config.n_head}")
    shares = args.world.size if args.parallel == "fsdp" else 1
    needed = 16 * flops.parameters(args.config) // shares  # FP32 weight, gradient and two moments
    free = hardware.free_memory_bytes(args.device)
    if trains and free and needed > free:
        model = f"the model of {flops.parameters(args.config) / 1e6:,.0f} M parameters"
        memory = f"{args.device} has {free / 2**30:,.0f} GiB free"
        raise ValueError(f"{model} needs {needed / 2**30:,.0f} GiB in training (16 bytes each), but {memory}")
    on_gpu, per_step = args.device.type == "cuda", flops.flops_per_step(args.config, args.batch_size)
    by_size = max(FEWEST_STEPS, min(MOST_STEPS, int(STEPS_FLOPS / per_step)))
    args.steps = args.steps or (by_size if on_gpu else 10)
    args.warmup = args.warmup or (DDP_WARMUP if on_gpu and args.world.size > 1 else 3)
    tokens = (args.warmup + args.steps + 1) * args.batch_size * args.config.seq_len
    if 16 * tokens > STAGED_BYTES:
        raise ValueError(f"--steps {args.steps} trains {tokens:,} tokens; at most {STAGED_BYTES // 16:,} are staged")
    args.lr = learning_rate(args.config) if args.lr is None else args.lr
    if not 0 < args.lr <= 1:
        raise ValueError(f"--lr {args.lr} is not above 0 and at most 1")
    args.output = args.output or hardware.ROOT / "results" / f"{args.step}.json"
    if trains:
        check_output(args.output)
    args.text = data.load_text(args.data, args.config.seq_len, args.config.vocab_size)
    if args.heldout_every:
        data.heldout_starts(args.text, args.config.seq_len)  # refuses a short text now


def resolve_preset(name: str, device: torch.device) -> tuple[str, int, list[str]]:
    """The preset, its batch size, and header lines that tell why `auto` chose them.

    On a GPU `auto` takes the slice where a plain FP32 step of it fits the free memory, else gpt2 at the largest power
    of two that fits.
    """
    if name != "auto":
        return name, PRESETS[name].batch_size, []
    if device.type == "cpu":
        return "tiny", PRESETS["tiny"].batch_size, ["auto: preset tiny, because this runs on a CPU"]
    free = hardware.free_memory_bytes(device)
    choices = [("gpt3-6.7b-slice", PRESETS["gpt3-6.7b-slice"].batch_size), *(("gpt2", 2**k) for k in range(5, -1, -1))]
    for preset, batch_size in choices:  # the last one is taken in any case
        if ESTIMATE_MARGIN * flops.peak_bytes(PRESETS[preset].config, batch_size, by_hand=True) <= free:
            break
    why = f"auto: preset {preset}, batch {batch_size}, because {free / 2**30:.0f} GiB are free on {device}"
    return preset, batch_size, [why]
