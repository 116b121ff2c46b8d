"""The ladder over widths, batches and lengths: ./run_all.sh --sweep.

Each script runs in a process of its own that goes through all shapes (ladder/cells.py), few steps each. The roofs are
measured first: they predict every cell, and with it how long the sweep takes. Where a step is slower than the one
before it, both are profiled afterwards, in the time that is left. What does not fit in the time limit is `not run`, and
`--sweep --resume DIR` goes on. Every cell that was begun has its record below DIR, and sweep.json has them all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from common import flops
from common.model import GPTConfig
from common.record import PLAN, ROOFS, Row, Run, read_object, write_json, write_run
from common.text import OneLineParser, one_line, portable_command, say
from ladder import predict, process, shared
from ladder.cells import run_cells
from ladder.counts import BY_HAND
from ladder.process import ROOT
from ladder.shared import GIB
from report import sweep as pages
from report import sweep_page
from report.analysis import GAPS
from report.load import RecordError
from report.sweep import Cell

CHOSEN_HERE = (
    "--preset", "--n-layer", "--n-head", "--n-embd", "--seq-len", "--vocab-size", "--batch-size",
    "--global-batch-size", "--accumulate", "--checkpoint", "--warmup", "--steps", "--quick", "--profile",
)  # fmt: skip
# Steps of a cell: as many as the slowest script does in TIMED_S, so long that a host's busy moments come and go.
WARMUP, FEWEST, MOST, TIMED_S = 2, 3, 200, 2.0
ROOFS_S = {"cuda": 90, "cpu": 45}  # what a cell takes beside its steps, and the roofs: expected, for the plan
# Compilation and capture of two layers took 15 s in step 3, on average over the recorded sweep, and 6 s in step 4.
SETUP_S = {"cuda": {"3": 18, "4": 8, "": 3}, "cpu": {"3": 20, "4": 1, "": 3}}
START_S = {"cuda": 15, "cpu": 5}  # of a process
DONE = ("ok", "skipped", "oom")


@dataclass(frozen=True)
class Shape:
    n_embd: int
    n_head: int
    seq_len: int
    batch_size: int
    n_layer: int = 2
    vocab_size: int = 8192  # of so few layers, a head of 50304 tokens would be most of the step

    @property
    def name(self) -> str:
        return f"c{self.n_embd}-t{self.seq_len}-b{self.batch_size}"

    @property
    def key(self) -> tuple[int, ...]:  # as Cell.shape
        return tuple(getattr(self, name) for name in pages.SHAPE)

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(self.n_layer, self.n_head, self.n_embd, self.seq_len, self.vocab_size)

    def words(self) -> list[str]:
        return [word for name, value in asdict(self).items() for word in (f"--{name.replace('_', '-')}", str(value))]

    def peak_bytes(self, step: str) -> int:
        return flops.unfused_peak_bytes(self.config, self.batch_size, scores=step[0] in BY_HAND)


def shapes_of(device_type: str) -> list[Shape]:
    """The plan, in the order in which a short sweep should have them: extremes first.

    A head has 64 channels up to 1024, then 128, on a CPU 32. On a GPU a column is (tokens a step, length): 4 Ki and
    64 Ki tokens at T 512, 8 Ki at T 8192, then what lies between.
    """
    if device_type == "cpu":
        columns = ((128, 4), (512, 4), (128, 16))  # (T, batch size)
        return [Shape(C, C // 32, T, B, vocab_size=256) for T, B in columns for C in (64, 256, 128)]
    widths, groups = (256, 8192, 1024, 4096, 2048), (((512, 8), (512, 128), (8192, 1)), ((2048, 8),))
    return [Shape(C, C // (64 if C <= 1024 else 128), T, B) for columns in groups for C in widths for T, B in columns]


@dataclass
class Plan:
    """What plan.json holds of a sweep."""

    sweep: list[dict]  # its shapes, the most important first
    scripts: list[str]
    arguments: list[str]  # of every script
    command: str
    device_type: str
    device: str
    free_bytes: int | None  # before the first row

    @property
    def shapes(self) -> list[Shape]:
        return [Shape(**shape) for shape in self.sweep]


@dataclass
class Sweep:
    folder: Path
    plan: Plan
    minutes: int
    until: float  # time.monotonic
    stop: process.Stop
    predicted: dict[str, dict[str, predict.Prediction]]  # by shape, by step
    roofs_commit: str | None = None  # at which they were measured

    def record(self, shape: Shape, script: str) -> Path:
        return self.folder / shape.name / f"{script}.json"

    def steps(self, shape: Shape) -> int:
        """How many steps of a shape are timed, the same in every script."""
        slowest_s = max(one.ms for one in self.predicted[shape.name].values()) / 1e3
        return min(MOST, max(FEWEST, round(TIMED_S / slowest_s)))

    def seconds(self, shape: Shape, script: str) -> float:
        """What a cell is expected to take; nothing where it has its record."""
        if self.record(shape, script).exists() or not self.fits(shape, script):
            return 0.0
        one, n_steps = self.predicted[shape.name].get(script), 2 * WARMUP + self.steps(shape)
        return setup_s(script, self.plan.device_type) + (n_steps * one.ms / 1e3 if one else 0.0)

    def fits(self, shape: Shape, script: str) -> bool:
        """Whether a cell is tried. On a GPU all are that do not write scores by hand: the others need less than is
        estimated, and what has no memory there is soon known."""
        tried = self.plan.device_type == "cuda" and script[0] not in BY_HAND
        return tried or self.plan.free_bytes is None or shape.peak_bytes(script) <= self.plan.free_bytes

    def todo(self, shapes: Iterable[Shape], script: str) -> list[dict]:
        """The cells of a script without a record, as ladder/cells.py takes them."""
        cells = ((shape, self.seconds(shape, script)) for shape in shapes)
        return [self.cell(shape, script, seconds, self.record(shape, script)) for shape, seconds in cells if seconds]

    def cell(self, shape: Shape, script: str, seconds: float, output: Path, *more: str) -> dict:
        """One cell, as ladder/cells.py takes it."""
        steps = ["--warmup", str(WARMUP), "--steps", str(self.steps(shape)), "--quick", *more]
        words = [*self.plan.arguments, *shape.words(), *steps]
        return {"name": shape.name, "words": words, "output": str(output), "seconds": seconds}

    def profiled(self, shape: Shape, script: str) -> Path:
        """The record of a cell that was trained again under the profiler."""
        return self.folder / shape.name / f"{script}.profiled.json"

    def again_s(self, cell: Cell) -> float:
        """What training a cell again under the profiler is expected to take; nothing where it has its record."""
        (shape,) = (one for one in self.plan.shapes if one.key == cell.shape)
        if self.profiled(shape, cell.step).exists():
            return 0.0
        return setup_s(cell.step, self.plan.device_type) + (2 * WARMUP + self.steps(shape)) * cell.median_ms / 1e3


def setup_s(script: str, device_type: str) -> float:
    """Expected seconds of a cell beside its steps: above all what compiles."""
    known = SETUP_S[device_type]
    return known.get(script[0], known[""])


# --- the sweep --------------------------------------------------------------------------------------


def main(given, arguments: list[str], argv: list[str], parser: OneLineParser, check) -> int:
    """Plan, measure, report. `check` is the ladder's: what arguments mean on this machine, from a process of its own.

    Exits with code 2 and one line where nothing fits, where the time is too short, and without roofs.
    """
    began, stop, minutes = time.monotonic(), process.Stop(), given.sweep_minutes or shared.SWEEP_MINUTES
    taken = {"sweep", "sweep_minutes", "only", "resume"}
    shared.refuse_others(given, parser, taken, "--sweep runs the five scripts once, on one GPU, after the roofs")
    if given.resume:
        folder, plan = resumed(given, minutes, arguments, parser, check)
    else:
        folder, plan = planned(given, minutes, arguments, argv, parser, check)
    stop.listen()
    with process.lock(folder / PLAN, parser):
        try_again(folder, plan)
        measure_roofs(folder, plan, minutes * 60, stop, parser)
        try:
            roofs = predict.read_roofs(folder / ROOFS)
            predicted = {shape.name: predict.predict(workload(shape), roofs) for shape in plan.shapes}
        except (ValueError, KeyError) as error:
            parser.error(f"no predictions without these roofs: {error}")
        commit = (read_object(folder / ROOFS).get("environment") or {}).get("commit")
        sweep = Sweep(folder, plan, minutes, began + minutes * 60, stop, predicted, commit)
        leave_out_what_cannot_fit(sweep)
        return measure(sweep, within_the_time(sweep, parser))


def measure(sweep: Sweep, shapes: list[Shape]) -> int:
    """Run these shapes, script by script, and report; returns the exit code."""
    scripts, failed = sweep.plan.scripts, False
    environment = process.passive_waits(sweep.plan.device_type)
    for k, script in enumerate(scripts):
        rest = [sum(sweep.seconds(shape, later) for shape in shapes) for later in scripts[k:]]
        share = rest[0] / (sum(rest) or 1) * (sweep.until - time.monotonic())
        if rest[0]:
            todo, log = sweep.todo(shapes, script), sweep.folder / f"{script}.log"
            try:
                run_cells(ROOT / f"{script}.py", todo, log, share, sweep.stop, environment)
            except OSError as error:  # what is recorded stands
                failed = True
                say(f"{script}: failed: cannot write to {sweep.folder.name}: {error.strerror or error}")
    explain(sweep)
    return finish(sweep) or int(failed)


def explain(sweep: Sweep) -> None:
    """Profile every step that is slower than the one before it, and that one, where the time is left for both."""
    left_s, wanted = sweep.until - time.monotonic() - START_S[sweep.plan.device_type] * len(sweep.plan.scripts), {}
    for pair in unexplained(sweep):
        seconds = {(cell.step, cell.shape): sweep.again_s(cell) for cell in pair}
        needed_s = sum(s for key, s in seconds.items() if key not in wanted)
        if needed_s <= left_s:
            left_s -= needed_s
            wanted |= seconds
    if wanted:
        say("what is slower than the step before it is profiled, and that step")
    environment = process.passive_waits(sweep.plan.device_type)
    for script in sweep.plan.scripts:
        todo = [
            sweep.cell(shape, script, wanted[script, shape.key], output, "--profile")
            for shape in sweep.plan.shapes
            if wanted.get((script, shape.key)) and not (output := sweep.profiled(shape, script)).exists()
        ]
        log, left_s = sweep.folder / f"{script}.profiled.log", sweep.until - time.monotonic()
        with contextlib.suppress(OSError):  # what is recorded stands
            run_cells(ROOT / f"{script}.py", todo, log, left_s, sweep.stop, environment)


def unexplained(sweep: Sweep) -> list[tuple[Cell, Cell]]:
    """The slower steps, each with the one before, of which one or both were not profiled."""
    cells = cells_of(sweep)
    pairs = pages.slower(pages.by_shape(cells), pages.rungs(cells))
    return [pair for pair in pairs if any(map(sweep.again_s, pair))]


def planned(given, minutes: int, arguments: list[str], argv: list[str], parser, check) -> tuple[Path, Plan]:
    """A new folder with its plan. Exits where the arguments are wrong, or no shape fits."""
    if wrong := [word for word in arguments if word.partition("=")[0] in CHOSEN_HERE]:
        parser.error(f"--sweep chooses shapes and steps itself: leave out {wrong[0]}")
    facts = check(arguments, 1)
    device, free = facts["device_type"], facts["free_bytes"]
    scripts, shapes = shared.steps_named(given.only, shared.step_names(ROOT), parser), shapes_of(device)
    if free is not None and min(shape.peak_bytes("2_") for shape in shapes) > free:
        parser.error(f"no shape of the sweep fits the {free / GIB:.1f} GiB that are free")
    check([*arguments, *shapes[0].words()], 1)  # that the text fits the vocabulary
    command, arguments = portable_command(["./run_all.sh", *argv]), arguments + facts["pinned"]
    plan = Plan([asdict(shape) for shape in shapes], scripts, arguments, command, device, facts["device"], free)
    require_time(minutes, plan, parser)
    return shared.new_folder(ROOT, "sweep-", {"": asdict(plan)}, parser), plan


def resumed(given, minutes: int, arguments: list[str], parser: OneLineParser, check) -> tuple[Path, Plan]:
    """The plan of an ended sweep. Exits where it cannot be read, or belongs to another device."""
    folder = given.resume.resolve()
    if arguments or given.only:
        parser.error(f"--resume takes its arguments from {given.resume}: give no others but --sweep-minutes")
    try:
        plan = Plan(**json.loads((folder / PLAN).read_text()))
        first = plan.shapes[0]
    except (OSError, ValueError, TypeError, LookupError):
        parser.error(f"--resume {given.resume} holds no sweep that can be read")
    facts = check([*plan.arguments, *first.words()], 1)
    if (facts["device_type"], facts["device"]) != (plan.device_type, plan.device):
        parser.error(f"--resume {given.resume} was measured on {plan.device}, and this is {facts['device']}")
    if not (folder / ROOFS).exists():
        require_time(minutes, plan, parser)
    return folder, replace(plan, free_bytes=facts["free_bytes"])


def try_again(folder: Path, plan: Plan) -> None:
    """Remove the records of cells that failed, and of those that were not tried; profiled ones as well."""
    places = itertools.product(
        (folder / shape.name for shape in plan.shapes), plan.scripts, (".json", ".profiled.json")
    )
    for record in (place / f"{script}{ending}" for place, script, ending in places):
        row = shared.row_of(record)
        if row.get("status") not in DONE or (row.get("reason") or "").endswith(shared.NOT_TRIED):
            record.unlink(missing_ok=True)


def require_time(minutes: int, plan: Plan, parser: OneLineParser) -> None:
    """Exits where the roofs and what each script takes beside its steps leave no time for a cell."""
    least = ROOFS_S[plan.device_type] + sum(setup_s(script, plan.device_type) for script in plan.scripts)
    if minutes * 60 < least:
        parser.error(too_short(minutes, least))


def too_short(minutes: int, needed_s: float) -> str:
    return f"--sweep-minutes {minutes} is too short: the first shape needs about {in_minutes(needed_s)}"


def in_minutes(seconds: float) -> str:
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes} minute{'s' * (minutes > 1)}"


def measure_roofs(folder: Path, plan: Plan, limit_s: float, stop: process.Stop, parser: OneLineParser) -> None:
    """Measure the roofs in this folder, unless they are there. Exits where they cannot be measured."""
    if (folder / ROOFS).exists():
        return
    words, environment = [*plan.arguments, *plan.shapes[-1].words()], process.passive_waits(plan.device_type)
    why = shared.measure_roofs(folder / ROOFS, words, limit_s, stop, environment)
    if stop.requests:
        parser.exit(130, "run_all.sh: interrupted\n")
    if why:
        parser.error(f"no roofs, so nothing predicts the cells: {why}")


def workload(shape: Shape) -> SimpleNamespace:
    """What ladder.predict reads of a workload."""
    parameters = flops.parameters(shape.config)
    return SimpleNamespace(**asdict(shape), parameters=parameters, gpus=1, accumulate=1, checkpoint=False)


def leave_out_what_cannot_fit(sweep: Sweep) -> None:
    """A record, with its reason, for every cell that a plain step's memory leaves no room for."""
    for shape in sweep.plan.shapes:
        for script in sweep.plan.scripts:
            record = sweep.record(shape, script)
            if not (sweep.fits(shape, script) or record.exists()):
                reason = shared.too_large(shape.peak_bytes(script), sweep.plan.free_bytes)
                record.parent.mkdir(exist_ok=True)
                write_run(record, Run(sweep.plan.command, None, None, None, [Row(script, None, "oom", reason)]))


