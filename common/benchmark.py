"""How a row is measured. `measure_row` is the order in which things happen; what it calls follows below it.

A row is one script in one process. Every row trains from the same weights on the same batches, which lie on
the device. Its time is the median of training steps that run one after the other, while the host reads no
result.
"""

import contextlib
import datetime
import importlib
import itertools
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

import torch

from common import clock, data, fingerprint, hardware, parallel, profile, proof
from common.options import Arguments, Measurement, parse_args
from common.record import DRIFT, Row, Run, in_means, write_json
from common.text import Skip, explain, one_line, progress, run_command, say

REHEARSED = 10  # steps in all on a GPU: after three of them FP8's scales were seen to be still too small
LONG_STEP_S = 0.5  # beyond it only the launched steps are rehearsed, since more would take many seconds
SETTLING_S = 6  # of steps that do not count: a GPU's clock falls to what its power limit allows
MOST_RETIMED = 2  # fresh regions after one in which the compiler worked
TIMED_AFTER_TRAINING = 10  # steps to time of a row that was trained for its held-out losses
STATE_S = 0.5  # between readings of clock and power
POLL_S = 0.001  # between questions whether the GPU has finished
STEPS_TO_FIT_SCALES = 4  # of FP8, before gradients are sketched: each cuts off less than the one before


def measure(main: Callable[[Arguments], tuple]) -> None:
    """Run the script that holds `main` as a command: read its options, measure, write the record.

    `main` returns `train_step, model, optimizer`, and where its step can be a CUDA graph also `capture`.
    `train_step(tokens, targets)`, each (B, T) int64 on the device, trains and returns the loss, detached.
    `model` takes the same and returns only the loss. `capture` takes the same and returns a `replay`, which
    does what `train_step` does. The optimizer's states begin at zero, as Adam's do. On a GPU all of it runs
    on one stream that is not the default one. Ends the process: 0 for a row that is ok or skipped, otherwise
    1.
    """
    module = sys.modules[main.__module__]
    script = Path(module.__file__)

    def run() -> int:
        args = parse_args(script, module.__doc__)
        parallel.wait_passively(args.device)
        return run_and_record(main, args)

    run_command(run, script.stem)


class InitialState:
    """The weights with which a row begins, copied to the host's memory."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer, self.notes = model, optimizer, []
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.weights = [(weight, on_host(weight)) for weight in weights]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back, and the optimizer's states to zero: all in place, where a graph finds them.
        FP8's scales stay."""
        for weight, initial in self.weights:
            own_part(weight).copy_(initial)
        for states in self.optimizer.state.values():
            for state in states.values():
                if isinstance(state, torch.Tensor):
                    own_part(state).zero_()

    def sample(self, train_step: Callable, batch: tuple) -> dict:
        """Samples of the weights and of one step's gradients for the proof, see common/proof.py."""
        self.restore()
        return proof.sample(train_step, self.optimizer, self.model, batch)


