"""What became of the changes that a model should take: the row that has them all, the patch of the user's
file, and the batch that the memory which they free allows."""

import shlex
from pathlib import PurePath

from common.record import ALLOCATION, PATCHED, Run
from report.cells import time_or_status, whole
from report.derive import derive
from report.figures import GIB, Figures, Line, ratio
from report.sentences import taken_of

AS_FAST = 0.97  # times as fast as the row that it follows: a patched file


def recommended_line(figures: Figures) -> Line | None:
    """The row with all changes that a model should take; None where nothing is recommended."""
    timed = figures.timed_steps
    if figures.run.is_of_ladder or figures.environment.device_type == "cpu" or not timed:
        return None
    taken = [line for line in taken_of(timed) if line is not timed[0]]
    return taken[-1] if taken and taken[-1].over_first.value > 1 else None


def patch_note(figures: Figures) -> str:
    """What came of the patch of a user's file, in a sentence; empty where none was made."""
    row = next((row for row in figures.run.rows if row.step == PATCHED), None)
    wanted = recommended_line(figures)
    if row is None or wanted is None:
        return ""
    line = figures.patched
    if line is None:
        return f"No patch is offered: {row.reason or 'no reason given'}."
    if objection := objection_to_patch(line, wanted):
        return f"A patch was made, and is not offered: {objection} ({time_or_status(line)} ms)."
    file = figures.run.workload.model
    patch = shlex.quote(patch_name(figures.run))
    return (
        f"{patch}, beside this report, makes those of these changes that have a place in {file}. Run so, "
        f"with the others, a step took {time_or_status(line)} ms, and its gradients agree. In the folder of "
        f"{file}: patch -p1 -i PATH/{patch}."
    )


def patch_name(run: Run) -> str:
    """Of its file, without the folders that a record may name."""
    return f"{PurePath(run.workload.model).stem}.patch"


def patch_to_offer(figures: Figures) -> str:
    """The patch of a user's file, if it has the time and the work of the row that it follows."""
    line, wanted = figures.patched, recommended_line(figures)
    return (line.row.code or "") if line and wanted and not objection_to_patch(line, wanted) else ""


def objection_to_patch(line: Line, wanted: Line) -> str:
    """The reason not to offer a patch, as a clause; empty if it is offered."""
    if line.row.changes != wanted.row.changes:
        return "it makes other changes"
    faster = ratio(line, wanted)
    if faster.clear and faster.value < AS_FAST:
        return "it is slower"
    if line.same_work != "agrees":
        return "its work differs" if line.same_work == "differs" else "its work is not proven"
    return line.doubts[0] if line.doubts else ""


# --- the batch that fits --------------------------------------------------------------------------


def larger_batch(figures: Figures) -> str:
    """What a batch gives that needs the memory which the changes free, in a sentence; empty where none was
    tried."""
    trial, wanted, first = figures.run.larger, recommended_line(figures), figures.first
    row = next(iter(trial.rows), None) if trial else None
    if row is None or wanted is None or row.changes != wanted.row.changes:
        return ""
    work, machine = trial.workload, figures.environment
    if row.status == "skipped" or not (work and wanted.gib and first.gib and machine.gpu_memory_bytes):
        return ""
    memory = f"{machine.gpu_memory_bytes / GIB:.0f}"
    frees = f"{wanted.name} needs {wanted.gib:.1f} of {memory} GiB, {first.name} {first.gib:.1f}"
    line = next(iter(derive(trial, [figures.run]).timed_steps), None)
    if line is None or not line.gib:
        return f"{frees}. A larger batch was tried: {row.status} ({row.reason})."
    count = work.tokens_per_step // figures.run.workload.tokens_per_step
    if count < 2 or not trial.environment or trial.environment.gpu_uuid != machine.gpu_uuid:
        return ""
    more = f"{line.tokens_per_s / wanted.tokens_per_s:.2f}{max(line.mark, wanted.mark)}"
    speed = f"{whole(line.tokens_per_s)} {work.unit}/s, {more} x those of one"
    allocation = trial.environment.variables.get(ALLOCATION)
    setting = f" with {ALLOCATION}={allocation}" if allocation else ""
    return (
        f"{frees}. {count} of its batches in one need {line.gib:.1f} GiB{setting}: {speed}. A larger batch "
        "learns otherwise: the rate may need a change."
    )
