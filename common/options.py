"""What can be asked of a row: each option is a field, which its parser and its checks come from."""

import hashlib
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch

from common import data, flops, hardware
from common.data import Text
from common.model import PRESETS, GPTConfig
from common.record import Workload, read_object
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
# Training steps by default: 14 on a CPU; on a GPU as many as take 2e14 model FLOPs, but 8 to 30.
CPU_STEPS = 14
FEWEST_STEPS, MOST_STEPS = 8, 30
STEPS_FLOPS = 2e14
TIMED_S = 3  # seconds of timed steps on a GPU, at least
# Bytes a parameter in training: FP32 weight, gradient and two moments. On a CPU the rehearsal's copy of the
# weights lies in the same memory.
GPU_BYTES, CPU_BYTES = 16, 20


WORKLOAD = "workload (what is trained; defaults come from the preset)"
RUN = "run (how it is measured)"


def option(group: str, text: str, default=None, flag: str | None = None, **words):
    """A dataclass's field that is also an option: its default, and argparse's words for it. `flag` is for one
    that is not spelt as the field."""
    return field(default=default, metadata={"group": group, "flag": flag, "help": text, **words})


def count(group: str, text: str, default: int | None = None):
    """An option that takes a positive whole number."""
    return option(group, text, default, type=positive_int, metavar="N")


@dataclass(kw_only=True)
class Measurement:
    """How a row is run, measured and recorded, whatever it trains. What the user left out has a value after
    `resolve`.

    A class that extends it has the methods about(): lines for a person on the device and on what is trained;
    batches(): what `train_step` takes in each step, and in an untimed one after them; and workload(): the
    record's.
    """

    lr: float | None = option(
        WORKLOAD,
        "AdamW's rate, constant, at most 1 (default: by layers and channels)",
        type=float,
        metavar="X",
    )
    seed: int = count(WORKLOAD, "weights and batches (default: 1337)", 1337)
    device: torch.device = option(RUN, "default: auto, a GPU if any", "auto", choices=["auto", "cpu", "cuda"])
    steps: int = count(RUN, "steps trained and timed, at least (default: 8 to 30, by size; CPU: 14)")
    seconds: int = count(RUN, "seconds timed on a GPU, at least (default: 3)", TIMED_S)
    output: Path = option(
        RUN, "the record (default: results/ and the script's name)", type=Path, metavar="FILE"
    )
    profile: bool = option(
        RUN, "where the time goes: kernels, in the record and on stderr", False, action="store_true"
    )
    capture: bool = option(
        RUN,
        "launch each kernel from the host, also where the step could be captured as a CUDA graph",
        True,
        flag="--no-capture",
        action="store_false",
    )
    cold: bool = option(
        RUN,
        "train without a rehearsal: FP8's first scales are unknown, and its first steps are lost",
        False,
        action="store_true",
    )
    heldout_every: int | None = None  # steps between two losses on text that is not trained on
    parallel: str | None = None  # how several processes share the model: ddp, fsdp

    name: str  # of the row
    command: str = ""  # what makes this row again
    source: str | None = None  # what makes it, as the report shows it
    changes: list[str] = field(default_factory=list)  # see common.record.Row
    code: str | None = None  # see common.record.Row
    amp_dtype: torch.dtype = torch.float32  # BF16 where the device multiplies it
    rank: int = 0  # of this process, 0 to processes - 1
    processes: int = 1  # one a GPU
    local_rank: int = 0  # on its own machine: the index of its GPU
    warmup: int = WARMUP  # steps that are launched before a capture

    @property
    def amp(self) -> bool:
        """Whether the device multiplies BF16, so that autocast pays."""
        return self.amp_dtype == torch.bfloat16

    def resolve(self) -> None:
        """Give what the user left out its meaning on this machine. Raises ValueError, one line, for what
        cannot run here."""
        self.device = hardware.resolve_device(self.device, self.local_rank)
        if hardware.has_bf16_matrix_instructions(self.device):
            self.amp_dtype = torch.bfloat16
        if self.lr is not None and not 0 < self.lr <= 1:
            raise ValueError(f"--lr {self.lr} is not above 0 and at most 1")
        self.output = self.output or hardware.ROOT / "results" / f"{self.name}.json"


