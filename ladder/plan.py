"""Records what docs/results/plan.ini lists: at one commit, in pieces, each where its machine is.

    python -m ladder.plan [--minutes N]      record what is missing, for at most so long; again: goes on
    python -m ladder.plan --status           what is recorded, at which commit, and what is missing
    python -m ladder.plan --take DIR         put what was recorded into docs/results/, from this machine or another

Records go to results/recordings/COMMIT/, or --into DIR, so that the tree stays clean while it is recorded. A command
that is given up at the limit goes on with the next call where it can. A machine with N GPUs records what needs at most
N of them, a machine without a GPU what needs none.
"""

from __future__ import annotations

if __name__ == "__main__":
    from common.errors import needs

    needs("msgspec", "tabulate")

import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from anatomy.__main__ import INDEX, renew_index
from common.errors import run_command
from common.record import read_object, write_bytes, write_json
from common.text import OneLineParser, aligned, one_line, positive_int, say
from ladder import process
from ladder.__main__ import check
from ladder.process import ROOT
from report import sweep
from report.doubts import SERIOUS
from report.load import MERGED, RecordError, convert, read_run
from report.parity import STUDY, read_study, row_seeds
from report.recordings import (
    PLAN,
    RUN_ALL,
    Machine,
    Piece,
    Recording,
    changes,
    facts,
    git,
    is_of_this_code,
    is_whole,
    kept_files,
    read_plan,
)
from report.recordings import check as check_record
from report.table import levels

RESULTS = ROOT / "docs" / "results"
GRACE_S = 30  # run_all.sh ends its row and writes its report in it
LEAST_S = 60  # of a piece that goes on
NOT_FAILED = ("ok", "skipped", "oom", "not run")
BESIDE = "LADDER_BESIDE"  # in the record's environment
NEXT = "python -m ladder.predict --records docs/results && python -m report.documents"


@dataclass
class State:
    """How far a recording is, in a file beside its unfinished output."""

    done: int = 0  # pieces
    spent_s: float = 0.0  # on the piece that was given up
    run: str | None = None  # the folder of its run

    def rest_s(self, piece: Piece) -> float:
        """What the next piece is expected to take yet: however long it took, a little remains."""
        spent_s = self.spent_s if piece.continues else 0.0
        return max(piece.seconds - spent_s, min(piece.seconds, LEAST_S))


@dataclass
class Recorder:
    """One call: where it records, what for, and until when."""

    into: Path
    commit: str
    minutes: int
    until: float  # time.monotonic
    stop: process.Stop

    def unfinished(self, recording: Recording, ending: str = "") -> Path:
        return self.into / "unfinished" / self.commit[:7] / f"{recording.name}{ending}"

    def state(self, recording: Recording) -> State:
        path = self.unfinished(recording, ".state.json")
        return convert(read_object(path), State, path.name)

    def is_recorded(self, recording: Recording) -> bool:
        """By the code as it is now, in this call's folder or in docs/results, and whole."""
        held = (recording.files(results) for results in (self.into, RESULTS))
        return any(is_of_this_code(ROOT, files, recording) and is_whole(files, recording) for files in held)

    def rest_s(self, recording: Recording) -> list[float]:
        """The seconds that each piece of a recording is expected to take yet."""
        state = self.state(recording)
        pieces = () if self.is_recorded(recording) else recording.pieces[state.done :]
        return [state.rest_s(piece) if k == 0 else piece.seconds for k, piece in enumerate(pieces)]

    def rest_minutes(self, recordings: list[Recording]) -> str:
        return f"about {sum(sum(self.rest_s(one)) for one in recordings) / 60:.0f} minutes"

    def may_start(self, seconds: float) -> bool:
        """Whether a piece fits in the time that is left. One that never fits may start in the first half of a call."""
        left_s, whole_s = self.until - time.monotonic(), self.minutes * 60 - GRACE_S
        return seconds <= left_s or (seconds > whole_s and left_s >= whole_s / 2)


def machine() -> Machine:
    """This one."""
    known = check(["--preset", "tiny"], 1)
    return Machine(known["gpus"], known["device"])


def fits(recording: Recording, here: Machine) -> bool:
    """Whether a recording belongs to a machine: as many GPUs or more of its name, or none where it needs none."""
    needed = recording.machine
    enough = needed.gpus <= here.gpus if needed.gpus else not here.gpus
    return enough and needed.device == here.device


