"""Arguments, warm-up, the timed region, and the result record: the same for every step.

A script ends with `benchmark.launch(main)`; its `main(args)` builds a model and an optimizer and
returns `benchmark.run(train_step, model, args)`.

The record, schema version 1. One JSON object a run, the *envelope*:

    schema_version   1
    command          the command line, without the output path
    started_at       UTC, ISO 8601
    environment      {...}, see hardware.describe
    workload         {preset, n_layer, n_head, n_embd, seq_len, vocab_size, batch_size, parameters,
                      tokens_per_step, flops_per_step, data{name, tokens, batches_sha256}, seed, lr,
                      warmup, steps}
    roofs            null where not measured, or {copy_bytes_per_s, fp32_flops_per_s, tf32_..., bf16_..., fp8_...,
                     shapes[], square{}, notes[]}, see hardware.measure_roofs
    steps            a list of *step records*; a script run alone writes one

and a step record:

    step, source     file name without .py; the script's text
    status           ok | skipped | oom | failed | timeout
    reason           null, or one line that says what to do
    note             null, or one line that qualifies an ok row
    settings         what really ran, observed on an untimed step: {amp_dtype,
                     float32_matmul_precision, attention_kernel, compiled, optimizer, ...}, and what the
                     script says of itself: {fp8_recipe}
    timing           {warmup_s, step_ms[], median_ms, p25_ms, p75_ms}
    tokens_per_s     tokens_per_step / median
    model_flops_per_s  flops_per_step / median, by the convention of common/flops.py
    peak_allocated_bytes, peak_reserved_bytes   CUDA allocator, over the timed steps; null on a CPU
    peak_rss_bytes   host memory of the process at its largest, compiler and torch included
    loss             one value per training step, in nats, warm-up included
    host_syncs       waits for the GPU in one step; null on a CPU
    gpu_state        clocks, temperature, power, throttle reasons after the last step was launched, and whether
                     the GPU was still at work then (while_running); null on a CPU
    profile          null without --profile, or {step_ms, steps, gpu_busy_ms, gpu_idle_ms, kernels_per_step, host_syncs,
                     autograd_nodes_attention, bound_by, shares{compute, launch, memory},
                     categories{name: {ms, launches}}, kernels[{name, category, ms, launches}]}: per training step;
                     the categories and the idle time add up to step_ms. On a CPU operators stand for kernels,
                     gpu_* and bound_by are null
    bytes_per_step   {value, source: "analytic"}: the least a step moves in BF16, see flops.least_bytes_per_step

Fields of a step that did not come to pass are null (lists: empty).
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import os
import resource
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import torch

from common import analysis, data, flops, hardware, profile
from common.model import PRESETS, GPTConfig, Preset
from common.record import (
    SCHEMA_VERSION,
    OneLineParser,
    check_writable,
    describe_shape,
    empty_step_record,
    smaller_batch,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
TrainStep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Memory of the largest step, GiB: a constant and a share per sequence, with room to spare.
AUTO_SLICE_GIB = 84
AUTO_GPT2_GIB = (2, 2.0)

PROFILED_STEPS = 3


class Skip(Exception):
    """Raised by a script that cannot run here; the message is one line that says what to do."""


@dataclass(frozen=True)
class Arguments:
    """What one run does.

    `preset_given` names the preset that defaults came from; `amp_note` says why mixed precision is
    FP32, where it is; `notes` are lines for the header.
    """

    script: Path
    preset_given: str
    config: GPTConfig
    batch_size: int
    steps: int
    warmup: int
    lr: float
    seed: int
    text: data.Text
    device: torch.device
    amp_dtype: torch.dtype
    amp_note: str | None
    profile: bool
    output: Path
    notes: tuple[str, ...]

    @property
    def step(self) -> str:
        return self.script.stem

    @property
    def preset(self) -> str:
        """The preset whose shape this is, or `custom`."""
        return self.preset_given if self.config == PRESETS[self.preset_given].config else "custom"

    @property
    def adamw(self) -> dict:
        """The optimizer's keywords, the same for all steps.

        Those of Llama 2 (Touvron et al. 2023, section 2.2), without schedule or clipping. Its eps of 1e-5
        matters here: below it the loss of `gpt2` was seen to jump, in FP32 as well. The likely reason: byte
        tokens leave most rows of a large vocabulary without a target, and Adam normalizes their vanishing
        gradients to full steps.
        """
        return {"lr": self.lr, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}

    @property
    def compute_capability(self) -> tuple[int, int]:
        return hardware.compute_capability(self.device)

    def require_multiples_of(self, unit: int, what: str, vocab: bool = True) -> None:
        """Raises Skip where the matrices that `what` multiplies have a dimension that `unit` does not divide.

        The dimensions are channels, tokens (the leading one of weight gradients) and, with `vocab`, the head's outputs.
        """
        sizes = {"--n-embd": self.config.n_embd, "--batch-size x --seq-len": self.batch_size * self.config.seq_len}
        if vocab:
            sizes["--vocab-size"] = self.config.vocab_size
        for name, size in sizes.items():
            if size % unit:
                raise Skip(f"{what} needs {name} divisible by {unit}, not {size}")


# --- arguments ------------------------------------------------------------------------------------


def positive_int(text: str) -> int:
    digits = text.lstrip("0")[:20]  # Python refuses to read thousands of them
    if not text.isdecimal() or not 1 <= int(digits or 0) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 2^31 - 1")
    return int(digits)


def seed_int(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite positive number")
    return value


def build_parser(script: Path, description: str | None) -> OneLineParser:
    parser = OneLineParser(
        prog=script.name,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="presets:\n" + "\n".join(f"  {name:16} {_describe_preset(PRESETS[name])}" for name in PRESETS),
        allow_abbrev=False,
    )
    presets = ", ".join(f"{name} ({preset.purpose})" for name, preset in PRESETS.items())
    shape = parser.add_argument_group("workload (what is trained; defaults come from the preset)")
    shape.add_argument(
        "--preset",
        choices=["auto", *PRESETS],
        default="auto",
        metavar="NAME",
        help=f"auto, {presets}; auto takes tiny on a CPU, and on a GPU what fits its free memory (default: auto)",
    )
    shape.add_argument("--n-layer", type=positive_int, metavar="N", help="transformer blocks")
    shape.add_argument("--n-head", type=positive_int, metavar="N", help="attention heads; divides --n-embd")
    shape.add_argument("--n-embd", type=positive_int, metavar="N", help="channels of the residual stream")
    shape.add_argument("--seq-len", type=positive_int, metavar="N", help="tokens per sequence")
    shape.add_argument("--vocab-size", type=positive_int, metavar="N", help="token ids, 0 to N-1")
    shape.add_argument("--batch-size", type=positive_int, metavar="N", help="sequences per training step")
    shape.add_argument("--lr", type=positive_float, metavar="X", help="AdamW's learning rate, constant")
    shape.add_argument("--seed", type=seed_int, default=1337, metavar="N", help="weights and batches (default: 1337)")
    shape.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="text as bytes, or a .bin of uint16 tokens (nanoGPT, llm.c) (default: Python's standard library)",
    )
    run = parser.add_argument_group("run (how it is measured)")
    run.add_argument("--steps", type=positive_int, metavar="N", help="timed steps (default: 30 on a GPU, 10 on a CPU)")
    run.add_argument(
        "--warmup", type=positive_int, metavar="N", help="untimed steps before them (default: 5 on a GPU, 3 on a CPU)"
    )
    run.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N (default: auto)")
    run.add_argument(
        "--amp-dtype",
        choices=["auto", "bf16", "fp16", "fp32"],
        default="auto",
        help="mixed precision; auto is bf16 where the hardware multiplies it, else fp16 on a GPU and fp32 on a CPU "
        "(default: auto)",
    )
    run.add_argument(
        "--profile",
        action="store_true",
        help="profile untimed steps afterwards: kernel table on stderr, Chrome trace beside the record",
    )
    run.add_argument(
        "--output", type=Path, metavar="FILE", help=f"the JSON record (default: results/{script.stem}.json)"
    )
    return parser


def _describe_preset(preset: Preset) -> str:
    return f"{describe_shape(asdict(preset.config) | {'batch_size': preset.batch_size})}, lr {preset.lr:g}"


def parse_args(script: Path, description: str | None, argv: list[str] | None = None) -> Arguments:
    """Read and check the command line. Anything wrong prints one line and exits with code 2."""
    parser = build_parser(script, description)
    given = parser.parse_args(argv)
    try:
        device = hardware.resolve_device(given.device)
        amp_dtype, amp_note = hardware.resolve_amp_dtype(given.amp_dtype, device)
        preset, batch_size, notes = _resolve_preset(given.preset, device)
        config = _override_shape(PRESETS[preset].config, given)
        text = data.read_text(given.data)
        data.check_text(text, config.seq_len, config.vocab_size)
        output = given.output or ROOT / "results" / f"{script.stem}.json"
        check_writable(output, "steps", "copy_bytes_per_s")
    except torch.OutOfMemoryError:
        parser.error(f"--device {given.device} has no free memory left for even one tensor")
    except ValueError as error:
        parser.error(str(error))
    gpu = device.type == "cuda"
    return Arguments(
        script=script,
        preset_given=preset,
        config=config,
        batch_size=given.batch_size or batch_size,
        steps=given.steps or (30 if gpu else 10),
        warmup=given.warmup or (5 if gpu else 3),
        lr=given.lr or PRESETS[preset].lr,
        seed=given.seed,
        text=text,
        device=device,
        amp_dtype=amp_dtype,
        amp_note=amp_note,
        profile=given.profile,
        output=output,
        notes=notes,
    )


def _resolve_preset(name: str, device: torch.device) -> tuple[str, int, tuple[str, ...]]:
    """Preset, batch size, and header lines that say why `auto` chose them."""
    if name != "auto":
        return name, PRESETS[name].batch_size, ()
    if device.type == "cpu":
        return "tiny", PRESETS["tiny"].batch_size, ("auto: preset tiny, because this runs on a CPU",)
    free_gib = hardware.free_memory_bytes(device) / 2**30
    if free_gib >= AUTO_SLICE_GIB:
        preset, batch_size = "gpt3-6.7b-slice", PRESETS["gpt3-6.7b-slice"].batch_size
    else:
        base, per_sequence = AUTO_GPT2_GIB
        fitting = max(1.0, (free_gib - base) / per_sequence)
        preset, batch_size = "gpt2", min(PRESETS["gpt2"].batch_size, 2 ** int(math.log2(fitting)))
    why = f"auto: preset {preset}, batch {batch_size}, because {free_gib:.0f} GiB are free on {device}"
    return preset, batch_size, (why,)


def _override_shape(config: GPTConfig, given: argparse.Namespace) -> GPTConfig:
    fields = {field: getattr(given, field) for field in asdict(config)}
    config = replace(config, **{field: value for field, value in fields.items() if value is not None})
    if config.n_embd % config.n_head:
        raise ValueError(f"--n-embd {config.n_embd} is not divisible by --n-head {config.n_head}")
    return config


# --- one run --------------------------------------------------------------------------------------


def launch(main: Callable[[Arguments], dict]) -> None:
    """Parse the command line of the script that holds `main`, run it, write its record, and exit.

    Exit codes: 0 for ok and skipped, 2 for bad arguments or input, 130 for Ctrl-C, 1 otherwise.
    """
    module = sys.modules[main.__module__]
    args = parse_args(Path(module.__file__), module.__doc__)
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    print_header(args)
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)  # libraries that ask for "cuda" get this one
    try:
        record = main(args)
    except KeyboardInterrupt:
        print(f"{args.step}: interrupted, nothing written", file=sys.stderr)
        sys.exit(130)
    except Exception as error:  # the row must say what happened, whatever happened
        record = step_record(args, **explain(error, args))
        if record["status"] == "failed" and not isinstance(error, FloatingPointError):
            traceback.print_exc()
    envelope = {
        "schema_version": SCHEMA_VERSION,
        "command": command_line(args),
        "started_at": started_at,
        "environment": hardware.describe(args.device),
        "workload": workload(args),
        "roofs": None,
        "steps": [record],
    }
    try:
        try:
            write_json(args.output, envelope)
        except OSError:  # a full disk: the record is worth more than the trace
            profile.chrome_trace_path(args.output).unlink(missing_ok=True)
            write_json(args.output, envelope)
    except OSError as error:
        sys.exit(f"{args.step}: error: cannot write {args.output}: {error.strerror or error}")
    if record["profile"]:
        say(profile.kernel_table(record["profile"]), sys.stderr)
    say(result_line(record))
    sys.exit(0 if record["status"] in ("ok", "skipped") else 1)


def run(
    train_step: TrainStep,
    model: torch.nn.Module,
    args: Arguments,
    *,
    prime_without: torch.optim.Optimizer | None = None,
    note: str | None = None,
    **settings,
) -> dict:
    """Warm up, time `args.steps` training steps, observe untimed ones, and return the step record.

    Args:
        train_step: takes tokens and targets, each (B, T) int64 on the device; trains; returns the loss.
        model: only its training mode is touched.
        prime_without: an optimizer that rests while the batches of the warm-up pass through `train_step` once more,
            before the first step (`prime`); counts as warm-up time.
        note: one line that qualifies the row.
        settings: what the observed step cannot show, for the record's `settings`.

    Raises FloatingPointError when a loss is not finite, and whatever `train_step` raises.
    """
    model.train()
    # One more batch than is trained on for the record: the untimed steps that observe use it.
    drawn = data.read_batches(args.text, batch_starts(args), args.config.seq_len)
    *batches, spare = data.stage_batches(drawn, args.device)
    progress = Progress(args)

    losses = []
    started = time.perf_counter()
    if prime_without is not None:
        prime(train_step, batches[: args.warmup], prime_without)
    for k in range(args.warmup):
        progress.show("warm-up", k, args.warmup)
        losses.append(train_step(*batches[k]).detach().clone())
    synchronize(args.device)
    warmup_s = time.perf_counter() - started

    timed = time_steps_cuda if args.device.type == "cuda" else time_steps_cpu
    step_ms, timed_losses, measured = timed(train_step, batches[args.warmup :], args.device, progress)
    progress.clear()
    loss = [value.item() for value in losses + timed_losses]
    bad = next((k for k, value in enumerate(loss) if not math.isfinite(value)), None)
    if bad is not None:
        raise FloatingPointError(f"loss is {loss[bad]} at training step {bad}: lower --lr (now {args.lr:g})")

    median_ms = statistics.median(step_ms)
    observed, profile_note = observe(lambda: train_step(*spare), model, median_ms, args)
    notes = [note or _precision_note(observed["settings"], args), hardware.cudnn_note(args.device), profile_note]
    observed["settings"] |= settings
    p25_ms, _, p75_ms = statistics.quantiles(step_ms, method="inclusive") if len(step_ms) > 1 else step_ms * 3
    work = workload(args)
    return step_record(
        args,
        status="ok",
        note="; ".join(filter(None, notes)) or None,
        timing={"warmup_s": warmup_s, "step_ms": step_ms, "median_ms": median_ms, "p25_ms": p25_ms, "p75_ms": p75_ms},
        tokens_per_s=work["tokens_per_step"] / median_ms * 1e3,
        model_flops_per_s=work["flops_per_step"] / median_ms * 1e3,
        loss=loss,
        bytes_per_step={"value": flops.least_bytes_per_step(args.config, args.batch_size), "source": "analytic"},
        **measured,
        **observed,
    )


def prime(train_step: TrainStep, batches: list, optimizer: torch.optim.Optimizer) -> None:
    """Pass `batches` through `train_step` while `optimizer.step` does nothing.

    What modules keep from one pass to the next, as scales of activations, is filled, and so is a gradient scaler's
    state; no parameter and no state of the optimizer has changed.
    """
    update, optimizer.step = optimizer.step, lambda *_, **__: None
    try:
        for batch in batches:
            train_step(*batch)
    finally:
        optimizer.step = update


def time_steps_cuda(train_step: TrainStep, batches: list, device: torch.device, progress: Progress):
    """Milliseconds of each step between CUDA events, losses, and memory and clocks.

    Consecutive steps share an event, so a gap in which the GPU waits for the host is counted. The
    host never waits in the loop: one synchronize at the end.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    losses = []
    torch.cuda.reset_peak_memory_stats(device)
    events[0].record()
    for k, batch in enumerate(batches):
        progress.show("timed", k, len(batches))
        losses.append(train_step(*batch).detach().clone())
        events[k + 1].record()
    gpu_state = hardware.gpu_state(device)
    if gpu_state is not None:  # clocks of the steps only if steps were still queued when they were read
        gpu_state["while_running"] = not events[-1].query()
    torch.cuda.synchronize(device)
    step_ms = [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    measured = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "gpu_state": gpu_state,
    }
    return step_ms, losses, measured


