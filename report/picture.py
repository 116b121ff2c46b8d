"""The picture of a ladder: the lines of code that each step adds, and where the milliseconds of its training
step go.

Everything is placed in CSS pixels of the picture's own width: `WIDE` for a page, `NARROW` for a phone.
"""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.textpath import TextPath

from common.text import one_line
from report.changes import added_groups
from report.charts import CATEGORY_COLORS, INK, PAPER, PLAIN, SOFT, figure
from report.figures import Figures, Line

WIDE, NARROW = 830, 390
MOST_LINES = 8  # of code in a row
ATTENTION = "softmax"  # what lines of attention that is written out contain
PIXELS_A_POINT = 100 / 72  # a figure has 100 pixels an inch
LONG = 1.6  # times the second longest bar: a longer one is broken


@dataclass
class Layout:
    """Where things stand, in pixels."""

    width: int
    code_px: float  # size of the code's letters
    code_columns: int  # longer lines are cut
    bars_left: float
    bars_right: float
    stacked: bool  # bars below the code, and not beside it


LAYOUTS = {
    False: Layout(WIDE, code_px=9.6, code_columns=82, bars_left=500, bars_right=690, stacked=False),
    True: Layout(NARROW, code_px=10.0, code_columns=61, bars_left=12, bars_right=240, stacked=True),
}
LINE_PX, BAR_PX, ROW_GAP_PX, LEGEND_ROW_PX, HEADER_PX = 14.0, 16.0, 14.0, 16.0, 20.0


def picture(figures: Figures, narrow: bool = False, ink: str = INK, paper: str = PAPER) -> Figure:
    """The picture of a run's steps; `ink` is the color of text, and `paper` that of what lies behind."""
    layout, lines = LAYOUTS[narrow], figures.steps
    texts = [added_code(figures, k) for k in range(len(lines))]
    heights = [_row_height(layout, len(text)) for text in texts]
    legend = _legend_rows(layout, _categories(lines))
    total = HEADER_PX + sum(heights) + LEGEND_ROW_PX * len(legend) + 8
    with figure(total / 100, layout.width / 100) as drawn:
        drawn.set_layout_engine("none")
        axes = drawn.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, layout.width), ylim=(total, 0))
        axes.axis("off")
        end_ms = axis_end(lines)
        _draw_header(axes, layout, figures)
        top = HEADER_PX
        for line, text, height in zip(lines, texts, heights, strict=True):
            _draw_row(axes, layout, line, text, top, end_ms, (ink, paper))
            top += height
        _draw_legend(axes, legend, top + 4, ink)
    return drawn


# --- what a row says ------------------------------------------------------------------------------


def added_code(figures: Figures, k: int) -> list[str]:
    """The lines that step `k` adds: all, or the first ones, how many more, and the last one. Of the first
    step, the lines of attention, which the first step with fused attention replaces."""
    if k == 0:
        replaced = added_groups(figures.plain.row, figures.steps[0].row) if figures.plain else []
        for group in replaced:
            if ATTENTION in " ".join(group):
                return group
        return []
    if figures.steps[k].row.changes and not figures.steps[k].ms:
        return []  # what a model of yours did not take
    base = figures.steps[k].base or figures.steps[k - 1]
    added = [line for group in added_groups(base.row, figures.steps[k].row) for line in group]
    if len(added) > MOST_LINES:
        added[MOST_LINES - 1 : -1] = [f"... {len(added) - MOST_LINES} more lines, and"]
    return added


def label(line: Line) -> str:
    """What stands behind a bar: `159 ms, 19 x`; of the first row, which others are compared with, `3,072
    ms`."""
    if not line.ms:
        return line.row.status
    ms = f"{line.ms:,.0f}{line.mark} ms" if line.ms >= 100 else f"{line.ms:.1f}{line.mark} ms"
    faster = line.over_first
    return ms if faster is None or faster.value == 1 else f"{ms}, {faster.value:.1f}{faster.mark} x"


def axis_end(lines: list[Line]) -> float:
    """Milliseconds at the right end of the axis: those of the longest bar that is not broken."""
    longest = sorted((line.ms for line in lines if line.ms), reverse=True) or [1.0]
    broken = len(longest) > 1 and longest[0] > LONG * longest[1]
    return 1.15 * longest[1] if broken else longest[0]


# --- drawing --------------------------------------------------------------------------------------