# --- recording --------------------------------------------------------------------------------------


def record(recorder: Recorder, recording: Recording, variables: dict[str, str]) -> bool:
    """Run what is left of a recording's pieces while there is time; False where one failed."""
    state, file = recorder.state(recording), recorder.unfinished(recording, ".state.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    held, output = recording.files(RESULTS), recorder.unfinished(recording)
    if not output.exists() and held and not is_whole(held, recording) and is_of_this_code(ROOT, held, recording):
        shutil.copyfile(held[0], output)  # a study that was interrupted goes on
    while state.done < len(recording.pieces):
        piece, at = recording.pieces[state.done], f"{recording.name}, piece {state.done + 1} of {len(recording.pieces)}"
        expected_s = state.rest_s(piece)
        if recorder.stop.requests or not recorder.may_start(expected_s):
            return True
        say(f"{at}, about {expected_s:.0f} s: {piece.command}")
        try:
            ended, log = run_piece(recorder, recording, piece, state, variables)
        except OSError as error:  # the command is not there
            say(f"{at}: failed: {one_line(error)}")
            return False
        found = re.findall(r"^written to (\S+)$", log.read_text(errors="replace"), re.MULTILINE)
        state.run = found[-1] if found and piece.is_run else state.run
        given_up = ended.timed_out or ended.stopped or is_unfinished_sweep(state)
        failure = None if given_up else failure_of(ended, log, ROOT / state.run if found and piece.is_run else None)
        state.spent_s = state.spent_s + ended.seconds if given_up else 0.0
        if not given_up and failure is None:
            state.done += 1
        write_json(file, asdict(state))
        if given_up:
            next_call = "goes on with it" if piece.continues else "repeats it"
            say(f"{at}: given up after {ended.seconds:.0f} s; the next call {next_call}")
            return True
        if failure is not None:
            say(f"{at}: failed: {failure} (see {log})")
            return False
        say(f"{at}: ok, {ended.seconds:.0f} s")
    source = ROOT / state.run if state.run else recorder.unfinished(recording)
    try:
        keep(recording, source, recorder.into, recorder.commit)
    except (RecordError, OSError) as error:
        say(f"{recording.name}: failed: {one_line(error)}")
        if isinstance(error, RecordError):  # else what ran is kept by the next call
            file.unlink()
        return False
    say(f"{recording.name}: recorded")
    for path in recording.files(recorder.into):
        for doubt in levels(read_run(path)).get(SERIOUS, []) if path.name == MERGED else ():
            say(f"  serious doubt: {doubt}")
    return True


def failure_of(ended: process.Ended, log: Path, run: Path | None) -> str | None:
    """Why a command left no recording, in one line; None where it left one.

    A run that ends with code 1 has left one if no row failed and some ran out of memory: what does not fit is a result.
    """
    if ended.code == 0:
        return None
    said = process.last_line(log) if ended.code > 0 else ""
    said = said or process.describe(ended, 0, log)[1]
    if ended.code != 1 or run is None:
        return said
    try:
        merges = [read_run(path) for path in kept_files(run, True) if path.name == MERGED]
    except RecordError as error:
        return one_line(error)
    rows = [row for merge in merges for row in (*merge.steps, *merge.peers)]
    lost = [f"{row.step}: {row.status}: {row.reason}" for row in rows if row.status not in NOT_FAILED]
    if lost:
        return one_line(lost[0])
    return None if any(row.status == "oom" for row in rows) else one_line(said)


def is_unfinished_sweep(state: State) -> bool:
    """Whether the run is a sweep with cells that had no time."""
    with contextlib.suppress(RecordError):
        return any(cell.status == "not run" for cell in sweep.read_cells(ROOT / (state.run or "") / sweep.SWEEP))
    return False


def own_gpus(recording: Recording) -> dict[str, str]:
    """The variable that shows a command no more GPUs than its recording is of, unless the user chose."""
    few = recording.machine.gpus and "CUDA_VISIBLE_DEVICES" not in os.environ
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(recording.machine.gpus)))} if few else {}


