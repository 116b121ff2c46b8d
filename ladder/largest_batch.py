"""What does saved memory buy? The largest batch that each step can train: ./run_all.sh --batch-size max.

Peak memory grows with the batch along a straight line. Two measured batches, the equal one of all steps and half of
it, give the line, and the line gives the batch at which the free memory ends. At most three attempts confirm it: the
first that trains is the largest batch of the row. Each batch runs in a process of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.record import write_bytes, write_json
from common.text import OneLineParser, aligned, portable_command, say
from ladder import process, shared
from ladder.cells import run_cells
from ladder.process import ROOT
from ladder.shared import GIB

SHARES = (0.97, 0.94, 0.9)  # of the free memory: libraries hold some beside torch's allocator
OPTION = "--batch-size"
STEPS = ("--warmup", "2", "--steps", "5", "--quick")


@dataclass
class Largest:
    """What a step trains at the equal batch and at its largest; rows of common.record hold the rest."""

    step: str
    status: str = "failed"
    reason: str | None = None
    equal_batch: int | None = None
    equal_tokens_per_s: float | None = None
    equal_peak_bytes: int | None = None
    bytes_per_sequence: float | None = None  # of the line
    batch: int | None = None
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    tried: list[int] = field(default_factory=list)  # attempts that ran, in order


def predicted_batches(peaks: dict[int, int], free_bytes: int, accumulate: int = 1) -> tuple[float, list[int]]:
    """Bytes a sequence by the line through two measured peaks, by batch, and the batches to try, the largest first.

    All are multiples of `accumulate`. Raises ValueError where the peak does not grow with the batch.
    """
    (few, low), (many, high) = sorted(peaks.items())
    slope = (high - low) / (many - few)
    if slope <= 0:
        raise ValueError(f"its peak does not grow from batch {few} to {many}: try a larger --seq-len")
    batches = [many + int((share * free_bytes - high) // slope) for share in SHARES]
    whole = [batch // accumulate * accumulate for batch in batches]
    return slope, [batch for batch in dict.fromkeys(whole) if batch > many]


def main(given, arguments: list[str], argv: list[str], parser: OneLineParser, check, limit_s: int) -> int:
    """Measure, predict, confirm and tabulate; a batch may take `limit_s`. Exits with code 2 and one line on a CPU."""
    others = (given.resume, given.peers, given.repeat > 1, (given.gpus or 1) > 1, given.scaling, given.parallel,
              given.no_roofs, given.no_profile, given.sweep_minutes != parser.get_default("sweep_minutes"))  # fmt: skip
    if any(others):
        parser.error(
            "--batch-size max only trains the five scripts, on one GPU: leave out --resume, --peers, --repeat, --gpus, "
            "--scaling, --parallel, --no-roofs, --no-profile and --sweep-minutes"
        )
    if any(word.partition("=")[0] == "--global-batch-size" for word in arguments):
        parser.error("--batch-size max chooses the batch of a step: leave out --global-batch-size")
    pairs = zip(["", *arguments], arguments, strict=False)  # each word after the one before it
    words = [word for before, word in pairs if OPTION not in (before, word.partition("=")[0])]
    facts = check(words, 1)
    if facts["device_type"] != "cuda":
        parser.error("--batch-size max needs a GPU: only its allocator counts what a step holds at most")
    workload, stop = facts["workload"], process.Stop()
    names = shared.steps_named(given.only, shared.step_names(ROOT), parser)
    stop.listen()
    folder = shared.new_folder(ROOT, "largest-batch-", {}, parser)
    words = [*words, *facts["pinned"]]
    trials = Trials(folder, words, facts["free_bytes"], stop, limit_s, workload["accumulate"])
    rows = [trials.largest(ROOT / f"{name}.py", workload["batch_size"]) for name in names if not stop.requests]
    write_json(folder / "batches.json", [asdict(row) for row in rows])
    command = portable_command(["./run_all.sh", *argv])
    text = f"# What the saved memory buys\n\n{table(rows, 'pipe')}\n\n    {command}\n"
    write_bytes(folder / "batches.md", text.encode())
    say(f"\n{table(rows)}\nwritten to {shared.shown(folder, ROOT)}")
    return 130 if stop.requests else int(any(row.status not in ("ok", "skipped", "oom") for row in rows))


@dataclass
class Trials:
    folder: Path
    words: list[str]
    free_bytes: int
    stop: process.Stop
    limit_s: int  # of one batch
    accumulate: int = 1

    def run(self, script: Path, batch: int) -> dict | None:
        """The row of a script at a batch, in a process of its own; None where the user ended it."""
        output = self.folder / script.stem / f"{batch}.json"
        output.parent.mkdir(exist_ok=True)
        words = [*self.words, "--batch-size", str(batch), *STEPS]
        todo = [{"name": f"batch {batch}", "words": words, "output": str(output), "seconds": 0}]
        run_cells(script, todo, self.folder / f"{script.stem}.log", self.limit_s, self.stop, "cuda")
        return shared.row_of(output) or None

    def run_until(self, trained: bool, script: Path, batches: list[int]) -> dict[int, dict]:
        """The rows of these batches in turn, by batch, up to the first that trained, or that did not."""
        rows = {}
        for batch in batches:
            if self.stop.requests or (row := self.run(script, batch)) is None:
                break
            rows[batch] = row
            if (row["status"] == "ok") == trained:
                break
        return rows

    def largest(self, script: Path, batch: int) -> Largest:
        """The line through two batches, and the first attempt along it that trains.

        Where the equal batch is one sequence a micro-batch, the other of the two is twice as large. If that one has
        no memory, the equal batch is the largest.
        """
        found, half = Largest(script.stem), batch // self.accumulate // 2 * self.accumulate
        rows = self.run_until(False, script, [half, batch] if half else [batch, 2 * batch])
        peaks = {size: row["peak_allocated_bytes"] for size, row in rows.items() if row["status"] == "ok"}
        if batch in peaks:
            found.equal_batch, found.equal_tokens_per_s = batch, rows[batch]["tokens_per_s"]
            found.equal_peak_bytes = peaks[batch]
        for row in rows.values():
            if row["status"] != "ok" and not (batch in peaks and row["status"] == "oom"):
                found.status, found.reason = row["status"], row["reason"]
                return found
        if len(rows) < 2:
            found.status, found.reason = "interrupted", "ended before both batches were measured"
            return found
        try:
            attempts = []
            if len(peaks) == 2:
                found.bytes_per_sequence, attempts = predicted_batches(peaks, self.free_bytes, self.accumulate)
        except ValueError as error:
            found.reason = str(error)
            return found
        return self.confirm(found, script, rows, attempts)

    def confirm(self, found: Largest, script: Path, rows: dict[int, dict], attempts: list[int]) -> Largest:
        """The row of a step whose line is known: of the first attempt that trains."""
        tried = self.run_until(True, script, attempts)
        found.tried = list(tried)
        trained = [size for size, row in (tried if attempts else rows).items() if row["status"] == "ok"]
        if trained:
            found.status, found.batch, best = "ok", max(trained), (rows | tried)[max(trained)]
            found.tokens_per_s, found.peak_bytes = best["tokens_per_s"], best["peak_allocated_bytes"]
        elif self.stop.requests:
            found.status, found.reason = "interrupted", "ended before an attempt trained"
        else:
            seen = ", ".join(f"batch {size} {row['status']}" for size, row in tried.items())
            found.reason = f"no attempt trained: {seen}"
        return found


def table(rows: list[Largest], style: str = "simple") -> str:
    """Tokens a second and peak at the equal batch, and beside them at each step's largest."""
    cells = []
    for row in rows:
        cell = {"step": row.step, "equal batch": "-", "tokens/s": "-", "peak GiB": "-", "largest batch": "-",
                "tokens/s there": row.status, "peak GiB there": "-", "gain": "-"}  # fmt: skip
        if row.equal_batch:
            cell |= {"equal batch": row.equal_batch, "tokens/s": f"{row.equal_tokens_per_s:,.0f}",
                     "peak GiB": f"{row.equal_peak_bytes / GIB:.1f}"}  # fmt: skip
        if row.batch:
            cell |= {"largest batch": row.batch, "tokens/s there": f"{row.tokens_per_s:,.0f}",
                     "peak GiB there": f"{row.peak_bytes / GIB:.1f}",
                     "gain": f"{row.tokens_per_s / row.equal_tokens_per_s:.2f}"}  # fmt: skip
        cells.append(cell)
    why = [f"{row.step}: {row.status}: {row.reason}" for row in rows if not row.batch]
    return "\n\n".join([aligned(cells, style), *why])