def time_steps_cpu(train_step: TrainStep, batches: list, device: torch.device, progress: Progress):
    """Milliseconds of each step on the host's clock, and losses."""
    step_ms, losses = [], []
    for k, batch in enumerate(batches):
        progress.show("timed", k, len(batches))
        started = time.perf_counter()
        loss = train_step(*batch)
        step_ms.append((time.perf_counter() - started) * 1e3)
        losses.append(loss.detach().clone())
    return step_ms, losses, {}


def observe(
    step: Callable[[], torch.Tensor], model: torch.nn.Module, median_ms: float, args: Arguments
) -> tuple[dict, str | None]:
    """`settings`, `host_syncs` and, where asked for, `profile`, of untimed steps; and a note on the profile.

    A profiler that fails costs what it would have shown, not the row.
    """
    observed = {"settings": {"float32_matmul_precision": torch.get_float32_matmul_precision()}}
    observed["host_syncs"] = profile.count_host_syncs(step) if args.device.type == "cuda" else None
    try:
        trace = profile.trace_step(step, args.device)
        observed["settings"] |= profile.observed_settings(trace)
    except Exception as error:  # whatever breaks in the profiler, the measured row stands
        observed["settings"]["unobserved"] = one_line(error)
        return observed, f"not profiled: {one_line(error)}" if args.profile else None
    if not args.profile:
        return observed, None
    notes = []
    try:
        profile.write_chrome_trace(trace, profile.chrome_trace_path(args.output))
    except OSError as error:
        notes.append(f"no Chrome trace: {error.strerror or error}")
    try:
        observed["profile"] = profile_step(step, model, median_ms, args) | {"host_syncs": observed["host_syncs"]}
    except Exception as error:
        return observed, f"not profiled: {one_line(error)}"
    return observed, "; ".join(notes) or None