def run_piece(
    recorder: Recorder, recording: Recording, piece: Piece, state: State, variables: dict[str, str]
) -> tuple[process.Ended, Path]:
    """Run a command until it ends or the time is over; how it ended, and its log."""
    words = shlex.split(piece.command)
    output, log = recorder.unfinished(recording), recorder.unfinished(recording, ".log")
    if piece.continues and state.run and (ROOT / state.run).is_dir():
        words = [RUN_ALL, *(word for word in words if word == "--sweep"), "--resume", state.run]
    left_s = recorder.until - time.monotonic()
    if "--sweep" in words:  # it ends with what it could do
        words += ["--sweep-minutes", str(max(1, int(left_s / 60) - 1))]
    if words[0] == "python":
        words[0] = sys.executable
    if not piece.is_run:
        words += ["--output", str(output)]
    log.unlink(missing_ok=True)
    with process.busy_host(recording.busy * (os.cpu_count() or 1), BESIDE) as busy:
        environment = {"PYTHON": sys.executable} | own_gpus(recording) | busy | variables
        return process.run(words, log, left_s, recorder.stop, environment=environment, grace_s=GRACE_S), log


def keep(recording: Recording, source: Path, target: Path, commit: str | None = None) -> None:
    """Copy a recording's files from its output below `target`. Raises RecordError where they are no valid records of
    this commit, or, without one, of one that is part of this history, or of several with the same code; OSError."""
    is_run = recording.pieces[0].is_run
    if recording.is_file:
        files = {source / Path(recording.name).name if source.is_dir() else source: target / recording.name}
    else:
        kept = kept_files(source, is_run)
        files = {path: target / recording.name / path.relative_to(source) for path in kept}
    for path in files:
        check_record(path)
    of = facts([*files])
    one = len(of.commits) == 1 and commit in (None, *of.commits)
    if of.dirty or not (one or is_of_this_code(ROOT, [*files], recording)):
        raise RecordError(f"its records are of commit {of.commit}, not of {(commit or 'one alone')[:9]}")
    if commit is None and git(ROOT, "merge-base", "--is-ancestor", of.commits[0], "HEAD") is None:
        raise RecordError(f"its commit {of.commit} is not part of this history")
    if of.devices != (recording.machine.device,):
        raise RecordError(f"it was recorded on {', '.join(of.devices)}, not on {recording.machine.device}")
    for path, place in files.items():
        if path.name == STUDY and place.exists() and not row_seeds(read_study(place)) <= row_seeds(read_study(path)):
            raise RecordError(f"{place.name} holds runs there that it lacks: continue that file")
    for path, place in files.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(place, path.read_bytes())
    if source / INDEX in files:  # pages of this recording may now lie beside those of an earlier one
        renew_index(target / recording.name)


def record_all(recorder: Recorder, mine: list[Recording], gpus: int) -> bool:
    """Record what is left of `mine` one by one; with several `gpus`, first what need not be alone, on each its share.

    False where one failed.
    """
    together = [one for one in mine if not one.alone and one.machine.gpus == 1] if gpus > 1 else []
    shares: list[list[Recording]] = [[] for _ in range(gpus)]
    for one in sorted(together, key=lambda one: -one.seconds):  # in every call alike: a row that goes on keeps its GPU
        min(shares, key=lambda share: sum(other.seconds for other in share)).append(one)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))

    def work(share: list[Recording], gpu: str) -> list[bool]:
        variables = {"CUDA_VISIBLE_DEVICES": gpu, BESIDE: "another recording on another GPU of this host"}
        return [record(recorder, one, variables) for one in share if not recorder.is_recorded(one)]

    with ThreadPoolExecutor(gpus) as pool:
        fine = [good for each in pool.map(work, shares, visible.split(",")[:gpus]) for good in each]
    rest = (one for one in mine if one not in together and not recorder.is_recorded(one))
    return all([*fine, *(record(recorder, one, {}) for one in rest)])


# --- what is there ----------------------------------------------------------------------------------


def describe(recorder: Recorder, plan: list[Recording], here: Machine) -> str:
    """A table: each recording, the seconds that it takes yet, and how far it is."""
    cells = []
    for one in plan:
        files, state = one.files(RESULTS), recorder.state(one)
        old, changed = f"commit {facts(files).commit}" if files else "missing", [*changes(ROOT, files, one).values()]
        if any(names != [] for names in changed):
            old += ", the code has changed since" if any(changed) else ", which git does not know"
        old += ", unfinished" * (not is_whole(files, one))
        now = f"begun, {state.done} of {len(one.pieces)} pieces done" if state.done or state.run else "to record"
        if not fits(one, here):
            now = f"needs {one.machine.gpus} x {one.machine.device}"
        now = "recorded" if recorder.is_recorded(one) else now
        seconds = " + ".join(f"{rest:.0f}" for rest in recorder.rest_s(one))
        cells.append({"recording": one.name, "now": now, "docs/results": old, "seconds": seconds})
    return aligned(cells, n_left=3)


