"""The generated part of docs/parity.md: of each recorded study its tables, its faults and its curves."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

from common.record import describe_shape
from report import charts, parity, table
from report.table import figure, percent, pipe_table


def recorded_studies(results: Path) -> list[tuple[Path, parity.Study]]:
    """Every recorded study of losses, by folder; those of a CPU last."""
    found = [one for machine in sorted(results.glob("*/")) for one in parity.studies(machine)]
    return sorted(found, key=lambda one: bool(one[1].environment) and one[1].environment.device_type == "cpu")


def tables(results: Path) -> str:
    """A section per study: what was trained, the verdicts of its measures, the faults, the curves."""
    return "\n\n".join(_section(study, folder.relative_to(results)) for folder, study in recorded_studies(results))


def _section(study: parity.Study, place: Path) -> str:
    first, faults = parity.reference(study), parity.rows(study, mutations=True)
    parts = [f"## {place}", _about_study(study)]
    for name, measure in parity.measures(study).items():
        parts += [f"The {name}, in nats. {parity.describe_rows(study, measure)}", _loss_table(study, measure)]
    if count := parity.count_comparisons(study):
        parts.append(f"These are {count} comparisons with {first}. If no row differed, about {0.05 * count:.1f} of "
                     "them would be called different by chance.")  # fmt: skip
    parts += [*_early_table(study), "### Faults put in on purpose", parity.describe_faults(study)]
    for name, measure in parity.measures(study).items() if faults else ():
        parts += [f"By the {name}:", _fault_table(study, faults, measure)]
    parts += [f"![Training losses](results/{place}/{parity.CURVES})", _about_curves(first, faults)]
    lines = [f"{run.row}, seed {run.seed}: {run.status}: {run.reason}" for run in study.runs if run.reason]
    lines += [f"{row}, seed {seed}: not trained yet" for row, seed in parity.missing(study)]
    return "\n\n".join([*parts, *(["\n".join(table.bullets(lines)).strip()] if lines else [])])


def _about_curves(first: str | None, faults: list[str]) -> str:
    said = f"A line is the mean of the seeds, each point that of {parity.SMOOTHED_STEPS} steps. A band is their range. "
    said += f"First come the losses of all rows, then each row's loss less that of {first}, seed by seed."
    return said + " Last comes each mutation's loss less that of its script." * bool(faults)


def _about_study(study: parity.Study) -> str:
    work = study.workload
    commits = ", ".join(dict.fromkeys(run.commit[:7] for run in study.runs if run.commit))
    device = table.describe_device(study.environment) if study.environment else "unknown machine"
    shape = describe_shape(SimpleNamespace(**work))
    rows = [*parity.rows(study), *parity.rows(study, mutations=True)]
    precisions = [f"{row} {known}" for row in rows if (known := parity.precision(study, row))]
    gpus = len({run.gpu_uuid for run in study.runs if run.gpu_uuid})
    seeds = sorted({str(run.seed) for run in study.runs}, key=int)
    options = shlex.join(["--seeds", *seeds, "--rows", *rows])
    return (
        f"{device}; {work['preset']}: {shape}, lr {work['lr']:g}, {work['warmup']} + {work['steps']} training steps, "
        f"commit {commits}{f', on {gpus} GPUs' * (gpus > 1)}. "
        f"Precision that was seen: {', '.join(precisions) or 'unknown'}.\n\n"
        f"```\n{study.command} {options} --output FILE\n```"
    )


def _against(losses: parity.Losses, reference: parity.Losses) -> tuple[str, str, str, str]:
    """The difference, its 95 % interval, the difference in deviations of the reference, and the verdict."""
    between, ends = parity.difference(losses, reference), parity.interval(losses, reference)
    ratio = figure(parity.deviations(losses, reference), "+.1f")
    shown = " to ".join(f"{end:+.5f}" for end in ends) if ends else "-"
    return figure(between, "+.4f"), shown, ratio, parity.verdict(losses, reference)


def _loss_table(study: parity.Study, measure: parity.Measure) -> str:
    """A line per row with its losses, against the first row that has any."""
    losses = {row: parity.by_seed(study, row, measure) for row in parity.rows(study)}
    first = parity.reference(study)
    seeds = sorted({run.seed for run in study.runs})
    cells = []
    for row, of_row in losses.items():
        each = (figure(of_row.get(seed), ".4f") for seed in seeds)
        against = ("",) * 4 if row == first else ("-", "-", "-", parity.runs_of(study, row)[0].status)
        if of_row and row != first:
            against = _against(of_row, losses[first])
        own = (figure(parity.mean(of_row), ".4f"), figure(parity.deviation(of_row), ".4f"))
        cells.append((row, *each, *own, *against))
    headers = (f"difference to {first}", "95 % interval", f"in deviations of {first}", "verdict")
    return pipe_table(("row", *(f"seed {seed}" for seed in seeds), "mean", "deviation", *headers), cells)


def _early_table(study: parity.Study) -> list[str]:
    """A line per row: how far its training loss is from the first row's on the way, over the seeds that both have."""
    first, most = parity.reference(study), max(len(run.loss) for run in study.runs)
    steps = [step for step in (*parity.EARLY_STEPS, most) if step <= most]

    def far(row: str, step: int) -> str:
        shares = parity.relative(*(parity.by_seed(study, one, parity.losses_until(step)) for one in (row, first)))
        ends = (percent(end(shares.values())) for end in (min, max)) if shares else "-"
        return " to ".join(dict.fromkeys(end.replace("-0.00%", "+0.00%") for end in ends))

    cells = [(row, *(far(row, step) for step in steps)) for row in parity.rows(study) if row != first]
    title = (
        f"On the way: the mean of the {parity.SMOOTHED_STEPS} training losses up to a step, against that of {first}. A "
        "cell has the smallest and the largest difference of any seed:"
    )
    return [title, pipe_table(("row", *(f"step {step}" for step in steps)), cells)] if cells else []


def _fault_table(study: parity.Study, faults: list[str], measure: parity.Measure) -> str:
    cells = []
    for fault in faults:
        plain = parity.unmutated(study, fault)
        losses, reference = (parity.by_seed(study, row, measure) for row in (fault, plain))
        *between, said = _against(losses, reference)
        seen = {parity.DIFFERENT: "yes", parity.ALIKE: "no"}.get(said, said)
        own = (figure(parity.mean(of), ".4f") for of in (reference, losses))
        cells.append((fault, plain, *own, *between, seen))
    headers = ("mutation", "script", "mean of the script", "mean of the mutation")
    headers += ("difference", "95 % interval", "in deviations of the script", "seen")
    return pipe_table(headers, cells, n_left=2)


def curves_png(study: parity.Study) -> bytes:
    """A PNG: the training losses of every row and fault that has any, and how far they are from the row that they are
    compared with."""
    first, rows, faults = parity.reference(study), parity.rows(study), parity.rows(study, mutations=True)
    losses = {row: parity.curve(study, row) for row in (*rows, *faults)}
    apart = {row: parity.curve(study, row, first) for row in rows if row != first}
    mutated = {fault: parity.curve(study, fault, parity.unmutated(study, fault)) for fault in faults}
    panels = {"loss, nats": losses, f"less {first}, nats": apart, "less the script, nats": mutated}
    drawn = {label: {row: points for row, points in curves.items() if points} for label, curves in panels.items()}
    return charts.seed_curves_png({label: curves for label, curves in drawn.items() if curves}, parity.SMOOTHED_STEPS)