class Training:
    """A training step, its batches, and the losses of all steps so far."""

    def __init__(self, train_step: Callable, batches: list[tuple]):
        self.train_step, self.batches = train_step, batches
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Train one step, on the next batch. The host does not wait for it."""
        batch = self.batches[len(self.losses) % len(self.batches)]
        self.losses.append(self.train_step(*batch))


def measure_row(
    main: Callable, args: Measurement, row: Row, initial_state: type[InitialState] = InitialState
) -> dict:
    """Measure one row into `row`: build the model, train, time, then observe untimed steps. Returns samples
    for the proof. `initial_state` saves and restores the initial state; with --model also what else a step
    changes.

    Raises what the script raises, and FloatingPointError, one line, for a loss that is not finite.
    """
    began = time.perf_counter()
    if args.rank == 0:
        say("\n".join([args.name, *args.about()]))
    if args.source is not None:
        row.code_sha256 = fingerprint.row_sha256(args.source, hardware.ROOT)
    progress("building the model")
    parallel.start(args)
    train_step, model, optimizer, *capture = main(args)
    *batches, spare = args.batches()
    training = Training(train_step, batches)

    # 1. Rehearse, and undo it: launched steps, which compile; a capture; on a GPU ten steps in all.
    rehearsal_began = time.perf_counter()
    initial = None if args.cold else initial_state(model, optimizer)
    rehearse(training, capture, args, row)
    if initial:
        row.rehearsed = len(training.losses)
        initial.restore()
        training.losses.clear()
    row.warmup_s = time.perf_counter() - rehearsal_began

    # 2. Train and time. All steps train: the losses of the row are those of the first, timed or not.
    timed_s = train_and_time(training, model, args, row)
    losses = [loss.item() for loss in [*training.losses[: args.steps], training.losses[-1]]]
    record_losses(parallel.across(losses, "avg"), len(training.losses), args, row)

    # 3. Observe untimed steps: where the time goes, what ran, gradients from the initial weights.
    if args.profile:
        with note_failure(row, "not profiled"):
            median_ms = statistics.median(row.step_ms)
            row.profile = profile.profile_steps(partial(training.train_step, *spare), median_ms, args.device)
    training.train_step = train_step  # the graph is gone, with its memory; a replay has no operators
    captured = bool(row.settings.captured)
    with note_failure(row, "not observed"):
        row.settings, row.symptoms = profile.observe(partial(train_step, *spare), model, args.device)
        row.settings.residual_dtype = profile.residual_dtype(train_step, spare, model)
    row.settings.captured = captured
    samples = {}
    if initial and args.processes == 1:
        with note_failure(row, "gradients not sampled"):
            samples = sample_gradients(train_step, batches[0], initial, bool(row.settings.fp8_recipe))
        add_note(row, "; ".join(initial.notes))
    is_fp32 = row.settings.amp_dtype == "float32"
    if is_fp32 and row.settings.float32_matmul_precision == "high" and not args.amp:
        machine = "CPU" if args.device.type == "cpu" else "GPU"
        add_note(row, f"FP32, because this {machine} does not multiply BF16")
    if args.cold:
        add_note(row, "trained without a rehearsal: --cold")
    row.status = "ok"
    row.overhead_s = time.perf_counter() - began - row.warmup_s - timed_s
    return samples


# --- 1. the rehearsal -----------------------------------------------------------------------------


def rehearse(training: Training, capture: list[Callable], args: Measurement, row: Row) -> None:
    """Launch `args.warmup` steps, which compiles and autotunes. Capture a step as a CUDA graph, if the script
    can be captured: from then on `training` replays it. On a GPU train on to REHEARSED steps, because FP8's
    scales begin at 1, where small gradients round to zero, and Adam's moments would remember that.

    With --cold the launched steps are training steps. Raises RuntimeError, one line, where the capture fails.
    """
    progress("first steps, in which a compiler works")
    for _ in range(args.warmup):
        began = time.perf_counter()
        training.step()
        torch.get_device_module(args.device).synchronize()
        last_s = time.perf_counter() - began
    if args.device.type == "cpu":
        return
    (last_s,) = parallel.across([last_s], "max")
    if capture:
        reason = why_launched(args)
        add_note(row, reason)
        row.settings.captured = reason is None
    if row.settings.captured:
        training.train_step = capture_step(*capture, training.batches[0], args, row)
    if not args.cold and last_s <= LONG_STEP_S:
        for _ in range(REHEARSED - args.warmup):
            training.step()


def why_launched(args: Measurement) -> str | None:
    """Why a step that can be captured is launched all the same; None where it is captured."""
    if not args.capture:
        return "launched, not captured: --no-capture"
    if args.parallel == "fsdp":
        return (
            "launched, not captured: FSDP2 allocates pinned memory of the host, which no CUDA graph can hold"
        )
    return None


def capture_step(capture: Callable, batch: tuple, args: Measurement, row: Row) -> Callable:
    """The replay of one step on a batch like this one. Capturing trains nothing. Its peak of memory is the
    row's, since a replay allocates nothing."""
    progress("capturing a step as a CUDA graph")
    torch.cuda.synchronize(args.device)
    torch.cuda.reset_peak_memory_stats(args.device)
    try:
        replay = capture(*batch)
    except RuntimeError as error:  # ending a broken capture raises an error of its own, which hides the cause
        cause = error.__context__ or error
        raise RuntimeError(f"the step cannot be captured, --no-capture launches it: {cause}") from error
    row.peak_bytes = torch.cuda.max_memory_allocated(args.device)
    return replay


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return own_part(tensor).detach().to("cpu", copy=True)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: of FSDP2's DTensor its shard, of any other all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- 2. training and timing -----------------------------------------------------------------------