def take(plan: list[Recording], folder: Path) -> int:
    """Put records into docs/results; 1 where one is refused."""
    code = 0
    there = [one for one in plan if one.files(folder)]
    if not there:
        raise RecordError(f"{folder} holds no recording of this plan")
    for one in there:
        try:
            keep(one, folder / one.name, RESULTS)
            say(f"docs/results/{one.name}")
        except RecordError as error:
            say(f"{one.name}: not taken: {one_line(error)}")
            code = 1
    say(f"{len(there)} of {len(plan)} recordings are in {folder}; then: {NEXT}")
    return code


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m ladder.plan", description=__doc__)
    parser.add_argument("plan", nargs="?", type=Path, metavar="FILE", help=f"default: docs/results/{PLAN}")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="recordings of these names, or with these in them")
    text = "the longest that this call may take (default: 10)"
    parser.add_argument("--minutes", type=positive_int, default=10, metavar="N", help=text)
    parser.add_argument(
        "--into", type=Path, metavar="DIR", help="where records go (default: results/recordings/COMMIT)"
    )
    text = "on several GPUs: what need not be alone runs on one GPU each, at the same time"
    parser.add_argument("--side-by-side", action="store_true", help=text)
    parser.add_argument("--status", action="store_true", help="record nothing: what is there, and what is missing")
    parser.add_argument("--take", type=Path, metavar="DIR", help="check what is in DIR and copy it into docs/results")
    return parser


def chosen(plan: list[Recording], words: list[str] | None, parser: OneLineParser) -> list[Recording]:
    """The recordings that the words name: the one of exactly this name, or all that have it in their names."""
    if words is None:
        return plan
    names = {one.name for one in plan}
    wanted = {word: {word} & names or {name for name in names if word in name} for word in words}
    for word, found in wanted.items():
        if not found:
            parser.error(f"--only {word}: no recording of the plan has this in its name")
    return [one for one in plan if any(one.name in found for found in wanted.values())]


def main(argv: list[str] | None = None) -> int:
    parser, began = build_parser(), time.monotonic()
    given = parser.parse_args(argv)
    try:
        plan = chosen(read_plan(given.plan or RESULTS / PLAN), given.only, parser)
        commit = (git(ROOT, "rev-parse", "HEAD") or "").strip()
        if not commit:
            parser.error("git cannot tell the commit: run it in a checkout")
        if given.take:
            return take(plan, given.take.resolve())
        into = (given.into or ROOT / "results" / "recordings" / commit[:7]).resolve()
        recorder = Recorder(into, commit, given.minutes, began + given.minutes * 60 - GRACE_S, process.Stop())
        return run_plan(recorder, plan, given, parser)
    except RecordError as error:
        parser.error(str(error))


def run_plan(recorder: Recorder, plan: list[Recording], given, parser: OneLineParser) -> int:
    """Say what is expected, and record it unless only the --status is wanted. Exits where the tree is not clean."""
    changes = git(ROOT, "status", "--porcelain")
    if changes and not given.status:
        files = ", ".join(line[3:] for line in changes.splitlines()[:3])
        parser.error(f"the tree is not what is committed ({files}): commit first, so that every record has its commit")
    here = machine()
    say(describe(recorder, plan, here))
    mine = [one for one in plan if fits(one, here)]
    todo = [one for one in mine if not recorder.is_recorded(one)]
    say(f"\nto record here, on {here.device}: {len(todo)} of {len(plan)}, {recorder.rest_minutes(todo)}")
    if given.status or not todo:
        return 0
    if given.side_by_side and here.gpus < 2:
        parser.error("--side-by-side needs two GPUs or more")
    recorder.stop.listen()
    os.chdir(ROOT)  # the commands are relative to it
    fine = record_all(recorder, mine, here.gpus if given.side_by_side else 1)
    rest = [one for one in todo if not recorder.is_recorded(one)]
    say(f"{len(todo) - len(rest)} of {len(todo)} recorded; left: {recorder.rest_minutes(rest)}")
    say(f"--take {recorder.into} puts what is recorded into docs/results")
    return 130 if recorder.stop.requests else int(not fine)


if __name__ == "__main__":
    run_command(main, "python -m ladder.plan")
