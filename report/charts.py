"""Pictures with axes, drawn by matplotlib: SVG for the page, whose color they take, and PNG on white.

Names come from records: they are shortened, and never read as markup or as formulas.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from common.record import CATEGORIES
from common.text import one_line
from report.figures import GAPS, Figures

# Okabe and Ito's colors, which stay apart for color-blind readers, and grays.
PALETTE = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#f0e442", "#8a6d3b", "#b8bec6")
CATEGORY_COLORS = dict(zip((*CATEGORIES, GAPS), PALETTE, strict=True))
CURVES = ("#d55e00", "#e69f00", "#009e73", "#56b4e9", "#0072b2", "#cc79a7", "#8a6d3b", "#9aa5b1")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)))
PLAIN, FAINT = "#2f7ebc", "#9aa5b1"
INK = "#123457"  # stands for the page's own text color, see `svg`
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
def figure(height_in: float) -> Iterator[Figure]:
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a user's matplotlibrc may ask for LaTeX, which may be absent
        matplotlib.rcParams.update(STYLE)
        warnings.simplefilter("ignore", UserWarning)  # a name from a record may hold a letter that the font lacks
        yield Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def png(drawn: Figure) -> bytes:
    written = io.BytesIO()
    drawn.savefig(written, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return written.getvalue()


def svg(drawn: Figure) -> str:
    """The figure as an <svg> element, which style.css fits to its container."""
    written = io.StringIO()
    drawn.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def plain_numbers(axis: matplotlib.axis.Axis, marks: tuple[int, ...] = (1,)) -> None:
    """Label a logarithmic axis with plain numbers in place of powers of ten."""
    axis.set_major_locator(LogLocator(subs=marks, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def speedup_png(made: Figures) -> bytes:
    """Times faster than the first row, steps and peers; the ms alone where nothing can be compared."""
    with figure(0.45 * len(made.lines) + 1.0) as drawn:
        axes = drawn.subplots()
        longest = max((line.over_first.value for line in made.timed if line.over_first), default=1.0)
        for k, line in enumerate(made.lines):
            times = line.over_first.value if line.over_first else 0.0
            label = f"{times:.1f}{line.mark} ({line.ms:,.1f} ms)" if line.ms else line.row.status
            axes.barh(k, times, color=FAINT if line.is_peer else PLAIN, height=0.66)
            axes.text(times + 0.012 * longest, k, label, va="center")
        axes.set_yticks(range(len(made.lines)), [one_line(line.name, 24) for line in made.lines])
        axes.set(xlim=(0, 1.5 * longest), ylim=(len(made.lines) - 0.4, -0.6))
        axes.set_xlabel(f"times faster than {made.first.name}" if made.first else "no row has a time")
        axes.tick_params(axis="y", length=0)
        preset = made.run.workload.preset if made.run.workload else "unknown workload"
        drawn.suptitle(one_line(f"{made.environment.device}, {preset}: one training step", 70), fontsize=9.5)
        return png(drawn)


def loss_svg(made: Figures) -> str:
    """The loss of every training step, and below it the difference to the first row."""
    rows = [line.row for line in made.timed if line.row.loss]
    with figure(4.6) as drawn:
        above, below = drawn.subplots(2, sharex=True, height_ratios=(3, 2))
        for row in rows:
            above.plot(row.loss, label=one_line(row.step, 24), linewidth=1.4)
            below.plot([b - a for a, b in zip(rows[0].loss, row.loss, strict=False)], linewidth=1.4)
        above.set_ylabel("loss, nats")
        above.legend(fontsize=8)
        below.set(xlabel="training step, warm-up included", ylabel=f"minus {one_line(rows[0].step, 14)}")
        return svg(drawn)
