"""Curves, drawn by matplotlib: SVG for the page, whose color they take, and PNG on white. Bars are not drawn
here.

Names come from records: they are shortened, and never read as markup or as formulas.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from common.text import one_line
from report.figures import Figures

CURVES = ("#d55e00", "#e69f00", "#009e73", "#56b4e9", "#0072b2", "#cc79a7", "#8a6d3b", "#9aa5b1")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)))
INK = "#123457"  # stands for the page's own color of text, see `svg`
MOST_POINTS = 2000  # of a curve
WIDTH_IN = 5.0  # small, so that text stays legible on a phone
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    "axes.prop_cycle": cycler(color=CURVES * 5, linestyle=DASHES * 8),
    "svg.hashsalt": "ladder",
}


@contextmanager
def styled() -> Iterator[None]:
    """The style of all pictures, while they are drawn and while they are written."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a user's matplotlibrc may ask for LaTeX, which may be absent
        matplotlib.rcParams.update(STYLE)
        # A name from a record may hold a letter that the font lacks.
        warnings.simplefilter("ignore", UserWarning)
        yield


@contextmanager
def figure(height_in: float) -> Iterator[Figure]:
    with styled():
        yield Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def png(drawn: Figure) -> bytes:
    written = io.BytesIO()
    with styled():
        drawn.savefig(written, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return written.getvalue()


def svg(drawn: Figure) -> str:
    """The figure as an <svg> element, which style.css fits to its container."""
    written = io.StringIO()
    with styled():
        # So that the same figure is the same text.
        drawn.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = written.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    used = set(re.findall(r"#([\w-]+)", text))
    return re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)


def plain_numbers(axis: matplotlib.axis.Axis, marks: tuple[int, ...]) -> None:
    """Label a logarithmic axis with plain numbers in place of powers of ten."""
    axis.set_major_locator(LogLocator(subs=marks, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def loss_figure(figures: Figures) -> Figure:
    """The loss of every training step, and below it the difference to the first row."""
    rows = [line.row for line in figures.timed if line.row.loss]
    with figure(4.6) as drawn:
        above, below = drawn.subplots(2, sharex=True, height_ratios=(3, 2))
        for row in rows:
            every = math.ceil(len(row.loss) / MOST_POINTS)  # of a long training, whose picture is no finer
            steps = range(row.loss_every, row.loss_every * len(row.loss) + 1, row.loss_every * every)
            above.plot(steps, row.loss[::every], label=one_line(row.step, 24), linewidth=1.4)
            pairs = [*zip(rows[0].loss, row.loss, strict=False)][::every]
            below.plot(steps[: len(pairs)], [loss - first for first, loss in pairs], linewidth=1.4)
        above.set_ylabel("loss, nats" if figures.run.is_of_ladder else "loss")
        above.legend(fontsize=8, loc="upper right")
        below.set(xlabel="training step", ylabel=f"minus {one_line(rows[0].step, 14)}")
    return drawn