def profile_step(step: Callable[[], torch.Tensor], model: torch.nn.Module, median_ms: float, args: Arguments) -> dict:
    """The record's `profile`, of PROFILED_STEPS steps."""
    found = {"bound_by": None, "shares": None}
    if args.device.type == "cuda":
        found |= profile.profile_cuda(step, PROFILED_STEPS, median_ms, args.device)
        found["bound_by"], found["shares"] = profile.bound_by(found, median_ms)
    else:
        found |= profile.profile_cpu(step, PROFILED_STEPS)
    try:
        nodes = profile.attention_autograd_nodes(model, step)
    except (RuntimeError, AttributeError):  # a backward graph that cannot be walked: the times stand
        nodes = None
    return found | {"autograd_nodes_attention": nodes}


def _precision_note(settings: dict, args: Arguments) -> str | None:
    # A script that allows less than FP32 but was given none of it says why; one that asks for
    # "highest" never wanted less.
    allowed = settings["float32_matmul_precision"] != "highest"
    return args.amp_note if allowed and settings.get("amp_dtype") == "float32" else None


def explain(error: Exception, args: Arguments) -> dict:
    """`status` and a one-line `reason` that says what to do, for an exception of a training script."""
    if isinstance(error, Skip):
        return {"status": "skipped", "reason": one_line(error)}
    if out_of_memory(error):
        return {"status": "oom", "reason": f"out of memory: {smaller_batch(args.batch_size)}"}
    return {"status": "failed", "reason": missing_tool(error) or one_line(error)}


