"""Several GPUs: how fast each of them is compared with one alone, and where the rest of its time goes.

The runs of a scaling study are its places: `1`, `2-ddp`, `2-fsdp`, and `1-launched` with rows that are not
captured. A row is compared with the same script on one GPU, captured as a CUDA graph or launched as the row
itself was.
"""

from dataclasses import dataclass

from common.record import Study, Workload
from report.figures import GAPS, Line, figures, ratio
from report.table import LAUNCH, number, only_filled, percent, status_or_ms, tflops

MOST_LEFT = 0.1  # of a step, that its kernels leave unexplained: beyond it, they explain nothing
UNLIKE = "*"  # behind an efficiency: one of the two rows was captured, and the other was launched
WORDS = {"ddp": "DDP", "fsdp": "FSDP2", None: "alone", "communication": "exposed communication"}
REST = "rest"  # what the kernels leave: gaps, less what counts twice because two ran at the same time
SHOWN = 0.0005  # of a step: less is not shown


@dataclass
class Scaled:
    """A row of one place."""

    line: Line
    work: Workload | None
    gpus: int
    parallel: str | None  # ddp, fsdp; None of one GPU
    captured: bool | None
    alone: Line | None = None  # the row on one GPU that it is compared with
    efficiency: float | None = None  # tokens/s of each GPU over those of one GPU alone
    exposed_ms: float | None = None  # communication in which nothing else ran
    overlapped_ms: float | None = None
    lost: dict[str, float] | None = None  # by category, what the step has more than alone, as shares of it

    def names(self) -> dict[str, str]:
        how = f"{WORDS.get(self.parallel, self.parallel)}, {LAUNCH[self.captured]}"
        return {"step": self.line.name, "how": how, "GPUs": str(self.gpus)}

    def share(self) -> str:
        """The efficiency in words; a dash of what is compared with itself."""
        if self.efficiency is None or self.alone is self.line:
            return "-"
        unlike = UNLIKE * (bool(self.alone.row.settings.captured) != bool(self.captured))
        return percent(self.efficiency) + ratio(self.line, self.alone).mark + unlike


def scaled(study: Study) -> list[Scaled]:
    """Every row of every place, those of one script side by side."""
    rows = []
    for place, run in sorted(study.runs.items()):
        gpus, parallel = _of_place(place, run.workload)
        for line in figures(run, study.runs.values()).steps:
            rows.append(Scaled(line, run.workload, gpus, parallel, line.row.settings.captured))
    for row in rows:
        alone = [one for one in rows if one.line.name == row.line.name and one.line.ms and one.gpus == 1]
        if row.line.ms and row.work:
            _compare(row, alone)
    return sorted(rows, key=lambda row: (row.line.name, row.gpus))


def _of_place(place: str, work: Workload | None) -> tuple[int, str | None]:
    """GPUs of a place, and how they share the model: of one without a finished row, by its name."""
    if work:
        return work.gpus, work.parallel
    number, _, how = place.partition("-")
    return int(number) if number.isdecimal() else 1, how if how in WORDS else None


def _compare(row: Scaled, alone: list[Scaled]) -> None:
    line = row.line
    alone = sorted(alone, key=lambda one: bool(one.captured) != bool(row.captured))[
        :1
    ]  # one that ran alike, if any
    for one in alone:
        row.alone = one.line
        row.efficiency = line.tokens_per_s / row.gpus / one.line.tokens_per_s
    if row.gpus > 1 and line.category_ms:
        row.exposed_ms = line.category_ms["communication"]
        row.overlapped_ms = max(0.0, line.row.profile.communication_ms - row.exposed_ms)
        for one in (one for one in alone if one.line.category_ms):
            there = one.line.category_ms  # of a batch as large on each GPU: all add up to 1 - efficiency
            lost = {
                name: (ms - there[name]) / line.ms for name, ms in line.category_ms.items() if name != GAPS
            }
            rest = 1 - row.efficiency - sum(lost.values())
            row.lost = lost | {REST: rest} if abs(rest) <= MOST_LEFT else None


def main_rows(rows: list[Scaled]) -> list[dict]:
    """A line a row."""
    cells = [
        one.names()
        | {
            "ms": status_or_ms(one.line),
            "efficiency": one.share(),
            "tokens/s per GPU": number(one.line.tokens_per_s and one.line.tokens_per_s / one.gpus, ",.0f"),
            "TFLOP/s per GPU": tflops(one.line.flops_per_s),
            "exposed ms": number(one.exposed_ms),
            "overlapped ms": number(one.overlapped_ms),
            "GiB per GPU": number(one.line.gib),
            "MHz": number(one.line.row.clock_mhz, ",.0f"),
        }
        for one in rows
    ]
    return only_filled(cells)


def lost_rows(rows: list[Scaled]) -> list[dict]:
    """A line a row on several GPUs: what is missing to 100 %, and where it went, in per cent of the step."""
    explained = [one for one in rows if one.lost]
    every = explained[0].lost if explained else {}
    names = [name for name in every if any(abs(one.lost[name]) >= SHOWN for one in explained)]
    cells = [(one, {WORDS.get(name, name): percent(one.lost[name]) for name in names}) for one in explained]
    return [one.names() | {"missing": percent(1 - one.efficiency)} | row for one, row in cells]


def tables(study: Study) -> dict[str, list[dict]]:
    rows = scaled(study)
    title = (
        "Efficiency: tokens/s of each GPU over those of one alone. "
        "Exposed: communication while nothing else runs."
    )
    if any(UNLIKE in row.share() for row in rows):
        title += f" {UNLIKE}: one of the two rows was captured, and the other was launched."
    lost = "Where the missing per cents go, as shares of the step (rest: gaps, less kernels that overlap):"
    return {title: main_rows(rows), lost: lost_rows(rows)}
