"""One run of a step: warm-up, training, timing, what untimed steps show, and the record.

A script ends with `benchmark.launch(main)`. Its `main(args)` builds a model and an optimizer and returns
`benchmark.run(train_step, model, args)`.
"""

from __future__ import annotations

import datetime
import math
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from common import data, flops, hardware, memory, parallel, profile, timing
from common.arguments import Arguments, parse_args
from common.cuda_graph import CapturedStep
from common.errors import Skip, explain, optional
from common.record import LeastBytes, Row, Run, Timing, describe_shape, write_run
from common.text import PROGRESS_FD, Progress, one_line, portable_command, say

__all__ = ["launch", "optional", "run"]

PROFILED_STEPS = 3
MOST_TIMED = 100  # of the steps of a GPU: a study of losses trains more


def launch(main: Callable[[Arguments], Row]) -> None:
    """Parse the command line of the script that holds `main`, run it, write its record, and exit.

    Exit codes: 0 for ok and skipped, 2 for bad arguments or input, 130 for Ctrl-C, 1 otherwise.
    """
    module = sys.modules[main.__module__]
    try:
        args = parse_args(Path(module.__file__), module.__doc__)
        code = run_and_record(main, args)
        if args.world.size > 1:
            parallel.leave(code, args)
        sys.exit(code)
    except KeyboardInterrupt:
        sys.stderr.write(f"{Path(module.__file__).stem}: interrupted, nothing written\n")
        sys.exit(130)


def run_and_record(main: Callable[[Arguments], Row], args: Arguments) -> int:
    """Run a script's `main`, write its record, say what came of it; returns the exit code.

    Of several processes the first one writes, or the one that failed.
    """
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    writes = args.world.rank == 0
    if writes:
        say(header(args))
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)  # libraries that ask for "cuda" get this one
    try:
        parallel.start(args)
        row = main(args)
    except Exception as error:  # whatever happened, the row must say it
        row, of_all = failed_row(error, args), isinstance(error, (Skip, FloatingPointError))
        if row.status == "failed" and not of_all:
            traceback.print_exc()
        if args.world.size > 1 and not of_all:
            if parallel.is_loss_of_others(error):
                parallel.leave(1, args, error)
            row.reason, writes = f"rank {args.world.rank}: {row.reason}", True
    if not writes:
        return 0
    command = portable_command(["python", args.script.name, *sys.argv[1:]])
    record = Run(command, started_at, hardware.describe(args.device), args.workload(), steps=[row])
    try:
        write_run(args.output, record)
    except OSError as error:
        say(result_lines(row))
        say(f"{args.step}: failed: cannot write {args.output}: {error.strerror or error}")
        return 1
    if row.profile:
        try:
            say(profile.kernel_table(row.profile), sys.stderr)
        except ImportError:
            say("the kernel table needs tabulate: pip install tabulate", sys.stderr)
    if PROGRESS_FD not in os.environ:  # the ladder shows where its records are
        say(f"record: {args.output}")
    say(result_lines(row))
    return 0 if row.status in ("ok", "skipped") else 1


def failed_row(error: Exception, args: Arguments) -> Row:
    """The row of a script whose `main` raised."""
    status, reason = explain(error, args.batch_size)
    if status == "oom" and (held := hardware.held_by_others_bytes(args.device)) > 2 * 2**30:
        reason = f"out of memory: other processes hold {held / 2**30:.0f} GiB of {args.device}"
    return new_row(args, status=status, reason=reason)


