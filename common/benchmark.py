"""One run of a step: rehearsal, training, timing, what untimed steps show, and the record."""

import contextlib
import datetime
import importlib
import math
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from common import data, fingerprint, hardware, parallel, profile, proof, rehearsal, timing
from common.arguments import Arguments, Measurement, parse_args
from common.record import Row, Run, in_means, read_object, write_json
from common.text import Skip, one_line, progress, say

STEPS_TO_FIT_SCALES = 4  # of FP8, before gradients are sketched: each cuts off less than the one before

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")  # what libraries say of it

MISSING = {  # what libraries say of what is not installed, and what to do
    "python.h": "torch.compile lacks the headers of Python: install them (Debian, Ubuntu: python3-dev)",
    "c++ compiler": "torch.compile lacks a C++ compiler: install one (Debian, Ubuntu: g++)",
    "c compiler": "torch.compile lacks a C compiler: install one (Debian, Ubuntu: gcc)",
}


def import_or_skip(module: str, package: str | None = None) -> ModuleType:
    """A module, or an empty one of which any use raises Skip with the reason and the line that installs
    `package`: one that does not fit this torch or CUDA can fail in any way on import."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        advice = f': pip install --no-build-isolation "{package}"' if package else ""
        reason = f"{module.partition('.')[0]} does not import ({one_line(error, 150)}){advice}"

    def skip(name: str):
        raise Skip(reason)

    missing = ModuleType(module)
    missing.__getattr__ = skip
    return missing


def launch(main: Callable[[Arguments], tuple]) -> None:
    """Parse the command line of the script that holds `main`, and run and record it: see `run_as_process`.

    `main` returns `train_step, model, optimizer`, and where its step can be a CUDA graph also `capture`.
    `train_step(tokens, targets)`, each (B, T) int64 on the device, trains and returns the loss, detached.
    `model` takes the same and returns only the loss. `capture` takes the same and returns a `replay`, which
    does what `train_step` does. On a GPU all of it runs on one stream that is not the default one.
    """
    module = sys.modules[main.__module__]
    script = Path(module.__file__)
    run_as_process(lambda: run_and_record(main, parse_args(script, module.__doc__)), script.stem)


def run_as_process(work: Callable[[], int], name: str) -> None:
    """Do the work of a process that ends with it. Exit codes: what `work` returns, which is 0 for rows that
    are ok or skipped and otherwise 1; 2 for bad arguments, 130 for Ctrl-C."""
    try:
        code = work()
    except KeyboardInterrupt:
        say(f"{name}: interrupted, nothing written", sys.stderr)
        code = 130
    except SystemExit as error:  # a number of a parser, which has told why; or a text
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            say(error.code, sys.stderr)
    except (ImportError, OSError) as error:
        say(f"{name}: error: {one_line(error)}", sys.stderr)
        code = 1
    if torch.distributed.is_initialized() and code == 0:
        torch.distributed.destroy_process_group()
    watched = sys.gettrace() or sys.getprofile() or "coverage" in sys.modules
    if watched or "CUDA_INJECTION64_PATH" in os.environ:  # a profiler writes its results at the end
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        say("", stream, end="")  # flushes it
    os._exit(code)  # the interpreter's teardown takes seconds once torch has compiled


def run_and_record(main: Callable, args: Measurement) -> int:
    """Run a script's `main`, write its record, print what came of it; returns the exit code. Of several
    processes the first one writes, or the one that failed."""
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    row, writes = Row(args.name, source=args.source, changes=args.changes), args.rank == 0
    if args.source is not None:
        row.code_sha256 = fingerprint.row_sha256(args.source, hardware.ROOT)
    samples: dict = {}
    before = read_object(args.output)
    if writes:
        say(header(args))
    try:
        samples = run(main, args, row)
    except Exception as error:  # whatever happened, the row must hold it
        row.status, row.reason = explain(error)
        in_all_processes = isinstance(error, (Skip, FloatingPointError))
        if row.status == "failed" and not isinstance(error, FloatingPointError):
            say(traceback.format_exc(), sys.stderr, end="")
        if args.processes > 1 and not in_all_processes:
            # The cause is in the record of the process that failed first: the others lost it.
            row.reason = f"rank {args.rank}: {row.reason}"
            writes = read_object(args.output) == before
    progress("")
    if args.rank and not args.local_rank:
        say(f"{args.name}: the record is on the machine of rank 0")
    if writes:
        kept = in_means(row) if args.heldout_every else row
        record = Run(args.command(), started_at, hardware.describe(args.device), args.workload(), [kept])
        try:
            proof.write(samples, args.output)
            write_json(args.output, record)
        except OSError as error:
            row.status, row.reason = "failed", f"cannot write {args.output.parent}: {error.strerror or error}"
        say(result_lines(row, args))
    return int(row.status not in ("ok", "skipped"))


def run(main: Callable, args: Measurement, row: Row) -> dict:
    """Rehearse, train and time at least `args.steps` steps, observe untimed ones: all into `row`. Returns
    samples for the proof.

    Raises what the script raises, and FloatingPointError, one line, for a loss that is not finite.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's stages on stderr tell a reader nothing
    importlib.import_module("torch._dynamo")  # AdamW would: it is no part of the overhead
    began = time.perf_counter()
    progress("building the model")
    parallel.start(args)
    train_step, model, optimizer, *capture = main(args)
    model.train()
    *batches, spare = args.batches()
    capture = capture[0] if capture else None
    changed = None if args.is_ours else model  # the ladder's buffers change in no step
    steps, initial = rehearsal.rehearse(train_step, optimizer, capture, batches, args, row, changed)
    if args.heldout_every:
        train_with_heldout(steps, model, args, row)
    steps_s = timing.time_steps(steps, row, args)
    keep_losses(steps.losses[: args.steps], args, row)
    peak_bytes = row.peak_bytes if args.device.type == "cuda" else process_peak_bytes()
    row.peak_bytes = int(*parallel.across([peak_bytes], "max", args))
    if args.profile:
        with noting(row, "not profiled"):
            median_ms = statistics.median(row.step_ms)
            row.profile = profile.profile_steps(partial(steps.train_step, *spare), median_ms, args.device)
    steps.train_step = train_step  # the graph is gone with its memory
    observe(train_step, spare, model, args, row)
    samples = {}
    if initial:
        in_fp8 = bool(row.settings.fp8_recipe)
        with noting(row, "gradients not sampled"):
            samples = samples_for_proof(train_step, optimizer, model, batches[0], initial, args, in_fp8)
    row.status = "ok"
    row.overhead_s = time.perf_counter() - began - row.warmup_s - steps_s
    return samples


