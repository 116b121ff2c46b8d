"""What a study of losses says: whether rows learn the same, and whether it sees faults (python -m anatomy.parity).

One function a figure. Losses are in nats. A figure of a row comes from the seeds that the row trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev

from common.record import Environment, Settings
from report.load import RecordError, convert, read_json

STUDY, CURVES = "parity.json", "curves.png"
MUTATION = "mutation"
# Seeds -> the 97.5 % quantile of Student's t with one degree of freedom less. More seeds take the last one.
T_QUANTILES = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
FEWEST_SEEDS = min(T_QUANTILES)
FIRST_STEPS = 50  # of the training losses: later, rows that round otherwise drift apart
SMOOTHED_STEPS = 20  # of a curve: one point is their mean
EARLY_STEPS = 35, 105, 205, 505  # where rows are compared on the way
ALIKE, DIFFERENT, TOO_FEW = "no difference seen", "different", "too few seeds"


@dataclass
class Trained:
    """One row with one seed: of what python -m anatomy.parity writes, what a page shows."""

    row: str
    script: str
    kind: str  # step, peer, or that of a variant: ablation, try, mutation
    seed: int
    status: str
    reason: str | None = None  # of a run without losses
    settings: Settings | None = None  # what really ran
    loss: list[float] = field(default_factory=list)  # nats, one a training step
    heldout_loss: float | None = None  # nats
    commit: str | None = None
    gpu_uuid: str | None = None


@dataclass
class Study:
    command: str
    environment: Environment | None  # of the last run that left a record
    workload: dict  # that of a record, without the seed
    runs: list[Trained]


Losses = dict[int, float]  # by seed
Curve = list[tuple[float, float, float]]  # mean, smallest and largest over seeds, a point per SMOOTHED_STEPS steps
Measure = Callable[[Trained], float | None]


def read_study(path: Path) -> Study:
    """Read and check a study. Raises RecordError."""
    return convert(read_json(path), Study, path.name)


def studies(machine: Path) -> list[tuple[Path, Study]]:
    """The recorded studies of a machine, a folder of docs/results. Those of one workload are one, in the folder of the
    first. Raises RecordError, also where two of them hold the same run."""
    found: list[tuple[Path, Study]] = []
    for path in sorted(machine.glob(f"parity*/{STUDY}")):
        study = read_study(path)
        same = [one for _, one in found if one.workload == study.workload]
        if same and (twice := row_seeds(same[0]) & row_seeds(study)):
            row, seed = min(twice)
            raise RecordError(
                f"{path.parent.name} trains {row} with seed {seed} again: take it out of one of the files"
            )
        if same:
            same[0].runs += study.runs
        else:
            found.append((path.parent, study))
    return found


# --- one run --------------------------------------------------------------------------------------


def heldout_loss(run: Trained) -> float | None:
    return run.heldout_loss


def first_losses(run: Trained) -> float | None:
    """Mean of the first FIRST_STEPS training losses."""
    return fmean(run.loss[:FIRST_STEPS]) if len(run.loss) >= FIRST_STEPS else None


def losses_until(step: int) -> Measure:
    """Mean of SMOOTHED_STEPS training losses, of which `step` is the last."""
    return lambda run: fmean(run.loss[step - SMOOTHED_STEPS : step]) if len(run.loss) >= step else None


MEASURES = {"held-out loss": heldout_loss, f"mean of the first {FIRST_STEPS} training losses": first_losses}


def smoothed(losses: list[float]) -> list[float]:
    """Means over SMOOTHED_STEPS steps, one after the other; steps left over at the end have no point."""
    ends = range(SMOOTHED_STEPS, len(losses) + 1, SMOOTHED_STEPS)
    return [fmean(losses[end - SMOOTHED_STEPS : end]) for end in ends]


def measures(study: Study) -> dict[str, Measure]:
    """Those of MEASURES that a run of the study has: a study of fewer than FIRST_STEPS steps lacks one."""
    every = dict.fromkeys(run.row for run in study.runs)
    return {name: of for name, of in MEASURES.items() if any(by_seed(study, row, of) for row in every)}


# --- the seeds of one row -------------------------------------------------------------------------


def rows(study: Study, mutations: bool = False) -> list[str]:
    """The names of the rows, or of the mutations, in the order of the file."""
    return list(dict.fromkeys(run.row for run in study.runs if (run.kind == MUTATION) == mutations))


def reference(study: Study) -> str | None:
    """The row that the others are compared with: the first of those that were trained with the most seeds."""
    seeds = {row: len(by_seed(study, row, heldout_loss)) for row in rows(study)}
    return max(seeds, key=seeds.get) if any(seeds.values()) else None


def runs_of(study: Study, row: str) -> list[Trained]:
    """The runs of a row by seed, those without losses included."""
    return sorted((run for run in study.runs if run.row == row), key=lambda run: run.seed)


def row_seeds(study: Study) -> set[tuple[str, int]]:
    """Row and seed of its runs."""
    return {(run.row, run.seed) for run in study.runs}


def missing(study: Study) -> list[tuple[str, int]]:
    """The runs that it lacks, as row and seed: of every row, the seeds that another row has."""
    there, seeds = row_seeds(study), sorted({run.seed for run in study.runs})
    every = ((row, seed) for row in dict.fromkeys(run.row for run in study.runs) for seed in seeds)
    return [one for one in every if one not in there]


def by_seed(study: Study, row: str, measure: Measure) -> Losses:
    """A measure of every run of a row that has it."""
    measured = {run.seed: measure(run) for run in runs_of(study, row) if run.status == "ok"}
    return {seed: loss for seed, loss in measured.items() if loss is not None}


def mean(losses: Losses) -> float | None:
    return fmean(losses.values()) if losses else None


def deviation(losses: Losses) -> float | None:
    """The sample standard deviation between seeds; None for fewer than two."""
    return stdev(losses.values()) if len(losses) > 1 else None


def precision(study: Study, row: str) -> str | None:
    """The shortest format that its matrix products were seen to run in: float32, bfloat16, FP8; None where unknown."""
    seen = [run.settings for run in runs_of(study, row) if run.settings and run.settings.amp_dtype]
    return ("FP8" if seen[0].fp8_recipe else seen[0].amp_dtype) if seen else None


def curve(study: Study, row: str, against: str | None = None) -> Curve:
    """The smoothed training losses; or, seed by seed, how far they are above those of another row."""
    each = by_seed(study, row, lambda run: smoothed(run.loss))
    if against:
        others = by_seed(study, against, lambda run: smoothed(run.loss))
        each = {seed: [a - b for a, b in zip(each[seed], others[seed], strict=True)] for seed in each.keys() & others}
    return [(fmean(point), min(point), max(point)) for point in zip(*each.values(), strict=True)]


# --- a row against another ------------------------------------------------------------------------


def apart(losses: Losses, reference: Losses) -> Losses:
    """The difference to the reference, by seed, on the seeds that both have."""
    return {seed: loss - reference[seed] for seed, loss in losses.items() if seed in reference}


def difference(losses: Losses, reference: Losses) -> float | None:
    """Mean of the differences on the same seeds; None where they share no seed."""
    return mean(apart(losses, reference))


def relative(losses: Losses, reference: Losses) -> Losses:
    """By seed, the difference to the reference as a share of it."""
    return {seed: loss / reference[seed] - 1 for seed, loss in losses.items() if seed in reference}


def deviations(losses: Losses, reference: Losses) -> float | None:
    """The difference, in standard deviations between seeds of the reference."""
    between, unit = difference(losses, reference), deviation(reference)
    return between / unit if between is not None and unit else None


def interval(losses: Losses, reference: Losses) -> tuple[float, float] | None:
    """The 95 % confidence interval of the difference, from its differences seed by seed; None for too few seeds.

    The mean, and to either side its standard error times Student's t: a paired t-test. Rows are paired as a seed gives
    all of them the same weights and batches.
    """
    each = apart(losses, reference)
    if len(each) < FEWEST_SEEDS:
        return None
    quantile = T_QUANTILES[min(len(each), max(T_QUANTILES))]
    reach = quantile * deviation(each) / math.sqrt(len(each))
    return mean(each) - reach, mean(each) + reach


def verdict(losses: Losses, reference: Losses) -> str:
    """DIFFERENT where the interval of the difference lies on one side of zero, ALIKE where it holds zero; TOO_FEW.

    Of normally distributed rows without any difference, 5 % are DIFFERENT by chance.
    """
    ends = interval(losses, reference)
    if ends is None:
        return TOO_FEW
    return ALIKE if ends[0] <= 0 <= ends[1] else DIFFERENT


def count_comparisons(study: Study) -> int:
    """The verdicts that a study gives, beside those of faults: each row's against the reference, by every measure."""
    first = reference(study)
    every = ((by_seed(study, row, of), by_seed(study, first, of)) for row in rows(study) if row != first
             for of in measures(study).values())  # fmt: skip
    return sum(interval(*losses) is not None for losses in every)


