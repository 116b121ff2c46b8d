"""What does saved memory buy? The largest batch that each step can train: ./run_all.sh --batch-size max.

Peak memory grows with the batch along a straight line. Two measured batches, the equal one of all steps and half of
it, give the line, and the line gives the batch at which the free memory ends. At most three attempts confirm it: the
first that trains is the largest batch of the row. Each batch runs in a process of its own, with expandable segments:
without them, memory that is free but in pieces is lost, and a batch that fits by its peak does not train.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

from common.record import read_object, write_bytes, write_json
from common.text import OneLineParser, portable_command, say
from ladder import process, shared
from ladder.cells import run_cells
from ladder.process import ROOT
from report.largest_batch import LARGEST, Largest, LargestBatches, read_largest, render_markdown, table

SHARES = (0.97, 0.94, 0.9)  # of the free memory: libraries hold some beside torch's allocator
OPTION = "--batch-size"
WARMUP, TIMED = 2, 5  # steps of a batch
CHOSEN = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}  # where a user chose how the allocator works


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
    shared.refuse_others(given, parser, {"only"}, "--batch-size max only trains the five scripts, on one GPU")
    if any(word.partition("=")[0] == "--global-batch-size" for word in arguments):
        parser.error("--batch-size max chooses the batch of a step: leave out --global-batch-size")
    pairs = zip(["", *arguments], arguments, strict=False)  # each word after the one before it
    words = [word for before, word in pairs if OPTION not in (before, word.partition("=")[0])]
    facts = check(words, 1)
    if facts["device_type"] != "cuda":
        parser.error("--batch-size max needs a GPU: only its allocator counts what a step holds at most")
    workload, stop = facts["workload"], process.Stop()
    workload |= {"warmup": WARMUP, "steps": TIMED}
    names = shared.steps_named(given.only, shared.step_names(ROOT), parser)
    stop.listen()
    folder = shared.new_folder(ROOT, "largest-batch-", {}, parser)
    words = [*words, *facts["pinned"]]
    trials = Trials(folder, words, facts["free_bytes"], stop, limit_s, workload["accumulate"])
    rows = [trials.largest(ROOT / f"{name}.py", workload["batch_size"]) for name in names if not stop.requests]
    command = portable_command(["./run_all.sh", *argv])
    found = LargestBatches(command, *when_and_where(folder), workload, rows)
    write_json(folder / LARGEST, asdict(found))
    text = f"# What the saved memory buys\n\n{render_markdown(read_largest(folder / LARGEST))}\n"
    write_bytes(folder / f"{Path(LARGEST).stem}.md", text.encode())
    say(f"\n{table(rows)}\nwritten to {shared.shown(folder, ROOT)}")
    return 130 if stop.requests else int(any(row.status not in ("ok", "skipped", "oom") for row in rows))


def when_and_where(folder: Path) -> tuple[str | None, dict | None]:
    """When the first batch that left a record was started, and the environment in it."""
    records = [read_object(path) for path in folder.glob("*/*.json")]
    known = [(record["started_at"], record["environment"]) for record in records if record.get("environment")]
    return min(known, key=lambda one: one[0], default=(None, None))


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
        steps = ["--warmup", str(WARMUP), "--steps", str(TIMED), "--quick"]
        words = [*self.words, OPTION, str(batch), *steps]
        todo = [{"name": f"batch {batch}", "words": words, "output": str(output), "seconds": 0}]
        environment = {} if os.environ.keys() & CHOSEN else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        run_cells(script, todo, self.folder / f"{script.stem}.log", self.limit_s, self.stop, environment)
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
