"""What a run with --scaling says: how fast a GPU is among several, and where the rest of its time goes.

The run's folder holds a run folder per place (`1`, `2-ddp`, `2-fsdp`, ...). A row is compared with the same script on
one GPU, captured as a CUDA graph or launched as the row itself was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common.record import CATEGORIES, LAUNCHED_ALONE, Row, Run, scaling_places, write_bytes, write_json, write_run
from common.text import aligned, one_line
from report import analysis, doubts, load, table
from report.analysis import GAPS, is_timed, median_ms
from report.kernels import readable
from report.load import environment_of

ROWS, SHORT, PICTURE = "scaling.json", "scaling.md", "scaling.png"
UNEXPLAINED = "not in the profiles"
EXPOSED = "exposed communication"  # what the category of that name means
LEAST_LOSS = 0.0005  # of a step: a column in which no row has more is left out
LEAST_ADDED = 0.003  # of a step: kernels that add less are not named
UNLIKE = "*"
UNLIKE_LEGEND = (
    f"{UNLIKE} : the step was captured as a CUDA graph in one of the two rows and launched in the other: the figure "
    "holds what the capture gives, too"
)
NOT_RECORDED = (
    "No run on several GPUs is recorded yet. This page therefore shows no figure of how any step scales, and names no "
    "cause."
)
SUMMARY = (
    "This table shows every recorded step: its time in ms, its efficiency in brackets, and the peak memory of a GPU. "
    "*alone* is the step on one GPU, captured where it can be. A captured step is compared with the captured one "
    "alone. FSDP2's steps cannot be captured: they are compared with the same step alone and launched, whose time "
    "stands in the sections below. *oom* is a row that ran out of memory, and a dash one that was not to run."
)


@dataclass
class Scaled:
    """An entry of scaling.json: one row in one place. Everything but its name is null where it has no time."""

    step: str
    parallel: str | None  # ddp, fsdp; null on one GPU
    gpus: int
    captured: bool | None  # whether the timed steps were replays of a CUDA graph
    median_ms: float | None
    efficiency: float | None  # tokens/s of a GPU over those of one GPU alone; null without that row
    peak_allocated_bytes: int | None  # of the GPU that has most; null on a CPU
    status: str
    reason: str | None  # why it has no time
    alike: bool | None  # whether the row on one GPU that it is compared with was captured or not as well
    doubted: bool  # whether there is a serious doubt about one of the two
    tokens_per_s_per_gpu: float | None = None
    model_flops_per_s_per_gpu: float | None = None
    exposed_communication_ms: float | None = None  # in which nothing else ran; null without a profile, as the next two
    overlapped_communication_ms: float | None = None  # null on a CPU too
    lost: dict[str, float] | None = None  # by category, what the step has more than on one GPU, as shares of it
    added_ms: dict[str, float] | None = None  # by name, of kernels that are launched more often; null where `lost` is
    clock_mhz: float | None = None
    alone_clock_mhz: float | None = None  # of the row on one GPU
    power_w: float | None = None
    link: str | None = None  # between the GPUs

    @property
    def name(self) -> str:
        return f"{self.step}, {self.gpus} by {self.parallel}" if self.parallel else f"{self.step}, alone"


def load_places(folder: Path, ended: dict[Path, dict[str, Row]] | None = None) -> dict[str, Run]:
    """The run of every place. `ended` holds rows, by folder and name, that left no record. Raises RecordError."""
    places = scaling_places(folder)
    return {place: load.load_run(folder / place, (ended or {}).get(folder / place)) for place in places}


def scaled_rows(runs: dict[str, Run]) -> list[Scaled]:
    """Every row of every place, those of one script side by side."""
    placed = [
        (run, row)
        for place, run in runs.items()
        for row in run.steps
        if not (place == LAUNCHED_ALONE and row.status == "not run")  # it was not needed
    ]
    names, busy = dict.fromkeys(row.step for _, row in placed), busy_between(runs) is not None
    rows = [scaled(one, placed) for name in names for one in placed if one[1].step == name]
    return [replace(row, doubted=row.doubted or busy) for row in rows]


def busy_between(runs: dict[str, Run]) -> str | None:
    """The verdict on GPUs that did other work beside rows of one place; None on a CPU, whose cores processes share."""
    first = next(iter(runs.values()))
    rows = [replace(row, step=f"{place}/{row.step}") for place, run in runs.items() for row in run.steps]
    return doubts.busy(replace(first, steps=rows)) if environment_of(first).device_type == "cuda" else None


def scaled(one: tuple[Run, Row], placed: list[tuple[Run, Row]]) -> Scaled:
    """A row of a run, from the rows of all places."""
    run, row = one
    reference = reference_of(row, placed) if is_timed(row) else None
    compared = [one, *([reference] if reference else [])]
    known = Scaled(
        row.step, run.workload.parallel, run.workload.gpus, row.settings.captured, row.timing.median_ms,
        efficiency(one, reference) if reference else None, row.peak_allocated_bytes, row.status, row.reason,
        bool(reference[1].settings.captured) == bool(row.settings.captured) if reference else None,
        any(doubts.mark(its_run, its_row) for its_run, its_row in compared),
    )  # fmt: skip
    if not is_timed(row):
        return known
    known.tokens_per_s_per_gpu = row.tokens_per_s / known.gpus
    known.model_flops_per_s_per_gpu = row.model_flops_per_s
    if row.profile and known.gpus > 1:
        exposed, whole = analysis.category_ms(row)["communication"], row.profile.communication_ms
        known.exposed_communication_ms = exposed
        known.overlapped_communication_ms = None if whole is None else max(0.0, whole - exposed)
        known.lost = lost(one, reference) if reference else None
        known.added_ms = added_ms(one, reference) if known.lost else None
    known.clock_mhz, known.power_w, known.link = row.clock_mhz, row.power_w, environment_of(run).link
    known.alone_clock_mhz = reference[1].clock_mhz if reference else None
    return known


def reference_of(row: Row, placed: list[tuple[Run, Row]]) -> tuple[Run, Row] | None:
    """The same script on one GPU, captured or launched as `row` was, where it has such a time; else what it has."""
    alone = [(run, other) for run, other in placed
             if other.step == row.step and run.workload.gpus == 1 and is_timed(other)]  # fmt: skip
    alike = [one for one in alone if bool(one[1].settings.captured) == bool(row.settings.captured)]
    return next(iter(alike or alone), None)


def efficiency(one: tuple[Run, Row], reference: tuple[Run, Row]) -> float:
    """Tokens/s of each GPU over those of one GPU alone: with equal batches, the time alone over the time here."""
    (run, row), (_, alone) = one, reference
    return row.tokens_per_s / run.workload.gpus / alone.tokens_per_s


def lost(one: tuple[Run, Row], reference: tuple[Run, Row]) -> dict[str, float] | None:
    """Where the step is longer than the same work is on one GPU: by category of kernels, as shares of the step.

    They add up to 1 - efficiency. A GPU that takes half of the batch has half of each category for its own. None where
    a profile is missing, or so far off the timed step that it explains nothing.
    """
    (run, row), (run_alone, alone) = one, reference
    if not all(profiled.profile and doubts.kernels_fit(profiled) for profiled in (row, alone)):
        return None
    share = run.workload.tokens_per_step / run_alone.workload.tokens_per_step
    here, there = analysis.category_ms(row), analysis.category_ms(alone)
    shares = {name: (here[name] - share * there[name]) / median_ms(row) for name in (*CATEGORIES, GAPS)}
    return shares | {UNEXPLAINED: 1 - efficiency(one, reference) - sum(shares.values())}


def added_ms(one: tuple[Run, Row], reference: tuple[Run, Row]) -> dict[str, float]:
    """How much longer kernels take that are launched more often than on one GPU: ms of a step, by readable name.

    A GPU that takes half of the batch has half of a kernel's time for its own. Exchanges have figures of their own.
    Compiled kernels are left out: blocks that are compiled one by one are fused in another way.
    """
    share = one[0].workload.tokens_per_step / reference[0].workload.tokens_per_step
    exchanges = {readable(kernel.name) for kernel in one[1].profile.kernels if kernel.category == "communication"}
    more = {change.name: change.after_ms - share * change.before_ms
            for change, _ in analysis.changed_kernels(reference[1], one[1])
            if change.after_launches > change.before_launches
            and not (change.name in exchanges or change.name.startswith("compiled: "))}  # fmt: skip
    return {name: ms for name, ms in sorted(more.items(), key=lambda named: -named[1]) if ms > 0}


def main_loss(row: Scaled) -> list[tuple[str, float]]:
    """The categories that take at least a quarter of what is missing, and a thousandth of the step, largest first."""
    least = max(0.25 * (1 - row.efficiency), 0.001)
    named = [(EXPOSED if name == "communication" else name, share) for name, share in (row.lost or {}).items()]
    return sorted((one for one in named if one[1] >= least), key=lambda one: -one[1])


def sentence(row: Scaled) -> str | None:
    """What limits a row on several GPUs, in one line; None of others."""
    if row.efficiency is None or row.gpus == 1:
        return None
    said = [f"{row.step} by {row.parallel} on {row.gpus} GPUs: the efficiency is {efficiency_cell(row)}"]
    if row.lost is None:
        return f"{said[0]}. No profile that fits the timed steps says where the rest goes."
    if longer := [f"{name} ({percents(share)})" for name, share in main_loss(row)]:
        said.append(f"More of the step than on one GPU goes to {', '.join(longer)}")
    if row.parallel == "fsdp" and (gained := -row.lost["optimizer"]) >= 0.001:
        said.append(f"The optimizer takes {percents(gained)} less, because each GPU updates a part of the weights")
    if added := [f"{name}, {ms:.1f} ms" for name, ms in row.added_ms.items() if ms >= LEAST_ADDED * row.median_ms]:
        said.append(f"Kernels that are launched more often than on one GPU take longer: {'; '.join(added)}")
    if row.alone_clock_mhz and row.clock_mhz:
        said.append(f"The clock is {row.clock_mhz:.0f} MHz, on one GPU {row.alone_clock_mhz:.0f}")
    return ". ".join(said) + "."


# --- text -----------------------------------------------------------------------------------------


def percents(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def efficiency_cell(row: Scaled) -> str:
    if row.efficiency is None or (row.gpus == 1 and row.alike):
        return "-"
    return percents(row.efficiency) + (doubts.MARK if row.doubted else "") + ("" if row.alike else UNLIKE)


def _first_cells(row: Scaled) -> tuple[str, str, str]:
    return row.step, row.parallel or "alone", str(row.gpus)


def main_table(rows: list[Scaled]) -> list[dict]:
    """A line per row: time, efficiency, communication, memory, clock and power."""
    cells = [
        (
            *_first_cells(row), {True: "yes", False: "no", None: "-"}[row.captured],
            table.figure(row.median_ms, ".1f") if row.status == "ok" else row.status, efficiency_cell(row),
            table.figure(row.tokens_per_s_per_gpu, ",.0f"),
            table.tflops(row.model_flops_per_s_per_gpu),
            table.figure(row.exposed_communication_ms, ".1f"),
            table.figure(row.overlapped_communication_ms, ".1f"),
            _gib(row),
            table.figure(row.clock_mhz, ".0f"), table.figure(row.power_w, ".0f"),
        )
        for row in rows
    ]  # fmt: skip
    headers = ("step", "by", "GPUs", "captured", "ms/step", "efficiency", "tokens/s per GPU", "TFLOP/s per GPU",
               "exposed ms", "overlapped ms", "GiB per GPU", "MHz", "W")  # fmt: skip
    shown = [k for k in range(len(headers)) if any(cell[k] != "-" for cell in cells)]
    return table.grid([headers[k] for k in shown], [[cell[k] for k in shown] for cell in cells])


def loss_table(rows: list[Scaled]) -> list[dict]:
    """A line per row on several GPUs: what is missing to 100 %, and where it went, in percent of the step."""
    explained = [row for row in rows if row.lost]
    names = [name for name in (explained[0].lost if explained else ())
             if any(abs(row.lost[name]) >= LEAST_LOSS for row in explained)]  # fmt: skip
    headers = ("step", "by", "GPUs", "missing", *(EXPOSED if name == "communication" else name for name in names))
    cells = [
        (*_first_cells(row), percents(1 - row.efficiency), *(percents(row.lost[name]) for name in names))
        for row in explained
    ]
    return table.grid(headers, cells)


def legend(rows: list[Scaled], runs: dict[str, Run]) -> list[str]:
    """What marks mean, why rows have no time, and what speaks against the run."""
    first = next(iter(runs.values()))
    lines = [doubts.LEGEND] if any(row.doubted for row in rows) else []
    lines += [UNLIKE_LEGEND] if any(row.alike is False for row in rows) else []
    lines += [table.ON_A_CPU] if environment_of(first).device_type == "cpu" else []
    lines += [f"{row.name}: {row.status}: {row.reason}" for row in rows if row.status != "ok"]
    if verdict := busy_between(runs):
        lines.append(f"serious: {verdict}")
    lines += [f"serious: {place}: {text}" for place, run in runs.items()
              for text in table.levels(run).get(doubts.SERIOUS, [])]  # fmt: skip
    return lines


def about(runs: dict[str, Run]) -> str:
    """Machine, link and workload, in one line."""
    first = next(iter(runs.values()))
    link = next((one.link for one in map(environment_of, runs.values()) if one.link), None)
    parts = [table.describe_machine(environment_of(first)), *([f"link {link}"] if link else [])]
    return f"{', '.join(parts)}; {table.describe_workload(first)}"


def render_text(runs: dict[str, Run]) -> str:
    """The report for a terminal."""
    rows = scaled_rows(runs)
    parts = [aligned(main_table(rows), n_left=2), "\n".join(legend(rows, runs)), aligned(loss_table(rows), n_left=2)]
    return "\n\n".join(filter(None, [*parts, "\n".join(filter(None, map(sentence, rows)))]))


def render_markdown(runs: dict[str, Run], heading: str = "# Scaling", at: str = "") -> str:
    """scaling.md, and a part of docs/scaling.md, which finds the run's folder `at` a path that ends with /."""
    rows = scaled_rows(runs)
    losses, picture = loss_table(rows), f"![Efficiency, and where the rest of each step goes]({at}{PICTURE})"
    command = one_line(next(iter(runs.values())).command, 1000)
    parts = [
        heading, table.markdown(about(runs)), table.pipe(main_table(rows)),
        "\n".join(table.bullets(legend(rows, runs))),
        picture if bars(rows) else "",
        "Where the missing percents go, as shares of the step:" if losses else "", table.pipe(losses),
        "\n".join(table.bullets(filter(None, map(sentence, rows)))), f"Figures: [{ROWS}]({at}{ROWS})",
        f"```\n{command}\n```",
    ]  # fmt: skip
    return "\n\n".join(part.strip("\n") for part in parts if part.strip("\n"))