def run(
    train_step: timing.TrainStep,
    model: torch.nn.Module,
    args: Arguments,
    rehearse: torch.optim.Optimizer | None = None,
    note: str | None = None,
    fp8_recipe: str | None = None,
    head: str = "FP8",
) -> Row:
    """Warm up, train and time `args.steps` steps, observe untimed ones, and return the row.

    `train_step` takes tokens and targets, each (B, T) int64 on the device; it trains and returns the loss. `model`
    takes the same and only returns the loss. `rehearse` is an optimizer whose updates are left out in a `rehearsal`
    before the first step; it counts as warm-up. `note` qualifies the row in one line, `fp8_recipe` is the repr of the
    recipe, `head` the format of the head beside it. `args.quick` times the trained steps, also on a GPU, and observes
    no more than the profile. Raises FloatingPointError, and whatever `train_step` raises.
    """
    parallel.require_distributed(model, args)
    model.train()
    drawn = data.read_batches(args.text, args.batch_starts(), args.config.seq_len)
    *batches, spare = data.stage_batches(drawn, args.device)
    progress, on_gpu = Progress(args.step, args.world.rank, args.world.size), args.device.type == "cuda"
    losses, warmup_s = warm_up(train_step, batches[: args.warmup], rehearse, args.device, progress)
    row, trained = new_row(args, status="ok"), batches[args.warmup :]
    before = timing.reference_work(args.device)
    warmup_s += begin_counting(train_step, batches[0], args.device)
    time_steps, settles = partial(timing.time_slowest, args, train_step, progress), on_gpu and not args.quick
    step_ms, trained_losses = time_steps(trained, "training" if settles else "timed", row=row)
    row.loss = mean_losses(losses + trained_losses, args)
    if on_gpu:
        set_peak_memory(row, args)
    row.heldout_loss = None if args.quick else heldout_loss(model, args)
    if settles:  # until here the GPU has warmed up and its clock has fallen: those steps show the losses only
        row.timing.settling_s = timing.settle(time_steps, trained, statistics.median(step_ms))
        step_ms, timed_losses = time_steps(trained[:MOST_TIMED], "timed", row=row)
        mean_losses(timed_losses, args, "timed")
    set_timing(row, step_ms, warmup_s, args)
    if settles:
        timing.measure_energy(time_steps, trained, row, args)
    row.reference_ms = timing.around(before, timing.reference_work(args.device))
    progress.show("observing", 0, 1)
    observed = observe(train_step, spare, model, args, row)
    progress.clear()
    asked = isinstance(train_step, CapturedStep)
    row.settings.checkpointed, row.settings.head = parallel.is_checkpointed(model), head if fp8_recipe else None
    row.settings.captured, row.settings.fp8_recipe = asked and train_step.reason is None, fp8_recipe
    notes = [note, hardware.cudnn_note(args.device), observed, train_step.reason if asked and on_gpu else None]
    row.note = joined([*notes, None if note else precision_note(row, args)])
    row.peak_rss_bytes = peak_rss_bytes()
    return row


def precision_note(row: Row, args: Arguments) -> str | None:
    """Why a script that allows less than FP32 got none of it, where it did not."""
    allows = row.settings.float32_matmul_precision != "highest"
    return args.amp_note if allows and row.settings.amp_dtype == "float32" else None


def joined(notes: list[str | None]) -> str | None:
    """One line of those notes that say something."""
    return "; ".join(filter(None, notes)) or None


def warm_up(train_step: timing.TrainStep, batches: list, rehearse, device: torch.device, progress: Progress):
    """Launched steps until everything is compiled and tuned. Losses, and seconds that it took."""
    losses, started = [], time.perf_counter()
    if rehearse is not None:
        rehearsal(train_step, batches, rehearse)
    for k, batch in enumerate(batches):
        progress.show("warm-up", k, len(batches))
        losses.append(train_step(*batch).detach().clone())
    hardware.synchronize(device)
    return losses, time.perf_counter() - started


def begin_counting(train_step: timing.TrainStep, batch: tuple, device: torch.device) -> float:
    """Capture a step that asked for it; its memory, or from now on that of launched steps, is counted. Seconds."""
    started = time.perf_counter()
    if isinstance(train_step, CapturedStep) and train_step.reason is None:
        train_step.record(*batch)
    elif device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    hardware.synchronize(device)
    return time.perf_counter() - started


def rehearsal(train_step: timing.TrainStep, batches: list, optimizer: torch.optim.Optimizer) -> None:
    """Pass `batches` through `train_step` without updating any weight: `optimizer.step` does nothing meanwhile.

    Scales that a module derives from earlier passes (FP8's delayed scaling) are then known at the first real step.
    """
    update, optimizer.step = optimizer.step, lambda *_, **__: None
    try:
        for batch in batches:
            train_step(*batch)
    finally:
        optimizer.step = update


def mean_losses(losses: list[torch.Tensor], args: Arguments, phase: str = "training") -> list[float]:
    """Losses over all processes. Raises FloatingPointError, one line, for the first that is not a finite number."""
    means = parallel.mean([loss.item() for loss in losses], args)
    for k, loss in enumerate(means):
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at {phase} step {k}: lower --lr (now {args.lr:g})")
    return means


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, args: Arguments) -> float | None:
    """Mean loss in nats on the held-out part of the text; None where the text has none.

    It tells how good the weights are that a step trained: the row's own forward alone, one sequence at a time, under
    mixed precision where the machine has it, without FP8, nothing compiled.
    """
    starts, losses = data.heldout_starts(args.text, args.config.seq_len), []
    if not len(starts):
        return None
    amp = torch.autocast(args.device.type, args.amp_dtype, enabled=args.mixed_precision)
    with amp, torch.compiler.set_stance("force_eager"):
        for batch in data.stage_batches(data.read_batches(args.text, starts, args.config.seq_len), args.device):
            losses.append(model(*batch))
    return torch.stack(losses).double().mean().item()