def describe_rows(study: Study, measure: Measure) -> str:
    """Sentences: in which rows no difference to the reference is seen, which are lower or higher, which lack seeds."""
    first = reference(study)
    losses = {row: by_seed(study, row, measure) for row in rows(study)}
    trained = [row for row in losses if losses[row] and row != first]
    said = {row: verdict(losses[row], losses[first]) for row in trained}
    named = {which: [row for row in trained if said[row] == which] for which in (ALIKE, TOO_FEW)}
    lower, higher = (
        [row for row in trained if said[row] == DIFFERENT and sign * difference(losses[row], losses[first]) > 0]
        for sign in (-1, 1)
    )
    sentences = {
        f"No difference to {first} is seen in": named[ALIKE],
        f"The loss is lower than that of {first} in": lower,
        f"The loss is higher than that of {first} in": higher,
        f"These lack seeds to be compared with {first}": named[TOO_FEW],
    }
    return " ".join(f"{what}: {'; '.join(of)}." for what, of in sentences.items() if of)


def summary(study: Study) -> list[str]:
    """What a study says so far, in sentences: of each measure the verdicts, then the faults."""
    found = measures(study)
    said = [f"The {name}: {text}" for name, of in found.items() if (text := describe_rows(study, of))]
    said += [f"The {name} needs {FIRST_STEPS} training steps." for name in MEASURES if found and name not in found]
    return said + ([describe_faults(study)] if rows(study, mutations=True) else [])