def write(folder: Path, runs: dict[str, Run]) -> list[str]:
    """Write scaling.json, scaling.md, scaling.png, and each place's merge; returns what could not be drawn, and why.

    Raises OSError.
    """
    for place, run in runs.items():
        if not load.holds_only_the_merge(folder / place):
            write_run(folder / place / load.MERGED, run)
    rows = scaled_rows(runs)
    write_json(folder / ROWS, [asdict(row) for row in rows])
    write_bytes(folder / SHORT, (render_markdown(runs) + "\n").encode())
    (folder / PICTURE).unlink(missing_ok=True)  # of an earlier report
    try:
        from report import charts  # what draws may be absent or broken; the table must not be

        if shown := bars(rows):
            write_bytes(folder / PICTURE, charts.scaling_png(shown))
    except Exception as error:
        return [f"no {PICTURE} ({one_line(error)}): pip install -r requirements.txt"]
    return []


def bars(rows: list[Scaled]) -> list[tuple[str, float | None, dict[str, float], str]]:
    """For the picture: name, efficiency, what it lost by category, and the label of every row on several GPUs."""
    several = [row for row in rows if row.gpus > 1]
    if not any(row.efficiency for row in several):
        return []  # of what one GPU cannot train
    return [
        (f"step {row.step[0]}, {row.parallel} x{row.gpus}", row.efficiency, row.lost or {},
         efficiency_cell(row) if row.status == "ok" else row.status)
        for row in several
    ]  # fmt: skip


