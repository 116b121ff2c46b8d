"""Charts with axes, drawn by matplotlib from plain numbers: SVG text for the page, PNG for a slide.

Text and axes take the color of the page around them, so that one chart serves light, dark and paper. Names come
from records: they are shortened, and never read as markup.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import matplotlib
import matplotlib.colors
import matplotlib.patches
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.text import one_line
from report.drawn import CATEGORY_COLORS, LONGEST_LABEL, LONGEST_NAME, PLAIN
from report.parity import Curve
from report.table import tflops

INK = "#123457"  # stands for the page's own text color, see _svg
FAINT = "#9aa5b1"
# Okabe and Ito's colors, as in report/drawn.py.
SERIES_COLORS = ("#d55e00", "#e69f00", "#009e73", "#56b4e9", "#0072b2", "#cc79a7", "#8a6d3b", "#9aa5b1")
FASTER, SLOWER, FULL_RATIO = "#0072b2", "#d55e00", 3  # of a heat map
BAR = 0.62  # of the height of a step's line
LINES = ("-", "--", "-.", ":", (0, (5, 1)))  # styles of curves
WIDTH_IN = 5.0  # small, so that text stays legible on a phone
MOST_POINTS = 1000  # of one curve
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
}


def roofline(points: list[tuple[str, float, float]], copy_bytes_per_s: float, roofs: dict[str, float]) -> str:
    """SVG of measured ceilings, their ridge points, and steps as (name, FLOP per byte, FLOP/s)."""
    with _figure(3.6) as figure:
        axes = figure.subplots()
        slope = copy_bytes_per_s / 1e12  # TFLOP/s per FLOP/byte
        ridges = {name: rate / copy_bytes_per_s for name, rate in roofs.items()}
        xs = [*ridges.values(), *(intensity for _, intensity, _ in points)]
        left, right = min(xs) / 4, max(xs) * 20
        for name, rate in roofs.items():
            axes.plot([left, ridges[name], right], [left * slope, rate / 1e12, rate / 1e12], color=FAINT, linewidth=1.2)
            axes.plot(ridges[name], rate / 1e12, marker="D", color=INK, markersize=4)
            axes.text(right, rate / 1e12, f"{name} {tflops(rate)}", va="bottom", ha="right", fontsize=8)
        for index, (name, intensity, rate) in enumerate(points):
            color, on_left = SERIES_COLORS[index % len(SERIES_COLORS)], index % 2 == 0
            shift, ha = (0.83, "right") if on_left else (1.2, "left")
            axes.plot(intensity, rate / 1e12, marker="o", color=color, linestyle="none", markersize=7)
            axes.text(intensity * shift, rate / 1e12, one_line(name, LONGEST_NAME), va="center", ha=ha, fontsize=8)
        axes.set(xscale="log", yscale="log", xlim=(left, right), xlabel="model FLOP per byte", ylabel="TFLOP/s")
        for axis, marks in ((axes.xaxis, (1,)), (axes.yaxis, (1, 2, 5))):
            axis.set_major_locator(matplotlib.ticker.LogLocator(subs=marks, numticks=12))
            axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
            axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        return _svg(figure, "roofline")


def loss_curves(curves: list[tuple[str, list[float]]]) -> str:
    """SVG of the loss of every training step, and below it the difference to the first curve."""
    with _figure(4.6) as figure:
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        reference = curves[0][1]
        for index, (name, losses) in enumerate(curves):
            color, style = SERIES_COLORS[index % len(SERIES_COLORS)], LINES[index % len(LINES)]
            every = math.ceil(len(losses) / MOST_POINTS) or 1
            look = {"color": color, "linestyle": style, "linewidth": 1.4, "marker": "o" if len(losses) == 1 else None}
            above.plot(range(0, len(losses), every), losses[::every], label=one_line(name, LONGEST_NAME), **look)
            if losses is not reference:
                gaps = [b - a for a, b in zip(reference, losses, strict=False)]
                below.plot(range(0, len(gaps), every), gaps[::every], **look)
        above.set_ylabel("loss, nats")
        above.legend(fontsize=8)
        below.axhline(0, color=INK, linewidth=0.7)
        below.set(xlabel="training step, warm-up included", ylabel="difference, nats")
        return _svg(figure, "loss")


def speedup_png(rows: list[tuple[str, float | None, str]], title: str) -> bytes:
    """A PNG for a README or a slide, on white: times faster than the first step.

    A row is (name, ratio or None, label).
    """
    height_in = 0.55 * len(rows) + 1.1
    with _steps_figure([name for name, *_ in rows], height_in, "times faster than the first row") as (figure, axes):
        top = max((ratio for _, ratio, _ in rows if ratio), default=1.0)
        for row, (_, ratio, label) in enumerate(rows):
            axes.barh(row, ratio or 0.0, color=PLAIN, height=0.66)
            _label(axes, (ratio or 0.0) + 0.012 * top, row, label)
        axes.set_xlim(0, 1.3 * top)
        figure.suptitle(one_line(title, 100), fontsize=9.5)
        return _png(figure)


def scaling_png(rows: list[tuple[str, float | None, dict[str, float], str]]) -> bytes:
    """A PNG, on white: a bar of 100 % per row on several GPUs, of its efficiency and of what was lost by category.

    A row is (name, efficiency or None, lost shares, label). A category that took less time than alone shows nothing.
    """
    names = [name for name in CATEGORY_COLORS if any(lost.get(name, 0.0) > 0.001 for _, _, lost, _ in rows)]
    height_in = 0.42 * len(rows) + 0.9 + 0.22 * math.ceil((len(names) + 1) / 2)
    with _steps_figure([name for name, *_ in rows], height_in, "% of the step") as (figure, axes):
        for row, (_, efficiency, lost, label) in enumerate(rows):
            left = 100 * (efficiency or 0.0)
            axes.barh(row, left, color=PLAIN, alpha=0.45, height=BAR)
            _label(axes, 1, row, label)
            for name in names:
                width = max(0.0, 100 * lost.get(name, 0.0))
                axes.barh(row, width, left=left, color=CATEGORY_COLORS[name], height=BAR)
                left += width
        whole = {"what one GPU alone needs": (*matplotlib.colors.to_rgb(PLAIN), 0.45)}
        said = {"communication": "exposed communication"}
        colors = whole | {said.get(name, name): CATEGORY_COLORS[name] for name in names}
        handles = [matplotlib.patches.Patch(color=color, label=name) for name, color in colors.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
        axes.axvline(100, color=INK, linewidth=0.7)
        return _png(figure)


def seed_curves_png(panels: dict[str, dict[str, Curve]], every: int) -> bytes:
    """A PNG, on white, of panels one below the other: losses over training steps, a point per `every` steps.

    A panel has a label for its losses and a curve per row; the range between seeds is a band. A row has the same
    colour in all panels.
    """
    rows = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    with _figure(2.7 * len(panels) + 0.1 * len(rows)) as figure:
        drawn = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, (label, curves) in zip(drawn, panels.items(), strict=True):
            for name, points in curves.items():
                color, style = (each[rows.index(name) % len(each)] for each in (SERIES_COLORS, LINES))
                steps = [every * (k + 0.5) for k in range(len(points))]
                means, smallest, largest = zip(*points, strict=True)
                label_of_row = one_line(name, LONGEST_LABEL)
                axes.plot(steps, means, label=label_of_row, color=color, linestyle=style, linewidth=1.4)
                axes.fill_between(steps, smallest, largest, color=color, alpha=0.2, linewidth=0)
            axes.set(ylabel=label)
        for axes in drawn[1:]:
            axes.axhline(0, color=FAINT, linewidth=0.8)
        figure.legend(*drawn[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8)
        drawn[-1].set(xlabel="training step")
        return _png(figure)


@dataclass
class HeatMap:
    """Figures by row and column, each with its text: ratios, or with `kinds` the index of one."""

    title: str
    rows: list[object]
    columns: list[str]
    kinds: list[str] = field(default_factory=list)
    cells: dict[tuple[int, int], tuple[float | None, str]] = field(default_factory=dict)


def heat_map(drawn: HeatMap) -> str:
    """SVG of a heat map."""
    with _figure(0.34 * len(drawn.rows) + 1.1) as figure:
        _draw_heat_map(figure.subplots(), drawn)
        return _svg(figure, f"heat-{drawn.title}")


def heat_maps_png(maps: list[HeatMap]) -> bytes:
    """A PNG of heat maps one below the other, on white."""
    with _figure(sum(0.34 * len(drawn.rows) + 1.1 for drawn in maps)) as figure:
        for axes, drawn in zip(figure.subplots(len(maps), squeeze=False)[:, 0], maps, strict=True):
            _draw_heat_map(axes, drawn)
        return _png(figure)


def _draw_heat_map(axes: Axes, drawn: HeatMap) -> None:
    for (row, column), (value, text) in drawn.cells.items():
        known = value is not None
        color = (SERIES_COLORS[int(value)] if drawn.kinds else ratio_color(value)) if known else "none"
        look = {"facecolor": color, "edgecolor": FAINT, "hatch": None if known else "///", "linewidth": 0.5}
        axes.add_patch(matplotlib.patches.Rectangle((column - 0.5, row - 0.5), 1, 1, **look))
        dark = known and sum(matplotlib.colors.to_rgb(color)) < 1.4
        ink = ("white" if dark else "black") if known else INK
        axes.text(column, row, one_line(text, 12), ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(len(drawn.columns)), drawn.columns, fontsize=8)
    axes.set_yticks(range(len(drawn.rows)), drawn.rows)
    axes.set(xlim=(-0.5, len(drawn.columns) - 0.5), ylim=(-0.5, len(drawn.rows) - 0.5), ylabel="channels")
    axes.set_title(one_line(drawn.title, LONGEST_LABEL), fontsize=9)
    axes.tick_params(length=0)


def ratio_color(ratio: float) -> tuple[float, ...]:
    """White at 1, blue where a step is faster, orange where it is slower: full at FULL_RATIO times."""
    end = matplotlib.colors.to_rgb(FASTER if ratio >= 1 else SLOWER)
    share = min(1.0, abs(math.log(ratio)) / math.log(FULL_RATIO))
    return tuple(1 - share * (1 - part) for part in end)


@contextmanager
def _figure(height_in: float) -> Iterator[Figure]:
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a user's matplotlibrc may ask for LaTeX, which may be absent
        matplotlib.rcParams.update(STYLE)
        warnings.simplefilter("ignore", UserWarning)  # a name from a record may hold a glyph that the font lacks
        yield Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


@contextmanager
def _steps_figure(names: list[str], height_in: float, xlabel: str) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one line per step, the first on top."""
    with _figure(height_in) as figure:
        axes = figure.subplots()
        axes.set_yticks(range(len(names)), [one_line(name, LONGEST_NAME) for name in names])
        axes.set(ylim=(len(names) - 0.4, -0.6), xlabel=xlabel)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        yield figure, axes


def _label(axes: Axes, x: float, row: int, text: str) -> None:
    axes.text(x, row, one_line(text, LONGEST_LABEL), va="center")


def _png(figure: Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return written.getvalue()


def _svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element that fits its container; ids are made unique among charts by `name`."""
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{re.sub('[^a-zA-Z]', '', name)}-", text)
    opening, rest = text.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", opening) + ">" + rest
