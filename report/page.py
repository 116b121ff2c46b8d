"""The page of a run: one HTML file that needs no network.

All text comes from records that anybody may have written, so the template escapes everything; only the charts
of matplotlib, which escapes what it draws, are inserted as they are. Positions are computed here, in per
cent.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from report import charts, story, table
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


def render(made: Figures) -> str:
    """The page of a run."""
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    ).get_template("page.html")
    names = {name for line in made.timed for name, ms in line.category_ms.items() if ms}
    profiled = [line for line in made.steps if line.category_ms]
    launches = [
        launch for line in profiled for launch in (*line.row.profile.forward, *line.row.profile.backward)
    ]
    in_blocks = {launch.category for launch in launches}
    return template.render(
        made=made,
        headline=table.headline(made),
        machine=table.describe_machine(made.environment),
        workload=table.describe_workload(made.run.workload),
        convention=table.CONVENTION,
        cpu_shows=table.CPU_SHOWS if made.environment.device_type == "cpu" else "",
        loss_rule=loss_rule(made.timed),
        picture=charts.svg(picture(made)),
        narrow_picture=charts.svg(picture(made, narrow=True)),
        rows=table.table_rows(made, extent=True),
        bars=list(zip(time_bars(made.lines), map(share_bar, made.lines), strict=True)),
        legend={name: color for name, color in charts.CATEGORY_COLORS.items() if name in names},
        categories=table.category_rows(made),
        limits=table.limit_rows(made),
        cards=[(card, time_bars(card.pair)) for card in story.cards(made)],
        block_legend={name: color for name, color in charts.CATEGORY_COLORS.items() if name in in_blocks},
        blocks=[
            block_bar(line)
            for line in made.steps
            if line.category_ms and line.row.profile.forward and line.row.profile.backward
        ],
        memory=memory_bars([line for line in made.timed if line.gib]),
        roofs=table.roof_rows(made.run.roofs) if made.run.roofs else [],
        loss=charts.loss_svg(made) if any(line.row.loss for line in made.timed) else "",
        settings=[{"step": line.name} | vars(line.row.settings) for line in made.lines],
        environment={**asdict(made.environment), "versions": None} | made.environment.versions,
    )


def boxes(parts: dict[str, float], whole: float) -> list[Box]:
    """The parts of a bar, one behind the other."""
    found, x = [], 0.0
    for name, ms in parts.items():
        color = charts.CATEGORY_COLORS.get(name, charts.PLAIN)
        found.append(Box(x, 100 * ms / whole, color, f"{name}: {ms:,.2f} ms"))
        x += 100 * ms / whole
    return found


def time_bars(lines: list[Line]) -> list[Bar]:
    """The time of every row by kind of kernel, at one scale."""
    longest = max((max(line.ms, sum(line.category_ms.values())) for line in lines if line.ms), default=1.0)
    found = []
    for line in lines:
        bar = Bar(line.name, f"{table.status_or_ms(line)} ms" if line.ms else line.why_untimed, [])
        if line.ms and not line.category_ms:
            bar.label += ", without a profile"
        if line.ms:
            bar.boxes = boxes(line.category_ms or {"step": line.ms}, longest)
        if line.ms and line.row.predicted_ms:
            bar.label += f", predicted {table.ms_number(line.row.predicted_ms)}"
            bar.mark = min(100.0, 100 * line.row.predicted_ms / longest)
        found.append(bar)
    return found


def share_bar(line: Line) -> Bar | None:
    """The time of a row by kind of kernel, as shares of itself; None of one without a profile."""
    if not line.category_ms:
        return None
    largest = f"{line.share[0]} {line.share[1]:.0%}" if line.share else ""
    return Bar(line.name, largest, boxes(line.category_ms, sum(line.category_ms.values()) or 1.0))


def block_bar(line: Line) -> Bar:
    """The kernels of one transformer block, forward and then backward, as wide as the page."""
    profile, found = line.row.profile, []
    forward_ms, backward_ms = (
        half[-1].start_ms + half[-1].ms for half in (profile.forward, profile.backward)
    )
    whole = (forward_ms + backward_ms) or 1.0
    for launches, begin in ((profile.forward, 0.0), (profile.backward, forward_ms)):
        for one in launches:
            title = f"{story.readable(one.name)}: {one.ms:.3f} ms"
            x, width = 100 * (begin + one.start_ms) / whole, 100 * one.ms / whole
            found.append(Box(x, width, charts.CATEGORY_COLORS[one.category], title))
    return Bar(line.name, f"forward {forward_ms:.2f} ms, backward {backward_ms:.2f} ms", found)


def memory_bars(lines: list[Line]) -> list[Bar]:
    """Peak memory of every row, at one scale."""
    largest = max((line.gib for line in lines), default=1.0)
    labels = [(line, f"{line.gib:.1f} GiB") for line in lines]
    return [
        Bar(line.name, label, [Box(0, 100 * line.gib / largest, charts.PLAIN, label)])
        for line, label in labels
    ]
