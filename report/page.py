"""The page of a run: one HTML file that needs no network.

All text comes from records that anybody may have written, so the template escapes everything; only the charts
of matplotlib, which escapes what it draws, are inserted as they are. Positions are computed here, in per
cent.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.kernels import in_words
from common.record import Kernel
from report import charts, proof, sentences, story, table
from report.cells import milliseconds, time_or_status
from report.figures import Figures, Line, loss_rule
from report.picture import picture


@dataclass
class Box:
    """A part of a bar, in per cent of the bar's width."""

    x: float
    width: float
    color: str
    title: str


@dataclass
class Bar:
    name: str
    label: str
    boxes: list[Box]
    mark: float | None = None  # a prediction on the same scale, in per cent


def render(figures: Figures) -> str:
    """The page of a run."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    blocks = [line for line in figures.steps if line.category_ms and _has_block(line)]
    machine = figures.environment
    return environment.get_template("page.html").render(
        figures=figures,
        headline=sentences.headline(figures),
        machine=sentences.describe_machine(machine),
        workload=sentences.describe_workload(figures.run.workload),
        convention=sentences.convention(figures),
        on_cpu=machine.device_type == "cpu",
        loss_rule=loss_rule(figures),
        picture=charts.svg(picture(figures)),
        narrow_picture=charts.svg(picture(figures, narrow=True)),
        rows=table.main_rows(figures, detailed=True),
        bars=list(zip(time_bars(figures.lines), map(share_bar, figures.lines), strict=True)),
        legend=legend({name for line in figures.timed for name, ms in line.category_ms.items() if ms}),
        categories=table.category_rows(figures),
        limits=table.limit_rows(figures),
        proofs=table.proof_rows(figures),
        limits_of_proof=proof,
        in_fp8=any(line.row.settings.fp8_recipe for line in figures.lines),
        predicted=any(line.row.predicted_ms for line in figures.lines),
        cards=[(card, time_bars(card.pair)) for card in story.cards(figures)],
        block_legend=legend({launch.category for line in blocks for launch in _launches(line)}),
        blocks=[block_bar(line) for line in blocks],
        memory=memory_bars([line for line in figures.timed if line.gib]),
        roofs=table.roof_rows(figures.run.roofs) if figures.run.roofs else [],
        loss=charts.svg(charts.loss_figure(figures)) if any(line.row.loss for line in figures.timed) else "",
        settings=[{"step": line.name} | asdict(line.row.settings) for line in figures.lines],
        environment={**asdict(machine), "versions": None, "variables": None}
        | machine.versions
        | machine.variables,
    )


def legend(names: set[str]) -> dict[str, str]:
    """The colors of these kinds of kernels, in the order of a bar."""
    return {name: color for name, color in charts.CATEGORY_COLORS.items() if name in names}


def _has_block(line: Line) -> bool:
    return bool(line.row.profile.forward and line.row.profile.backward)


def _launches(line: Line) -> list[Kernel]:
    """The kernels of one transformer block, forward and backward."""
    return [*line.row.profile.forward, *line.row.profile.backward]


def boxes_of(parts: dict[str, float], whole: float) -> list[Box]:
    """The parts of a bar, one behind the other."""
    boxes, x = [], 0.0
    for name, ms in parts.items():
        color = charts.CATEGORY_COLORS.get(name, charts.PLAIN)
        boxes.append(Box(x, 100 * ms / whole, color, f"{name}: {ms:,.2f} ms"))
        x += 100 * ms / whole
    return boxes


def time_bars(lines: list[Line]) -> list[Bar]:
    """The time of every row by kind of kernel, at one scale."""
    longest = max((max(line.ms, sum(line.category_ms.values())) for line in lines if line.ms), default=1.0)
    bars = []
    for line in lines:
        bar = Bar(line.name, f"{time_or_status(line)} ms" if line.ms else line.why_untimed, [])
        if line.ms and not line.category_ms:
            bar.label += ", without a profile"
        if line.ms:
            bar.boxes = boxes_of(line.category_ms or {"step": line.ms}, longest)
        if line.ms and line.row.predicted_ms:
            bar.label += f", predicted {milliseconds(line.row.predicted_ms)}"
            bar.mark = min(100.0, 100 * line.row.predicted_ms / longest)
        bars.append(bar)
    return bars


def share_bar(line: Line) -> Bar | None:
    """The time of a row by kind of kernel, as shares of itself; None of one without a profile."""
    if not line.category_ms:
        return None
    largest = f"{line.share[0]} {line.share[1]:.0%}" if line.share else ""
    return Bar(line.name, largest, boxes_of(line.category_ms, sum(line.category_ms.values())))


def block_bar(line: Line) -> Bar:
    """The kernels of one transformer block, forward and then backward, as wide as the page."""
    profile, boxes = line.row.profile, []
    forward_ms, backward_ms = _end_ms(profile.forward), _end_ms(profile.backward)
    whole = (forward_ms + backward_ms) or 1.0
    for launches, begin in ((profile.forward, 0.0), (profile.backward, forward_ms)):
        for launch in launches:
            x, width = 100 * (begin + launch.start_ms) / whole, 100 * launch.ms / whole
            title = f"{in_words(launch.name)}: {launch.ms:.3f} ms"
            boxes.append(Box(x, width, charts.CATEGORY_COLORS[launch.category], title))
    return Bar(line.name, f"forward {forward_ms:.2f} ms, backward {backward_ms:.2f} ms", boxes)


def _end_ms(launches: list[Kernel]) -> float:
    return launches[-1].start_ms + launches[-1].ms


def memory_bars(lines: list[Line]) -> list[Bar]:
    """Peak memory of every row, at one scale."""
    largest = max((line.gib for line in lines), default=1.0)
    bars = []
    for line in lines:
        label = f"{line.gib:.1f} GiB"
        bars.append(Bar(line.name, label, [Box(0, 100 * line.gib / largest, charts.PLAIN, label)]))
    return bars