def within_the_time(sweep: Sweep, parser: OneLineParser) -> list[Shape]:
    """The first shapes whose cells fit in the time that is left; says how long they take. Exits where none does."""
    cells, left_s = sweep.plan.scripts, sweep.until - time.monotonic()
    start_s = needed_s = whole_s = START_S[sweep.plan.device_type] * len(cells)
    chosen, least_s = [], math.inf
    for shape in sweep.plan.shapes:
        seconds = sum(sweep.seconds(shape, script) for script in cells)
        whole_s += seconds
        least_s = min(least_s, seconds or math.inf)
        if seconds and needed_s + seconds <= left_s:
            needed_s += seconds
            chosen.append(shape)
    if least_s < math.inf and not chosen:
        why = too_short(sweep.minutes, sweep.minutes * 60 - left_s + start_s + least_s)
        parser.error(f"{why}; --sweep --resume {shared.shown(sweep.folder, ROOT)} keeps the roofs")
    some = f"{len(chosen)} of {len(sweep.plan.shapes)} shapes"
    say(f"{some}, about {in_minutes(needed_s)}; all that is left would take {in_minutes(whole_s)}")
    return chosen


def finish(sweep: Sweep) -> int:
    """Write sweep.json and the pages; returns the exit code."""
    cells = cells_of(sweep)
    write_json(sweep.folder / pages.SWEEP, [asdict(cell) for cell in cells])
    try:
        for line in sweep_page.write(sweep.folder):
            say(line)
    except (RecordError, ImportError) as error:  # what is recorded stands
        say(f"no page: {one_line(error)}")
    shown = shared.shown(sweep.folder, ROOT)
    say(f"written to {shown}")
    if open_cells := sum(cell.status == "not run" for cell in cells):
        say(f"{open_cells} cells not run: ./run_all.sh --sweep --resume {shown} goes on")
    elif pairs := unexplained(sweep):
        say(f"slower steps not profiled: {len(pairs)}; ./run_all.sh --sweep --resume {shown} does it")
    return 130 if sweep.stop.requests else int(any(cell.status in ("failed", "timeout") for cell in cells))