def set_timing(row: Row, step_ms: list[float], warmup_s: float, args: Arguments) -> None:
    """Median and quartiles of the timed steps, and what follows from the median."""
    p25, median, p75 = statistics.quantiles(step_ms, method="inclusive") if len(step_ms) > 1 else step_ms * 3
    row.timing = Timing(warmup_s, step_ms, median, p25, p75, row.timing.settling_s)
    row.tokens_per_s = args.world.size * args.batch_size * args.config.seq_len / median * 1e3
    row.model_flops_per_s = flops.flops_per_step(args.config, args.batch_size) / median * 1e3
    row.bytes_per_step = LeastBytes(flops.least_bytes_per_step(args.config, args.batch_size))


def set_peak_memory(row: Row, args: Arguments) -> None:
    """What CUDA's allocator held at most, in the process where that is the most."""
    (peak,) = parallel.largest([torch.cuda.max_memory_allocated(args.device)], args)
    row.peak_allocated_bytes = int(peak)


def observe(
    train_step: timing.TrainStep, batch: tuple, model: torch.nn.Module, args: Arguments, row: Row
) -> str | None:
    """Fill in `row` what untimed steps show: settings, host waits and, with --profile, the profile. Returns a note.

    Kernels, gaps and times are those of the timed step. Operators, host waits and backward nodes are those of a
    launched one: a replay has none. A profiler that fails costs what it would have shown, not the row.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's stages on stderr tell a reader nothing
    notes, step = [], partial(train_step, *batch)
    if args.profile:
        try:
            if args.device.type == "cuda":
                row.profile = profile.profile_cuda(step, PROFILED_STEPS, row.timing.median_ms, args.device)
            else:
                row.profile = profile.profile_cpu(step, PROFILED_STEPS)
        except Exception as error:  # whatever breaks in the profiler
            notes.append(f"not profiled: {one_line(error)}")
    if args.quick:
        row.settings.unobserved = "--quick"
        return joined(notes)
    if isinstance(train_step, CapturedStep):
        train_step.release()
        step = partial(train_step.launch, *batch)
    try:
        if args.device.type == "cuda":
            row.host_syncs = profile.count_host_syncs(step)
        trace = profile.trace_step(step, args.device)
        row.settings = profile.observed_settings(trace)
        nodes = profile.attention_autograd_nodes(model, step) if args.profile else None  # every process runs the step
        if row.profile:
            row.profile.autograd_nodes_attention = nodes
            if args.world.rank == 0:
                profile.write_chrome_trace(trace, args.output.with_suffix(".trace.json.gz"))
    except OSError as error:
        notes.append(f"no Chrome trace: {error.strerror or error}")
    except Exception as error:
        row.settings.float32_matmul_precision = torch.get_float32_matmul_precision()
        row.settings.unobserved = one_line(error)
        notes += [f"not observed: {one_line(error)}"] if args.profile else []
    if args.profile and args.device.type == "cuda":
        try:
            row.memory = memory.trace_memory(step, model, args.device)
        except Exception as error:  # whatever breaks in the allocator's history, or out of memory
            notes.append(f"memory over time was not traced: {one_line(error)}")
    return joined(notes)


def new_row(args: Arguments, **fields) -> Row:
    return Row(args.step, args.script.read_text(), peak_rss_bytes=peak_rss_bytes(), **fields)


def peak_rss_bytes() -> int:
    """The most host memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def header(args: Arguments) -> str:
    """What is about to run, for a person."""
    shape = describe_shape(SimpleNamespace(**vars(args.config), batch_size=args.batch_size))
    millions = flops.parameters(args.config) / 1e6
    amp = str(args.amp_dtype).removeprefix("torch.") + (f" ({args.amp_note})" if args.amp_note else "")
    lines = [
        f"{args.step} on {hardware.device_name(args.device)}, torch {torch.__version__}",
        f"shape: {args.preset}: {shape}, {millions:.1f} M parameters",
        f"text: {one_line(args.text.name)}, {len(args.text.tokens):,} tokens",
        f"mixed precision, where the step uses it: {amp}",
    ]
    if args.parallel:
        lines.append(f"processes: {args.world.size}, each with a batch of its own ({args.parallel})")
    return "\n".join([*lines, *args.notes])


def result_lines(row: Row) -> str:
    """What ran and how fast, for a person; the last line is the result."""
    if row.status != "ok":
        return f"{row.step}: {row.status}: {row.reason}"
    times, memory = row.timing, row.peak_allocated_bytes or row.peak_rss_bytes
    ran = ", ".join(f"{name} {value}" for name, value in vars(row.settings).items() if value not in (None, False))
    return (f"note: {row.note}\n" if row.note else "") + (
        f"ran: {ran}\n{row.step}: {times.median_ms:.1f} ms/step (p25-p75 {times.p25_ms:.1f}-{times.p75_ms:.1f}), "
        f"{row.tokens_per_s:,.0f} tokens/s, {row.model_flops_per_s / 1e12:.3g} model TFLOP/s, "
        f"peak {memory / 2**30:.1f} GiB, warm-up {times.warmup_s:.1f} s, loss {row.loss[0]:.3f} -> {row.loss[-1]:.3f}"
    )