def train_and_time(training: Training, model: torch.nn.Module, args: Measurement, row: Row) -> float:
    """Train for held-out losses, if any; then time at least `args.steps` steps. Returns the seconds of the
    steps that were timed or settled. If the compiler worked in the timed region, time again."""
    n, seconds, settling_s = args.steps, 0.0, SETTLING_S
    if args.heldout_every:
        train_with_heldout(training, model, args, row)
        n, settling_s = min(n, TIMED_AFTER_TRAINING), 0  # it has settled
    on_gpu = partial(time_on_gpu, settling_s=settling_s)
    time_steps = on_gpu if args.device.type == "cuda" else time_on_cpu
    for _ in range(1 + MOST_RETIMED):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        time_steps(training, n, args, row)
        seconds += (sum(row.settling_ms) + sum(row.step_ms)) / 1e3
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        (row.recompiled,) = map(int, parallel.across([compiled], "max"))
        if not row.recompiled:
            break
    return seconds


def time_on_gpu(
    training: Training, n: int, args: Measurement, row: Row, settling_s: float = SETTLING_S
) -> None:
    """Train for `settling_s` seconds, and right after it time at least `n` steps and `args.seconds` seconds
    in one region. Reference work before and after shows whether something else ran on the machine."""
    before = clock.reference_work(args.device)
    torch.cuda.reset_peak_memory_stats(args.device)  # the reference work's memory is not the row's
    progress("settling")
    row.settling_ms, more = [], 1
    while more > 0:
        times, _ = run_between_events(training, more, args.device)
        row.settling_ms += parallel.across(times, "max")
        median_ms = statistics.median(row.settling_ms)
        more = math.ceil((settling_s * 1e3 - sum(row.settling_ms)) / median_ms)
    n = max(n, math.ceil(args.seconds * 1e3 / median_ms))
    progress(f"timing {n} steps")
    times, states = run_between_events(training, n, args.device)
    row.step_ms = parallel.across(times, "max")
    peak_bytes = max(row.peak_bytes or 0, torch.cuda.max_memory_allocated(args.device))
    row.peak_bytes = int(*parallel.across([peak_bytes], "max"))
    if states and None not in states:
        row.clock_mhz, row.power_w = map(statistics.fmean, zip(*states, strict=True))
    after = clock.reference_work(args.device)
    if before and after:
        row.product_ms, row.copy_ms, row.launch_us = map(list, zip(before, after, strict=True))


def run_between_events(training: Training, n: int, device: torch.device) -> tuple[list[float], list]:
    """Milliseconds of each of `n` steps, and the GPU's (MHz, watts) while it runs them, where they can be
    read.

    Consecutive steps share a CUDA event, so a gap in which the GPU waits for the host counts.
    """
    states, read_at = [], time.monotonic()

    def read_state() -> None:
        nonlocal read_at
        if time.monotonic() - read_at > STATE_S:
            states.append(hardware.clock_and_power(device))
            read_at = time.monotonic()

    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    for _ in range(n):
        training.step()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        read_state()
    while not events[-1].query():
        read_state()
        time.sleep(POLL_S)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)], states


def time_on_cpu(training: Training, n: int, args: Measurement, row: Row) -> None:
    """Time `n` steps by the host's clock. A CPU shows how a step works, and not what it gains on a GPU."""
    progress(f"timing {n} steps")
    times = [time.perf_counter()]
    for _ in range(n):
        training.step()
        times.append(time.perf_counter())
    step_ms = [(end - start) * 1e3 for start, end in itertools.pairwise(times)]
    row.step_ms = parallel.across(step_ms, "max")
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    row.peak_bytes = int(*parallel.across([peak_bytes], "max"))


def train_with_heldout(training: Training, model: torch.nn.Module, args: Arguments, row: Row) -> None:
    """Train on until `args.steps` steps, and leave the held-out loss before, between and after them in `row`.
    With --cold, launched steps have been trained already.

    It shows how good the weights are: the row's own forward alone, in batches of at most the row's size,
    under mixed precision where the machine has it, without FP8, nothing compiled."""
    losses, starts = training.losses, data.heldout_starts(args.text, args.config.seq_len)
    starts = starts.reshape(-1, math.gcd(len(starts), args.batch_size))
    batches = data.stage_batches(args.text, starts, args.config.seq_len, args.device)
    amp = torch.autocast(args.device.type, args.amp_dtype, enabled=args.amp)
    for done in [*range(len(losses), args.steps, args.heldout_every), args.steps]:
        progress(f"training to the held-out loss of step {done}")
        while len(losses) < done:
            training.step()
        with torch.no_grad(), amp, torch.compiler.set_stance("force_eager"):
            loss = torch.stack([model(*batch) for batch in batches]).double().mean().item()
        row.heldout.append((len(losses), loss))
        if not math.isfinite(loss):
            return  # it is told with the losses


