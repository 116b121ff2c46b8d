"""Variants of a script: how much slower or faster each one is than the script that it changes.

The runs of a study are named like their variants, and a script that is not changed like itself.
"""

from common.record import Study
from report.cells import gain, number, time_or_status
from report.changes import lines_added
from report.derive import derive_study
from report.figures import Line, ratio
from report.table import EQUALS, Column, itself, only_filled, rows_of


def variant_rows(study: Study, *names: str) -> list[dict[str, str]]:
    """These variants, or all, each against the script that it changes."""
    lines = lines_of(study)
    unchanged = {name: study.runs[name].rows[0].step for name in lines}
    scripts = {name: lines.get(script) for name, script in unchanged.items() if script != name}
    rows = []
    for name in names or [name for name in scripts if scripts[name]]:
        variant, script = lines[name], scripts[name]
        rows.append(
            {
                "variant": name,
                "of": unchanged[name],
                "script, ms": time_or_status(script),
                "variant, ms": time_or_status(variant),
                "difference, ms": difference(variant, script),
                "lines added": str(len(lines_added(script.row.text, variant.row.text))),
                "least cosine": number(variant.row.proof and variant.row.proof.cosine, ".4f"),
                "work": variant.same_work or "-",
            }
        )
    return only_filled(rows)


def loss_rows(study: Study, *names: str) -> list[dict[str, str]]:
    """The loss of every training step, in nats, of these runs. Raises ValueError where they trained unequally
    long."""
    lines, rows = lines_of(study), []
    for name in names:
        losses = lines[name].row.loss
        rows.append({"loss in training step": name})
        rows[-1] |= {str(step): number(loss, ".2f") for step, loss in enumerate(losses, start=1)}
    if len({*map(len, rows)}) > 1:
        raise ValueError(f"{', '.join(names)} trained different numbers of steps")
    return rows


def lines_of(study: Study) -> dict[str, Line]:
    """The one row of every run."""
    return {name: figures.lines[0] for name, figures in derive_study(study).items()}


def difference(variant: Line, script: Line) -> str:
    """How many milliseconds longer a variant takes than its script."""
    if not (variant.ms and script.ms):
        return "-"
    return number(variant.ms - script.ms, "+,.1f") + max(variant.mark, script.mark)


def equal_rows(study: Study, *names: str) -> list[dict[str, str]]:
    """These runs side by side, with what may make them unequal; gains are over the first of them."""
    lines = lines_of(study)
    shown = {lines[name]: name for name in names}
    over = Column(f"x {names[0]}", lambda line: ratio(line, lines[names[0]]), gain)
    columns = [Column("row", shown.get), Column("of", "name"), *EQUALS, Column("ms", itself, time_or_status)]
    return rows_of(shown, [*columns, over])


def tables(study: Study) -> dict[str, list[dict]]:
    return {"": variant_rows(study)}