def cells_of(sweep: Sweep) -> list[Cell]:
    return [cell_of(sweep, shape, script) for shape in sweep.plan.shapes for script in sweep.plan.scripts]


def cell_of(sweep: Sweep, shape: Shape, script: str) -> Cell:
    """A cell of sweep.json: of its record, of what was predicted, or of why it has none."""
    one, record = sweep.predicted[shape.name].get(script), sweep.record(shape, script)
    cell = Cell(script, **asdict(shape), status="not run")
    if one:
        cell = replace(cell, predicted_ms=one.ms, predicted_category_ms=one.category_ms, launches=one.launches,
                       predicted_host_ms=one.host_ms, predicted_commit=sweep.roofs_commit)  # fmt: skip
    again = shared.row_of(sweep.profiled(shape, script))
    if profile := again.get("profile"):
        cell.again_ms = again["timing"]["median_ms"]
        cell.category_ms = {name: time["ms"] for name, time in profile["categories"].items()}
        cell.category_ms[GAPS] = profile["gpu_idle_ms"] or 0.0
    if run := read_object(record):
        (row,), known = run["steps"], run["environment"] or {}
        state, timing = row["gpu_state"] or {}, row["timing"]
        return replace(
            cell, status=row["status"], reason=row["reason"], note=row["note"], median_ms=timing["median_ms"],
            step_ms=timing["step_ms"], warmup_s=timing["warmup_s"], peak_bytes=row["peak_allocated_bytes"],
            host_bound=None if state.get("while_running") is None else not state["while_running"],
            captured=row["settings"]["captured"], started_at=run["started_at"],
            **{name: known.get(name) for name in ("device", "torch", "transformer_engine", "commit", "dirty")},
        )  # fmt: skip
    cell.reason = f"--sweep-minutes {sweep.minutes} left no time for it"
    return cell