def record_losses(losses: list[float], trained: int, args: Measurement, row: Row) -> None:
    """Leave the first losses in the row, up to one that is not finite: that raises FloatingPointError. So
    does a last loss, of step `trained`, that is not finite: NaNs draw less power, so the clock would rise and
    the times be wrong."""
    *losses, last = losses
    for step, loss in [*enumerate(losses), *row.heldout, (trained - 1, last)]:
        if not math.isfinite(loss):
            rate = f"--lr (now {args.lr:g})" if args.lr else "the rate of your optimizer"
            raise FloatingPointError(f"loss is {loss} at training step {step}: lower {rate}")
        if len(row.loss) < len(losses):
            row.loss.append(loss)


# --- 3. what untimed steps show -------------------------------------------------------------------


@contextlib.contextmanager
def note_failure(row: Row, what: str) -> Iterator[None]:
    """If an untimed observation fails, keep the row, and add the error to its note."""
    progress("observing")
    try:
        yield
    except Exception as error:
        add_note(row, f"{what}: {one_line(error)}")


def add_note(row: Row, text: str | None) -> None:
    row.note = "; ".join(filter(None, [row.note, text])) or None


def sample_gradients(train_step: Callable, batch: tuple, initial: InitialState, in_fp8: bool) -> dict:
    """Samples of a step from the initial weights. FP8's scales fit the end of the training by now. At its
    start gradients may be several times larger, and such scales would cut them off."""
    for _ in range(STEPS_TO_FIT_SCALES if in_fp8 else 0):
        initial.restore()
        train_step(*batch)
    return initial.sample(train_step, batch)


# --- the record -----------------------------------------------------------------------------------


def run_and_record(
    main: Callable, args: Measurement, initial_state: type[InitialState] = InitialState
) -> int:
    """Measure a script's `main`, write its record, print what came of it; returns the exit code. Of several
    processes the first one writes, or the one that failed."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's stages on stderr tell a reader nothing
    importlib.import_module("torch._dynamo")  # AdamW would: it is no part of the overhead
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    row, writes, samples = Row(args.name, source=args.source, changes=args.changes), args.rank == 0, {}
    before = args.output.stat().st_mtime_ns if args.output.exists() else None
    try:
        samples = measure_row(main, args, row, initial_state)
    except Exception as error:  # whatever happened, the row must hold it
        row.status, row.reason = explain(error)
        in_all_processes = isinstance(error, (Skip, FloatingPointError))
        if row.status == "failed" and not isinstance(error, FloatingPointError):
            say(traceback.format_exc(), sys.stderr, end="")
        if args.processes > 1 and not in_all_processes:
            # The cause is in the record of the process that failed first: the others lost it.
            row.reason = f"rank {args.rank}: {row.reason}"
            writes = before == (args.output.stat().st_mtime_ns if args.output.exists() else None)
    progress("")
    row.code = args.code
    if args.rank and not args.local_rank:
        say(f"{args.name}: the record is on the machine of rank 0")
    if writes:
        lines = result_lines(row, args)
        saved = in_means(row) if args.heldout_every else row
        run = Run(args.command, started_at, hardware.describe(args.device), args.workload(), [saved])
        proof.write(samples, args.output)
        write_json(args.output, run)
        say(lines)
    is_good = row.status in ("ok", "skipped")
    if is_good and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return int(not is_good)


def result_lines(row: Row, args: Measurement) -> str:
    """What ran and how fast, for a person; the last line is the result."""
    if row.status != "ok":
        return f"{row.step}: {row.status}: {row.reason}"
    observed = [f"{name} {value}" for name, value in vars(row.settings).items() if value not in (None, False)]
    lines = [f"record: {args.output}"]
    if row.note:
        lines.append(f"note: {row.note}")
    if row.recompiled:
        lines.append("? the compiler worked while it was timed")
    if args.device.type == "cuda" and abs(row.drift) > DRIFT:
        lines.append(f"? the second half of the steps took {row.drift:+.1%} time")
    lines.append(f"ran: {', '.join(observed)}")
    ms, work = statistics.median(row.step_ms), args.workload()
    lines.append(
        f"{row.step}: {ms:.1f} ms/step, {work.gpus * work.tokens_per_step / ms * 1e3:,.0f} {work.unit}/s, "
        f"{work.gpus * work.flops_per_step / ms / 1e9:.3g} model TFLOP/s, "
        f"peak {row.peak_bytes / 2**30:.1f} GiB, warm-up {row.warmup_s:.1f} s, "
        f"{f'drift {row.drift:+.1%}, ' if row.settling_ms else ''}"
        f"loss {row.loss[0]:.3f} in the first training step, {row.loss[-1]:.3f} in the last"
    )
    return "\n".join(lines)
