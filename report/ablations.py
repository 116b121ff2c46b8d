"""Variants of a script: how much slower or faster each one is than the script that it changes.

The runs of a study are named like their variants, and a script that is not changed like itself.
"""

from common.record import Study
from report.cells import number, only_filled, time_or_status
from report.figures import Line, derive, unlearned


def variant_rows(study: Study, *names: str) -> list[dict[str, str]]:
    """These variants, or all, each against the script that it changes."""
    lines = {name: derive(run).lines[0] for name, run in study.runs.items()}
    scripts = {name: lines.get(line.name) for name, line in lines.items() if line.name != name}
    rows = []
    for name in names or [name for name in scripts if scripts[name]]:
        variant, script = lines[name], scripts[name]
        difference = variant.ms - script.ms if variant.ms and script.ms else None
        rows.append(
            {
                "variant": name,
                "of": script.name,
                "script, ms": time_or_status(script),
                "variant, ms": time_or_status(variant),
                "difference, ms": number(difference, "+,.1f"),
                "least cosine": number(variant.row.proof and variant.row.proof.cosine, ".4f"),
                "work": variant.same_work or "-",
            }
        )
    return only_filled(rows)


def tables(study: Study) -> dict[str, list[dict]]:
    return {"": variant_rows(study)}


def note_of(line: Line) -> str:
    """Whether a variant learns. A row's own note tells of what its script does, which the variant may
    change."""
    return unlearned(line.row.loss)