def out_of_memory(error: BaseException) -> bool:
    """Whether device or host had too little memory, whichever library says so."""
    everything = f"{type(error).__name__} {error}".lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        sign in everything
        for sign in (
            "out of memory",
            "can't allocate memory",
            "alloc_failed",
            "array is too big",
            "maximum allowed dimension",
            "storage size calculation overflowed",
        )
    )


def missing_tool(error: BaseException) -> str | None:
    """What to install where torch.compile misses something, as one line; None for any other error."""
    everything = f"{type(error).__name__} {error}".lower()
    if any(sign in everything for sign in ("invalidcxxcompiler", "no working c++ compiler", "failed to find c comp")):
        return "torch.compile found no working C++ compiler: install one (Debian, Ubuntu: apt-get install g++)"
    if any(sign in everything for sign in ("tritonmissing", "working triton installation", "no module named 'triton")):
        return "torch.compile found no working Triton: pip install triton, in the version this torch names"
    if "python.h: no such file" in everything:
        return "torch.compile needs Python's headers (Debian, Ubuntu: apt-get install python3-dev)"
    return None


def one_line(error: BaseException) -> str:
    """First line of an exception's message, at most 300 characters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the record -----------------------------------------------------------------------------------


def batch_starts(args: Arguments):
    """Batches of the warm-up and the timed steps, and one spare for the untimed steps after them."""
    n_batches = args.warmup + args.steps + 1
    return data.draw_starts(args.text, n_batches, args.batch_size, args.config.seq_len, args.seed)


def workload(args: Arguments) -> dict:
    """The record's `workload`: two runs did the same work, in whatever precision, if and only if theirs are equal."""
    return {
        "preset": args.preset,
        **asdict(args.config),
        "batch_size": args.batch_size,
        "parameters": flops.parameters(args.config),
        "tokens_per_step": args.batch_size * args.config.seq_len,
        "flops_per_step": flops.flops_per_step(args.config, args.batch_size),
        "data": {
            "name": args.text.name,
            "tokens": len(args.text.tokens),
            "batches_sha256": _fingerprint(args),
        },
        "seed": args.seed,
        "lr": args.lr,
        "warmup": args.warmup,
        "steps": args.steps,
    }


