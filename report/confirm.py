"""Whether a short run bears out a record: row by row, on a card of the same kind.

    python -m report.confirm RECORD RUN     folders: of a record in docs/results, and of a run of its workload

Every time is divided by the card's own ratio: how much longer the reference work took than in the record, in
the median over all rows. So a slower card is told from slower code. What bears out the record is written to
RECORD/confirmed.json. Where a ratio leaves BOUNDS on a card of the record's kind, or a row did not do what it
did in the record, the command fails, with the row's name, and an earlier confirmation is taken away. On
another card it tells how that card compares. A run of other code than the record's confirms nothing.
"""

from pathlib import Path
from statistics import median

from common.record import Run, write_json
from common.text import OneLineParser, aligned, run_command, say
from report.cells import milliseconds
from report.figures import MARK, Line, derive, launch_us, reference_ms, waits_for_the_host
from report.load import DIFFER, RecordError, load

BOUNDS = (0.97, 1.03)
SLOW_HOST = 1.25  # times as long as in the record, from which rows that wait for launches are marked

Pair = tuple[Line, Line]  # a row of the record, and of the run


def pairs_of(record: Run, again: Run) -> list[Pair]:
    """The rows that both have with a time. Raises RecordError for other work, and for a record without
    times."""
    if not (record.workload and again.workload):
        raise RecordError("one of the two has no workload")
    harmful = {*record.workload.differing(again.workload)} - {"text", "text_sha256"}
    if harmful:
        raise RecordError(f"the run did other work: {', '.join(sorted(harmful))}")
    by_name, recorded = {line.name: line for line in derive(again).timed_steps}, derive(record).timed_steps
    if not recorded:
        raise RecordError("no row of the record has a time")
    return [(line, by_name[line.name]) for line in recorded if line.name in by_name]


def card_ratio(pairs: list[Pair]) -> float:
    """How much longer the reference work took than in the record; 1 where it was not timed."""
    ratios = []
    for then, now in pairs:
        products = [reference_ms(line.row).get("product") for line in (then, now)]
        if all(products):
            ratios.append(products[1] / products[0])
    return median(ratios) if ratios else 1.0


def ratios_of(then: Line, now: Line, card: float) -> dict[str, float]:
    """The run's time over that of the record, by the card's ratio; its peak of memory, its last losses."""
    ratios = {"ms": now.ms / then.ms / card}
    if then.gib and now.gib:
        ratios["peak"] = now.gib / then.gib
    if then.loss and now.loss:
        ratios["loss"] = now.loss / then.loss
    return ratios


def slow_host_ratio(then: Line, now: Line) -> float:
    """How much longer the host took to launch a kernel than in the record, where the GPU waits for the
    launches of a row; 1 where it does not, or where they took about as long."""
    before, after = launch_us(then.row), launch_us(now.row)
    if waits_for_the_host(now.row) and before and after and after > SLOW_HOST * before:
        return after / before
    return 1.0


def what_differs(then: Line, now: Line, ratios: dict[str, float], slow_host: float) -> list[str]:
    """Why a row does not bear out that of the record, in clauses. A host that launches `slow_host` times as
    long excuses a time that is as much longer."""
    least, most = BOUNDS
    longest = {"ms": most * slow_host}
    names = [name for name, ratio in ratios.items() if not least <= ratio <= longest.get(name, most)]
    reasons = []
    if names:
        reasons.append(f"{', '.join(names)} beyond {least} to {most}")
    if then.gib and not now.gib:
        reasons.append("it has no peak of memory")
    if then.loss and not now.loss:
        reasons.append("it has no loss")
    if now.same_work == "differs":
        reasons.append("it did other work than the run's first row")
    if other := other_settings(then, now):
        reasons.append(f"other settings: {', '.join(other)}")
    return reasons


def other_settings(then: Line, now: Line) -> list[str]:
    """The names of what was observed in the record, and of the run differently."""
    observed = vars(now.row.settings)
    return [name for name, value in vars(then.row.settings).items() if value not in (None, observed[name])]


def missing_rows(record: Run, again: Run) -> list[str]:
    """A line for each step that has a time in the record, and none in the run."""
    lines = {line.name: line for line in derive(again).steps}
    timed = [name for name, line in lines.items() if line.ms]
    missing = [line.name for line in derive(record).timed_steps if line.name not in timed]
    return [
        f"{name} is not confirmed: {lines[name].why_untimed if name in lines else 'it did not run'}"
        for name in missing
    ]


def confirm(record: Run, again: Run) -> tuple[dict, list[dict], list[str]]:
    """The content of confirmed.json, the rows of a table, and a line for each row that is not confirmed."""
    pairs = pairs_of(record, again)
    card, content, rows, failed = card_ratio(pairs), {}, [], missing_rows(record, again)
    for then, now in pairs:
        ratios, slow_host = ratios_of(then, now, card), slow_host_ratio(then, now)
        content[then.name] = {"step_ms": now.ms, "slow_host": slow_host > 1} | ratios
        mark = MARK if slow_host > 1 else ""
        cells = {"step": then.name, "record, ms": milliseconds(then.ms)}
        cells |= {"now, ms": f"{milliseconds(now.ms)}{mark}"}
        rows.append(cells | {name: f"{ratio:.3f}" for name, ratio in ratios.items()})
        if reasons := what_differs(then, now, ratios, slow_host):
            failed.append(f"{then.name} is not confirmed: {'; '.join(reasons)}")
    machine = again.environment
    about = {"date": (again.started_at or "")[:10], "commit": machine.commit, "device": machine.device}
    about |= {"gpu_uuid": machine.gpu_uuid, "versions": machine.versions, "card": card}
    failed += [problem for problem in again.problems if problem.startswith(DIFFER)]
    return about | {"code_sha256": machine.code_sha256, "rows": content}, rows, failed


def main() -> int:
    parser = OneLineParser(prog="python -m report.confirm", description=__doc__)
    parser.add_argument("record", type=Path, metavar="RECORD")
    parser.add_argument("run", type=Path, metavar="RUN")
    options = parser.parse_args()
    try:
        record, again = load(options.record), load(options.run)
        if not (
            isinstance(record, Run) and isinstance(again, Run) and record.environment and again.environment
        ):
            raise RecordError("give two runs of steps")
        content, rows, failed = confirm(record, again)
    except RecordError as error:
        parser.error(str(error))
    say(f"{aligned(rows)}\n\nThe reference work took {content['card']:.3f} times as long as in the record.")
    if again.environment.device != record.environment.device:
        say(f"{again.environment.device} is compared with {record.environment.device}: nothing is confirmed")
        return 0
    if again.environment.code_sha256 != record.environment.code_sha256 or not again.environment.commit:
        say("nothing is confirmed: the run is of other code than the record, or of no commit")
        return 1
    if failed:
        (options.record / "confirmed.json").unlink(missing_ok=True)
        say("\n".join(failed))
        return 1
    write_json(options.record / "confirmed.json", content)
    say(f"confirmed: {options.record / 'confirmed.json'}")
    return 0


if __name__ == "__main__":
    run_command(main, "python -m report.confirm")
