"""Several GPUs: how fast each of them is compared with one alone, and where the rest of its time goes.

The runs of a scaling study are its places: `1`, `2-ddp`, `2-fsdp`, and `1-launched` with rows that are not
captured. A row is compared with the same script on one GPU, captured as a CUDA graph or launched as the row
itself was.
"""

from dataclasses import dataclass

from common.record import Study
from report.cells import LAUNCH, number, percent, tflops, time_or_status
from report.derive import derive_study
from report.figures import GAPS, Line, ratio
from report.table import only_filled

MOST_LEFT = 0.1  # of a step, that its kernels leave unexplained: beyond it, they explain nothing
UNLIKE = "*"  # behind an efficiency: one of the two rows was captured, and the other was launched
WORDS = {"ddp": "DDP", "fsdp": "FSDP2", None: "alone", "communication": "exposed communication"}
REST = "rest"  # what the kernels leave: gaps, less what counts twice because two ran at the same time
SHOWN = 0.0005  # of a step: less is not shown


@dataclass
class Scaled:
    """A row of one place."""

    line: Line
    gpus: int
    parallel: str | None  # ddp, fsdp; None for one GPU
    alone: Line | None = None  # the row on one GPU that it is compared with
    efficiency: float | None = None  # tokens/s of each GPU over those of one GPU alone
    exposed_ms: float | None = None  # communication in which nothing else ran
    overlapped_ms: float | None = None
    lost: dict[str, float] | None = None  # by category, what the step has more than alone, as shares of it

    @property
    def captured(self) -> bool | None:
        return self.line.row.settings.captured

    def names(self) -> dict[str, str]:
        how = f"{WORDS[self.parallel]}, {LAUNCH[self.captured]}"
        return {"step": self.line.name, "how": how, "GPUs": str(self.gpus)}

    def share(self) -> str:
        """The efficiency in words; a dash of what is compared with itself."""
        if self.efficiency is None or self.alone is self.line:
            return "-"
        unlike = bool(self.alone.row.settings.captured) != bool(self.captured)
        return f"{percent(self.efficiency)}{ratio(self.line, self.alone).mark}{UNLIKE if unlike else ''}"


def scaled(study: Study) -> list[Scaled]:
    """Every row of every place, those of one script side by side."""
    rows = []
    for place, figures in sorted(derive_study(study).items()):
        number, _, how = place.partition("-")
        rows += [Scaled(line, int(number), how if how in WORDS else None) for line in figures.steps]
    for row in rows:
        alone = [other for other in rows if other.line.name == row.line.name and other.gpus == 1]
        _compare(row, [other for other in alone if other.line.tokens_per_s])
    return sorted(rows, key=lambda row: (row.line.name, row.gpus))


def _compare(row: Scaled, alone: list[Scaled]) -> None:
    """Fill what a row of several GPUs has more than the same row on one, of which `alone` are the ways to
    run."""
    line = row.line
    if not line.tokens_per_s:
        return
    if row.gpus > 1 and line.category_ms:
        row.exposed_ms = line.category_ms["communication"]
        row.overlapped_ms = max(0.0, line.row.profile.communication_ms - row.exposed_ms)
    if not alone:
        return
    alike = [other for other in alone if bool(other.captured) == bool(row.captured)]
    row.alone = (alike or alone)[0].line
    row.efficiency = line.tokens_per_s / row.gpus / row.alone.tokens_per_s
    if row.gpus > 1 and line.category_ms and row.alone.category_ms:
        row.lost = _split_missing(line, row.alone.category_ms, row.efficiency)


def _split_missing(line: Line, alone_ms: dict[str, float], efficiency: float) -> dict[str, float] | None:
    """By kind of kernel, what a step has more than alone, as shares of it; None where they explain too
    little.

    Each GPU has a batch as large as the one alone, so all shares add up to 1 - efficiency.
    """
    lost = {name: (ms - alone_ms[name]) / line.ms for name, ms in line.category_ms.items() if name != GAPS}
    rest = 1 - efficiency - sum(lost.values())
    return lost | {REST: rest} if abs(rest) <= MOST_LEFT else None


def main_rows(rows: list[Scaled]) -> list[dict]:
    """A line a row."""
    cells = []
    for row in rows:
        line = row.line
        each = line.tokens_per_s / row.gpus if line.tokens_per_s else None
        cells.append(
            row.names()
            | {
                "ms": time_or_status(line),
                "efficiency": row.share(),
                "tokens/s per GPU": number(each, ",.0f"),
                "TFLOP/s per GPU": tflops(line.flops_per_s),
                "exposed ms": number(row.exposed_ms),
                "overlapped ms": number(row.overlapped_ms),
                "GiB per GPU": number(line.gib),
                "MHz": number(line.row.clock_mhz, ",.0f"),
            }
        )
    return only_filled(cells)


def lost_rows(rows: list[Scaled]) -> list[dict]:
    """A line a row on several GPUs: what is missing to 100 %, and where it went, in per cent of the step."""
    explained = [row for row in rows if row.lost]
    names = [
        name
        for name in (explained[0].lost if explained else ())
        if any(abs(row.lost[name]) >= SHOWN for row in explained)
    ]
    cells = []
    for row in explained:
        missing = {"missing": percent(1 - row.efficiency)}
        parts = {WORDS.get(name, name): percent(row.lost[name]) for name in names}
        cells.append(row.names() | missing | parts)
    return cells


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