def _fingerprint(args: Arguments) -> str | None:
    try:
        return data.fingerprint(args.text, batch_starts(args), args.config.seq_len)
    except (MemoryError, ValueError):  # a batch that large ends as an oom row, which needs its workload
        return None


def step_record(args: Arguments, **fields) -> dict:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    record = empty_step_record(args.step, args.script.read_text())
    return record | {"peak_rss_bytes": peak_rss_bytes} | fields


def command_line(args: Arguments) -> str:
    """The command to run again: without --output, without the folders of this machine."""
    words, given = [args.script.name], iter(sys.argv[1:])
    for word in given:
        name, _, value = word.partition("=")
        if name == "--profile":  # the only one without a value
            words.append(name)
            continue
        value = value or next(given, "")
        if name != "--output":
            words += [name, Path(value).name if Path(value).is_absolute() else value]
    return shlex.join(["python", *words])


# --- what a person sees ---------------------------------------------------------------------------


class Progress:
    """One rewritten line on stderr; silent where stderr is not a terminal. Never touches the device."""

    def __init__(self, args: Arguments):
        self.step = args.step
        self.enabled = sys.stderr.isatty()

    def show(self, phase: str, done: int, total: int) -> None:
        if self.enabled:
            print(f"\r\033[K{self.step}: {phase} {done + 1}/{total}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.enabled:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_header(args: Arguments) -> None:
    config = args.config
    amp = str(args.amp_dtype).removeprefix("torch.")
    lines = [
        f"{args.step} on {hardware.device_name(args.device)}, torch {torch.__version__}",
        f"shape: {args.preset}: {describe_shape(asdict(config) | {'batch_size': args.batch_size})}, "
        f"{flops.parameters(config) / 1e6:.1f} M parameters",
        f"text: {args.text.name}, {len(args.text.tokens):,} tokens",
        f"mixed precision, where the step uses it: {amp}" + (f" ({args.amp_note})" if args.amp_note else ""),
        *args.notes,
    ]
    say("\n".join(lines))


def say(text: str, stream: TextIO | None = None) -> None:
    """Print to a reader who may have left (`| head`): the run and its record do not depend on them."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def result_line(record: dict) -> str:
    """One line for a person: what ran, and how fast."""
    if record["status"] != "ok":
        return f"{record['step']}: {record['status']}: {record['reason']}"
    timing, settings, loss = record["timing"], record["settings"], record["loss"]
    ran = ", ".join(f"{name} {value}" for name, value in settings.items() if value not in (None, False))
    memory = record["peak_allocated_bytes"] or record["peak_rss_bytes"]
    line = (
        f"ran: {ran}\n{record['step']}: {timing['median_ms']:.1f} ms/step "
        f"(p25-p75 {timing['p25_ms']:.1f}-{timing['p75_ms']:.1f}), {record['tokens_per_s']:,.0f} tokens/s, "
        f"{record['model_flops_per_s'] / 1e12:.3g} model TFLOP/s, peak {memory / 2**30:.1f} GiB, "
        f"warm-up {timing['warmup_s']:.1f} s, loss {loss[0]:.3f} -> {loss[-1]:.3f}"
    )
    notes = filter(None, [record["note"], analysis.describe_profile_off(record)])
    return "\n".join([*(f"note: {note}" for note in notes), line])


if __name__ == "__main__":
    # run_all.sh checks its arguments once, before any row; what `auto` chose it pins for every row.
    checked = parse_args(ROOT / "run_all.sh", "Runs the five steps and tabulates them.")
    if checked.notes:
        print(*checked.notes, sep="\n", file=sys.stderr)
        print("--preset", checked.preset_given, "--batch-size", checked.batch_size, sep="\n")