@dataclass(kw_only=True)
class Arguments(Measurement):
    """The options of a step. Scripts read `config`, `seed`, `lr`, `device`, `amp` and `amp_dtype`."""

    preset: str = option(
        WORKLOAD,
        "auto (default) takes tiny on a CPU, and on a GPU what fits its free memory",
        "auto",
        choices=["auto", *PRESETS],
        metavar="NAME",
    )
    n_layer: int | None = count(WORKLOAD, "transformer blocks")
    n_head: int | None = count(WORKLOAD, "attention heads; divides --n-embd")
    n_embd: int | None = count(WORKLOAD, "channels of the residual stream")
    seq_len: int | None = count(WORKLOAD, "tokens per sequence")
    vocab_size: int | None = count(WORKLOAD, "token ids, 0 to N-1")
    batch_size: int = count(WORKLOAD, "sequences per training step, of each process")
    data: Path | None = option(
        WORKLOAD,
        "a text as bytes, or tokens: .bin of nanoGPT or llm.c, .npy (default: Python's standard library)",
        type=Path,
        metavar="FILE",
    )
    heldout_every: int | None = count(RUN, "the loss on held-out text after every N trained steps")
    parallel: str | None = option(
        RUN, "how processes share the model (default: ddp)", choices=["ddp", "fsdp"]
    )

    config: GPTConfig | None = None
    text: Text | None = None

    def resolve(self, trains: bool = True) -> None:
        """As the base class does. `trains` is whether the model will be trained on this machine: then it must
        fit its free memory, and the record must be writable."""
        self.rank, self.processes, self.local_rank = place_of_process()
        self.parallel = resolve_parallel(self.parallel, self.processes)
        super().resolve()
        self.preset, batch_size = resolve_preset(self.preset, self.device)
        self.batch_size = self.batch_size or batch_size
        self.config = self.resolve_config()
        self.lr = self.lr or default_rate(self.config)
        if trains:
            shares = self.processes if self.parallel == "fsdp" else 1
            check_memory(self.config, self.device, shares, self.cold)
            check_output(self.output)
        self.text = data.load_text(self.data, self.config.seq_len, self.config.vocab_size)
        if self.device.type == "cuda" and self.processes > 1:
            self.warmup = DDP_WARMUP
        work = flops.flops_per_step(self.config, self.batch_size)
        self.steps = self.steps or default_steps(work, self.device)

    def resolve_config(self) -> GPTConfig:
        """The preset's shape, with what the options change of it. Raises ValueError for heads that do not
        divide it."""
        config = PRESETS[self.preset][0]
        changed = {name: getattr(self, name) for name in asdict(config) if getattr(self, name)}
        config = replace(config, **changed)
        if config.n_embd % config.n_head:
            raise ValueError(f"--n-embd {config.n_embd} is not divisible by --n-head {config.n_head}")
        return config

    def about(self) -> list[str]:
        lines = [
            *hardware.about(self.device),
            f"{self.preset}: {self.config}, {flops.parameters(self.config) / 1e6:.1f} M parameters",
            f"batch {self.batch_size}, text: {self.text.name}",
        ]
        if self.parallel:
            lines.append(f"{self.processes} processes, each with a batch of its own ({self.parallel})")
        return lines

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
    """The parser of a step."""
    presets = [
        f"  {name:16} batch {batch_size} of {config}" for name, (config, batch_size) in PRESETS.items()
    ]
    parser = OneLineParser(prog=name, description=description, epilog="\n".join(["presets:", *presets]))
    add_options(parser, Arguments)
    return parser


def add_options(parser: OneLineParser, measurement: type[Measurement]) -> None:
    """Add the fields that `option` made, those of the class itself first."""
    groups = {}
    for each in sorted(fields(measurement), key=lambda each: each.name in Measurement.__dataclass_fields__):
        if words := dict(each.metadata):
            title, flag = words.pop("group"), words.pop("flag") or f"--{each.name.replace('_', '-')}"
            groups[title] = groups.get(title) or parser.add_argument_group(title)
            groups[title].add_argument(flag, dest=each.name, default=each.default, **words)


def parse_args(
    script: Path, description: str | None, argv: list[str] | None = None, trains: bool = True
) -> Arguments:
    """Read and check the command line of a script, see `Arguments.resolve`. Anything wrong prints one line
    and exits with code 2."""
    parser = build_parser(script.name, description)
    args = Arguments(name=script.stem, **vars(parser.parse_args(argv)))
    args.command = portable_command(f"python {script.stem}.py", sys.argv[1:])
    try:
        args.source = script.read_text() if script.is_file() else None
        args.resolve(trains)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        parser.error(str(error))
    return args


def place_of_process() -> tuple[int, int, int]:
    """Rank, processes and local rank, as torchrun tells this process in its environment; alone 0, 1, 0.
    Raises ValueError for what another launcher has left there: the processes would wait for each other for
    ever."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "TORCHELASTIC_RUN_ID" in os.environ and all(os.environ.get(name, "").isdecimal() for name in names):
        return tuple(int(os.environ[name]) for name in names)
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ValueError(f"WORLD_SIZE={processes}, but torchrun did not start this: unset {' '.join(names)}")
    return 0, 1, 0


def resolve_preset(name: str, device: torch.device) -> tuple[str, int]:
    """The preset and its batch size; `auto` takes what fits."""
    if name == "auto" and device.type == "cuda":
        free = hardware.free_memory_bytes(device) / 2**30
        return next((preset, batch_size) for gib, preset, batch_size in AUTO if gib <= free)
    name = "tiny" if name == "auto" else name
    return name, PRESETS[name][1]


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
    has_own_memory = device.type == "cuda" and not hardware.shares_memory(device)
    per_parameter = GPU_BYTES if has_own_memory or cold else CPU_BYTES
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
        with tempfile.NamedTemporaryFile(prefix=f".{output.name}.", dir=output.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {output}: {error.strerror or error}") from None


def is_own(file: Path) -> bool:
    """Whether this project may have written a file: a record, or an empty file, as mktemp makes it."""
    if not file.is_file():
        return False
    return not file.stat().st_size or bool(OWN_KEYS & read_object(file).keys())
