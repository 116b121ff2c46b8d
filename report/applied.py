"""What became of the changes that a model should take: the row that has them all, the patch of the user's
file, and the batch that the memory which they free allows."""

import shlex
from pathlib import PurePath

from common.record import PATCHED, Row, Run
from report.cells import time_or_status, whole
from report.derive import derive
from report.figures import GIB, Figures, Line, ratio
from report.sentences import taken_of

AS_FAST = 0.97  # times as fast as the row that it follows: a patched file
# A larger batch is sized by peaks: bytes of a weight that no batch changes (itself and AdamW's two states, in
# FP32), and the share of the GPU's memory that a step may take.
BYTES_A_WEIGHT, USABLE = 12, 0.92
MOST_BATCHES = 32  # in one


def recommended(figures: Figures) -> Line | None:
    """The row with all changes that a model should take; None where nothing is recommended."""
    timed = [line for line in figures.timed_steps if line.name != PATCHED]
    if figures.run.is_of_ladder or figures.environment.device_type == "cpu" or not timed:
        return None
    taken = [line for line in taken_of(timed) if line is not timed[0]]
    return taken[-1] if taken and taken[-1].over_first.value > 1 else None


def patch_note(figures: Figures) -> str:
    """What came of the patch of a user's file, in a sentence; empty where none was made."""
    row, wanted = patched_row(figures), recommended(figures)
    if row is None or wanted is None:
        return ""
    line = next((line for line in figures.timed_steps if line.row is row), None)
    if line is None:
        return f"No patch is offered: {row.reason}."
    if objection := objection_to_patch(line, wanted):
        return f"A patch was made, and is not offered: {objection} ({time_or_status(line)} ms)."
    file = figures.run.workload.model
    patch = shlex.quote(patch_name(figures.run))
    return (
        f"{patch}, beside this report, makes those of these changes that have a place in {file}. Run so, "
        f"with the others, a step took {time_or_status(line)} ms, and its gradients agree. In the folder of "
        f"{file}: patch -p1 < PATH/{patch}."
    )


def patched_row(figures: Figures) -> Row | None:
    return next((row for row in figures.run.rows if row.step == PATCHED), None)


def patch_name(run: Run) -> str:
    """Of its file, without the folders that a record may name."""
    return f"{PurePath(run.workload.model).stem}.patch"


def offered_patch(figures: Figures) -> str:
    """The patch of a user's file, if it has the time and the work of the row that it follows."""
    row, wanted = patched_row(figures), recommended(figures)
    line = next((line for line in figures.timed_steps if line.row is row), None)
    return (row.code or "") if line and wanted and not objection_to_patch(line, wanted) else ""


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


def batches_that_fit(figures: Figures) -> int:
    """How many of the file's batches the recommended row could train in one step, by its peak of memory. 1 if
    it needs as much memory as the first row, or if memory was not measured."""
    wanted, memory = recommended(figures), figures.environment.gpu_memory_bytes
    if wanted is None or not (wanted.row.peak_bytes and memory and figures.first.row.peak_bytes):
        return 1
    fixed = BYTES_A_WEIGHT * figures.run.workload.parameters
    of_batch = wanted.row.peak_bytes - fixed
    if wanted.row.peak_bytes >= figures.first.row.peak_bytes or of_batch <= 0:
        return 1
    return max(1, min(MOST_BATCHES, int((USABLE * memory - fixed) / of_batch)))


def larger_batch(figures: Figures) -> str:
    """What the batch that fits gives, in a sentence; empty where none was tried."""
    trial, wanted = figures.run.larger, recommended(figures)
    if trial is None or wanted is None or trial.rows[0].changes != wanted.row.changes:
        return ""
    work, row = trial.workload, trial.rows[0]
    first, memory = figures.first, figures.environment.gpu_memory_bytes
    frees = f"{wanted.name} needs {wanted.gib:.1f} of {memory / GIB:.0f} GiB, {first.name} {first.gib:.1f}"
    if row.status == "oom":
        return f"{frees}. By these peaks a larger batch fits, but it ran out of memory."
    (line,) = derive(trial).timed_steps or [None]
    if line is None:
        return ""
    count = work.tokens_per_step // figures.run.workload.tokens_per_step
    more = f"{line.tokens_per_s / wanted.tokens_per_s:.2f}{max(line.mark, wanted.mark)}"
    return (
        f"{frees}. So {count} of its batches fit in one: {line.gib:.1f} GiB, {whole(line.tokens_per_s)} "
        f"{work.unit}/s, {more} x those of one. A larger batch learns otherwise: the rate may need a change."
    )