def summary(recorded: dict[str, dict[str, Run]]) -> str:
    """A table of recorded runs, by name: each step alone, by DDP and by FSDP2."""
    cells = []
    for name, runs in recorded.items():
        rows = scaled_rows(runs)
        for step, gpus in dict.fromkeys((row.step, row.gpus) for row in rows if row.gpus > 1):
            by = {row.parallel: row for row in reversed(rows) if row.step == step and row.gpus in (1, gpus)}
            short = [cell for how in (None, "ddp", "fsdp") for cell in _short(by.get(how))]
            cells.append((name, step, str(gpus), *short))
    headers = [f"{how}, {what}" for how in ("alone", "DDP", "FSDP2") for what in ("ms", "GiB")]
    return table.pipe(table.grid(("recording", "step", "GPUs", *headers), cells))


def _short(row: Scaled | None) -> tuple[str, str]:
    """`171.2 (92.5 %)` and `38.3`, or the status of a row that has no time."""
    if row is None or row.status != "ok":
        return (row.status if row else "-"), "-"
    share = efficiency_cell(row)
    return f"{row.median_ms:.1f}" + f" ({share})" * (share != "-"), _gib(row)


def _gib(row: Scaled) -> str:
    return table.figure(row.peak_allocated_bytes and row.peak_allocated_bytes / analysis.GIB, ".1f")