def _row_height(layout: Layout, n_lines: int) -> float:
    text = LINE_PX * (n_lines + 1)
    bar = BAR_PX + 4
    return (text + bar if layout.stacked else max(text, bar + LINE_PX)) + ROW_GAP_PX


def _draw_header(axes: Axes, layout: Layout, figures: Figures) -> None:
    size, first = layout.code_px / PIXELS_A_POINT, figures.first.name if figures.first else ""
    left, right = "What each step adds", f"Its training step; x: times as fast as {first}"
    if layout.stacked:
        left, right = f"What each step adds; x: times as fast as {first}", ""
    axes.text(12.0, 4.0, left, va="top", color=SOFT, fontsize=size * 1.1)
    axes.text(layout.bars_left, 4.0, right, va="top", color=SOFT, fontsize=size * 1.1)


def _draw_row(
    axes: Axes,
    layout: Layout,
    line: Line,
    text: list[str],
    top: float,
    end_ms: float,
    colors: tuple[str, str],
) -> None:
    first, (ink, paper) = line.over_first is not None and line.over_first.value == 1.0, colors
    size, left = layout.code_px / PIXELS_A_POINT, 12.0
    axes.text(
        left, top, one_line(line.name, 40), va="top", color=ink, fontsize=size * 1.15, fontweight="bold"
    )
    for k, code in enumerate(text, 1):
        color, sign = (SOFT, " ") if first else (ink, "+")
        shown = one_line(f"{sign} {code}", layout.code_columns)
        axes.text(
            left, top + k * LINE_PX + 2, shown, va="top", color=color, fontsize=size, family="monospace"
        )
    bar_top = top + LINE_PX * (len(text) + 1) + 3 if layout.stacked else top + 1
    end = _draw_bar(axes, layout, line, bar_top, end_ms, paper)
    cut = " (bar cut short)" if line.ms and line.ms > end_ms else ""
    axes.text(end + 6, bar_top + BAR_PX / 2, label(line) + cut, va="center", color=ink, fontsize=size * 1.1)


def _draw_bar(axes: Axes, layout: Layout, line: Line, top: float, end_ms: float, paper: str) -> float:
    """A bar, stacked by kind of kernel; returns where it ends. One that is longer than the axis is broken."""
    scale, x = (layout.bars_right - layout.bars_left) / end_ms, layout.bars_left
    for name, ms in bar_parts(line).items():
        width = min(ms * scale, layout.bars_right - x)
        axes.add_patch(
            Rectangle((x, top), width, BAR_PX, color=CATEGORY_COLORS.get(name, PLAIN), linewidth=0, gid=name)
        )
        x += width
    if line.ms and line.ms > end_ms:
        cut = layout.bars_right - 26
        corners = [
            (cut, top + BAR_PX + 2),
            (cut + 7, top - 2),
            (cut + 13, top - 2),
            (cut + 6, top + BAR_PX + 2),
        ]
        axes.add_patch(Polygon(corners, color=paper, linewidth=0, gid="break"))
    return x


def bar_parts(line: Line) -> dict[str, float]:
    """Milliseconds by kind of kernel, which add up to the step's own time; of a row without a profile, the
    whole."""
    if not line.ms:
        return {}
    whole = sum(line.category_ms.values())
    if not whole:
        return {"step": line.ms}
    return {name: ms * line.ms / whole for name, ms in line.category_ms.items() if ms}


def _categories(lines: list[Line]) -> list[str]:
    timed = [line for line in lines if line.ms]
    shown = {name for line in timed for name, ms in line.category_ms.items() if ms >= 0.005 * line.ms}
    return [name for name in CATEGORY_COLORS if name in shown]


def _legend_rows(layout: Layout, names: list[str]) -> list[list[tuple[str, float]]]:
    """Names and where each begins, as many rows as they need."""
    rows, x = [], layout.width
    for name in names:
        width = 36 + TextPath((0, 0), name, size=10).get_extents().width
        if x + width > layout.width - 6:
            rows.append([])
            x = 12.0
        rows[-1].append((name, x))
        x += width
    return rows


def _draw_legend(axes: Axes, rows: list[list[tuple[str, float]]], top: float, ink: str) -> None:
    for k, row in enumerate(rows):
        for name, x in row:
            y = top + LEGEND_ROW_PX * k
            axes.add_patch(Rectangle((x, y), 10, 10, color=CATEGORY_COLORS[name], linewidth=0))
            axes.text(x + 15, y + 5, name, va="center", color=ink, fontsize=10 / PIXELS_A_POINT)