def samples_for_proof(
    train_step: Callable,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    batch: tuple,
    initial: rehearsal.InitialState,
    args: Measurement,
    in_fp8: bool,
) -> dict:
    """Samples of a step from the initial weights, see common/proof.py. Of a model that is not ours they are
    of two passes, which its random numbers make differ."""
    model.train(args.is_ours)  # dropout of another model would draw other numbers in each row
    # FP8's scales fit the end of the training by now. At its start gradients may be several times larger, and
    # such scales would cut them off.
    for _ in range(STEPS_TO_FIT_SCALES if in_fp8 else 0):
        initial.restore()
        train_step(*batch)
    initial.restore()
    samples = proof.sample(train_step, optimizer, model, batch)
    if not args.is_ours:
        initial.restore()
        samples |= proof.renamed(proof.sample(train_step, optimizer, model, batch))
    return samples


def process_peak_bytes() -> int:
    """The most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_losses(losses: list[torch.Tensor], args: Measurement, row: Row) -> None:
    """The mean of each loss over all processes into `row`, up to one that is not finite: that raises
    FloatingPointError."""
    for k, loss in enumerate(parallel.across([loss.item() for loss in losses], "avg", args)):
        check_finite(loss, k, args)
        row.loss.append(loss)


def check_finite(loss: float, step: int, args: Measurement) -> None:
    if not math.isfinite(loss):
        rate = f"--lr (now {args.lr:g})" if args.lr else "the rate of your optimizer"
        raise FloatingPointError(f"loss is {loss} at training step {step}: lower {rate}")


@contextlib.contextmanager
def noting(row: Row, what: str) -> Iterator[None]:
    """An untimed observation that breaks costs what it would have shown, not the row: its note tells."""
    progress("observing")
    try:
        yield
    except Exception as error:
        row.note = "; ".join(filter(None, [row.note, f"{what}: {one_line(error)}"]))


def observe(train_step: Callable, batch: tuple, model: torch.nn.Module, args: Measurement, row: Row) -> None:
    """What the operators of an untimed step show: a launched one, since a replay has none."""
    captured = bool(row.settings.captured)
    with noting(row, "not observed"):
        row.settings = profile.observe(partial(train_step, *batch), model, args.device)
    row.settings.captured = captured
    if args.is_ours:
        with noting(row, "residual stream not observed"):
            small = few_sequences(batch)  # nothing is compiled, so a whole batch may need more memory
            row.settings.residual_dtype = profile.residual_dtype(partial(train_step, *small), model)
    notes = [row.note]
    if row.settings.float32_matmul_precision == "high" and not args.amp:
        notes.append(f"FP32, because this {args.device.type} does not multiply BF16")
    if args.cold:
        notes.append("trained without a rehearsal: --cold")
    row.note = "; ".join(filter(None, notes)) or None


def few_sequences(batch: tuple) -> tuple:
    """The first sequences of a batch of tensors (B, T), as few as have a number of tokens that FP8
    multiplies, see common/hardware.py."""
    most_fp8_unit = 32
    count = most_fp8_unit // math.gcd(most_fp8_unit, batch[0].shape[1])
    return tuple(tensor[:count] for tensor in batch)


def train_with_heldout(steps: timing.Steps, model: torch.nn.Module, args: Arguments, row: Row) -> None:
    """Train on until `args.steps` steps, and leave the held-out loss before, between and after them in `row`.
    With --cold, launched steps have been trained already.

    It shows how good the weights are: the row's own forward alone, one sequence at a time, under mixed
    precision where the machine has it, without FP8, nothing compiled.
    """
    starts = data.heldout_starts(args.text, args.config.seq_len)
    batches = data.stage_batches(args.text, starts, args.config.seq_len, args.device)
    amp = mixed_precision(args)
    for done in [*range(len(steps.losses), args.steps, args.heldout_every), args.steps]:
        for _ in steps.run(done - len(steps.losses), f"to the held-out loss of step {done}, training"):
            pass
        with torch.no_grad(), amp, torch.compiler.set_stance("force_eager"):
            loss = torch.stack([model(*batch) for batch in batches]).double().mean().item()
        if not math.isfinite(loss):
            keep_losses(steps.losses[: args.steps], args, row)
        check_finite(loss, len(steps.losses), args)
        row.heldout.append((len(steps.losses), loss))


def mixed_precision(args: Measurement) -> torch.autocast:
    """As the scripts have it, where the machine has it."""
    return torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp)


def explain(error: Exception) -> tuple[str, str]:
    """The status of a row that ended with `error`, and a one-line reason that tells what to do."""
    if isinstance(error, Skip):
        return "skipped", one_line(error)
    text = f"{type(error).__name__} {error}".lower()
    of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if of_memory or any(sign in text for sign in OUT_OF_MEMORY):
        return "oom", "out of memory: try a smaller batch size or sequence length"
    advice = next((advice for sign, advice in MISSING.items() if sign in text), None)
    return "failed", f"{advice} ({one_line(error, 150)})" if advice else one_line(error)


def header(args: Measurement) -> str:
    """What is about to run, for a person."""
    lines = [args.name, *hardware.about(args.device), *args.about()]
    if args.parallel:
        lines.append(f"{args.processes} processes, each with a batch of its own ({args.parallel})")
    return "\n".join(lines)


def result_lines(row: Row, args: Measurement) -> str:
    """What ran and how fast, for a person; the last line is the result."""
    if row.status != "ok":
        return f"{row.step}: {row.status}: {row.reason}"
    observed = [f"{name} {value}" for name, value in vars(row.settings).items() if value not in (None, False)]
    lines = [f"record: {args.output}"]
    if row.note:
        lines.append(f"note: {row.note}")
    lines.append(f"ran: {', '.join(observed)}")
    ms, work = statistics.median(row.step_ms), args.workload()
    lines.append(
        f"{row.step}: {ms:.1f} ms/step, {work.gpus * work.tokens_per_step / ms * 1e3:,.0f} {work.unit}/s, "
        f"{work.gpus * work.flops_per_step / ms / 1e9:.3g} model TFLOP/s, "
        f"peak {row.peak_bytes / 2**30:.1f} GiB, warm-up {row.warmup_s:.1f} s, "
        f"loss {row.loss[0]:.3f} in the first training step, {row.loss[-1]:.3f} in the last"
    )
    return "\n".join(lines)
