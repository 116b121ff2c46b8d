"""The tables of README and docs/*.md, from the records under docs/results/: cog calls these functions
(docs/renew.sh).

A table that would mix states of the code raises ValueError.

python docs/tables.py                     make the reports of all recorded runs again
python docs/tables.py --stale [PLACE]     which recordings are of other code: docs/record.sh makes them again
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.record import Run, Study, code_sha256, read_object  # noqa: E402
from common.text import say  # noqa: E402
from report import charts, page, parity, scaling, sweep, table  # noqa: E402
from report.__main__ import render  # noqa: E402
from report.figures import LEGEND, MARK, Figures, Line, figures, loss_rule, ratio  # noqa: E402
from report.load import DIFFER, load  # noqa: E402
from report.picture import picture  # noqa: E402

RESULTS = ROOT / "docs" / "results"
SITE = "h200/gpt3-6.7b-slice"  # whose report is docs/index.html, and whose picture stands in README
THEMES = {
    "light": ("#1f2328", "#ffffff"),
    "dark": ("#e6edf3", "#0d1117"),
}  # a code host's colors of text and page


@cache
def record(place: str) -> Run | Study:
    return load(RESULTS / place)


@cache
def made(place: str) -> Figures:
    return figures(record(place))


def runs(place: str) -> list[Run]:
    return [*found.runs.values()] if isinstance(found := record(place), Study) else [found]


def shown(rows: list[dict], *of: str, n_left: int = 1) -> str:
    """A table of Markdown. Raises ValueError where its recordings are of several states of the code, or rows
    differ."""
    every = [run for place in of for run in runs(place)]
    states = {
        f"code {one.code_sha256 or one.commit or 'unknown'}" for run in every if (one := run.environment)
    }
    differing = {
        found.partition(":")[0] for run in every for found in run.problems if found.startswith(DIFFER)
    }
    if len(states) > 1 or differing:
        raise ValueError(f"{', '.join(of)}: {'; '.join(sorted(states | differing))}")
    return explained(table.pipe(rows, n_left))


def explained(text: str) -> str:
    """A table, and below it what its marks mean."""
    return f"{text}\n\n{LEGEND}." if MARK in text else text


# --- one recording: each is called with its place -------------------------------------------------


def of_one(find: Callable[[str], object], rows: Callable[..., list[dict]], place: str) -> str:
    return shown(rows(find(place)), place)


categories = partial(of_one, made, table.category_rows)  # milliseconds of each step by kind of kernel
limits = partial(of_one, made, table.limit_rows)  # what limits each step
roofs = partial(of_one, made, lambda made: table.roof_rows(made.run.roofs))  # what bare matrix products reach
by_shape = partial(
    of_one, record, lambda study: [*map(sweep.gain_cells, sweep.shapes(study))]
)  # gains by shape
seconds = partial(of_one, record, parity.seconds_rows)  # a parity study: until a held-out loss is reached


def ladder(place: str) -> str:
    """Every step and peer, and what the losses are."""
    return f"{shown(table.table_rows(made(place), extent=True), place)}\n\n{loss_rule(made(place).timed)}."


def front(place: str, *adds: str) -> str:
    """The ladder in seven columns, with the words for what each step adds."""
    return shown(table.front_rows(made(place), [*adds]), place, n_left=2)


def line(place: str, step: str) -> Line:
    """The figures of a row, or of a study's run of that name, for a sentence."""
    found = record(place)
    lines = figures(found.runs[step]).lines if isinstance(found, Study) else made(place).lines
    return next(one for one in lines if isinstance(found, Study) or one.name == step)


def faster(place: str, step: str, than: str) -> str:
    """How many times faster a row is than another of the same recording."""
    return table.times(ratio(line(place, step), line(place, than)))


def ms(place: str, step: str) -> str:
    return f"{line(place, step).ms:,.0f}{line(place, step).mark}"


def apart(place: str) -> str:
    """By how much the losses of the steps differ, at most, as a share."""
    found = [one.loss for one in made(place).steps if one.loss]
    return table.percent(max(found) / min(found) - 1)


def measured(place: str) -> str:
    """Device, date and commit of a recording."""
    run = record(place)
    return f"{run.environment.device}, {run.started_at[:10]}, commit {run.environment.commit[:7]}"


def cards(*of: str) -> str:
    """One row a card. Its date and commit stand in the row, so states of the code may differ."""
    return explained(table.pipe([table.card_row(made(place)) for place in of]))


def losses(place: str, *labels: str, against: str | None = None) -> str:
    """A parity study: losses of rows, and their differences from `against`, or from the script that they
    change."""
    return shown(parity.difference_rows(record(place), [*labels], against), place)


def ablations(place: str, *names: str) -> str:
    """Variants of a script, each against the script itself."""
    return shown(table.variant_rows(record(place), *names), place, n_left=2)


# --- several recordings ---------------------------------------------------------------------------


def of_scalings(rows: Callable[[list[scaling.Scaled]], list[dict]], *of: str) -> str:
    return shown(rows([row for place in of for row in scaling.scaled(record(place))]), *of, n_left=2)


scales = partial(of_scalings, scaling.main_rows)  # every step on one GPU and on several
lost = partial(of_scalings, scaling.lost_rows)  # where the missing per cents of each step go


def gains(*of: str) -> str:
    """Times faster than the step before, by workload."""
    return shown([{"workload": place} | sweep.gain_cells(made(place)) for place in of], *of)


def predictions(*of: str) -> str:
    """How far predictions from the roofs lie from what was measured, by workload or sweep."""
    return shown(
        [{"predicted": place} | sweep.error_cells([*map(figures, runs(place))]) for place in of], *of
    )


def stale(*of: str) -> list[str]:
    """Of these recordings, or of all, those that are absent or of other scripts and common/ than the present
    ones."""
    code: dict[str, set[str]] = {}
    for path in RESULTS.glob("*/*/*.json"):
        content = read_object(path)
        for run in content.get("runs", {"": content}).values():
            found = (run.get("environment") or {}).get("code_sha256")
            code.setdefault(str(path.parent.relative_to(RESULTS)), set()).add(found)
    return [place for place in of or sorted(code) if code.get(place, set()) - {None} != {code_sha256(ROOT)}]


def renew() -> None:
    """Make all that is drawn and written from records: a report.md of each, pictures of studies, the site,
    and README's picture for two widths in two themes."""
    for path in sorted(RESULTS.glob("*/*/results.json")):
        place = str(path.parent.relative_to(RESULTS))
        if isinstance(record(place), Study):
            for name, content in render(RESULTS / place, record(place))[1].items():
                (RESULTS / place / name).write_bytes(content)
        else:
            (RESULTS / place / "report.md").write_text(table.render_markdown(made(place)))
    (ROOT / "docs" / "index.html").write_text(page.render(made(SITE)))
    for theme, colors in THEMES.items():
        for width, narrow in (("wide", False), ("narrow", True)):
            drawn = charts.svg(picture(made(SITE), narrow, *colors), as_paths=True)
            (RESULTS / SITE / f"steps-{width}-{theme}.svg").write_text(drawn)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] != "--stale":
        sys.exit(__doc__)
    if sys.argv[1:]:
        found = stale(*sys.argv[2:])
        say("\n".join(f"{place}: of other code" for place in found) or "every record is of the present code")
        sys.exit(bool(found))
    renew()