# --- the faults -----------------------------------------------------------------------------------


def unmutated(study: Study, mutation: str) -> str:
    """The row that a mutation is a fault of: its script."""
    return runs_of(study, mutation)[0].script


def fault_verdict(study: Study, mutation: str, measure: Measure) -> str:
    """The verdict of a mutation against its script. DIFFERENT: the measure sees the fault."""
    return verdict(by_seed(study, mutation, measure), by_seed(study, unmutated(study, mutation), measure))


def describe_faults(study: Study) -> str:
    """Sentences: which faults each measure sees, which none does, and which have too few seeds to tell."""
    faults = rows(study, mutations=True)
    if not faults:
        return "No fault was put in, so it is not known what the measures would see."
    by_name = measures(study)
    verdicts = {name: {fault: fault_verdict(study, fault, of) for fault in faults} for name, of in by_name.items()}
    told = [fault for fault in faults if any(said[fault] != TOO_FEW for said in verdicts.values())]
    seen = {name: [fault for fault in told if said[fault] == DIFFERENT] for name, said in verdicts.items()}
    unseen = [fault for fault in told if not any(fault in of for of in seen.values())]
    sentences = {f"The {name} sees": of or ["none"] for name, of in seen.items() if told}
    sentences |= {"No measure sees": unseen, "These lack seeds": [one for one in faults if one not in told]}
    return " ".join(f"{what}: {'; '.join(of)}." for what, of in sentences.items() if of)
