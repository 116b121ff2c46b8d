"""Whether a short run bears out a record: row by row, on a card of the same kind.

    python -m report.confirm RECORD RUN     folders: of a record in docs/results, and of a run of its workload

Every time is divided by the card's own ratio: how much longer the reference work took than in the record, in
the median over all rows. So a slower card is told from slower code. The result is written to
RECORD/confirmed.json. The command fails, with the row's name, where a ratio leaves BOUNDS on a card of the
record's kind. On another card it tells how that card compares.
"""

from pathlib import Path
from statistics import fmean, median

from common.record import Row, Run, write_json
from common.text import OneLineParser, aligned, run_command, say
from report.cells import milliseconds
from report.figures import LOSS_WINDOW, launch_us
from report.load import RecordError, load

BOUNDS = (0.97, 1.03)
SLOW_HOST = 1.25  # launches that take so many times as long as in the record: then launched rows are marked


def pairs_of(record: Run, again: Run) -> list[tuple[Row, Row]]:
    """The rows that both have with a time. Raises RecordError without any, and for other work."""
    if not (record.workload and again.workload):
        raise RecordError("one of the two has no workload")
    harmful = {*record.workload.differing(again.workload)} - {"text", "text_sha256"}
    if harmful:
        raise RecordError(f"the run did other work: {', '.join(sorted(harmful))}")
    by_name = {row.step: row for row in again.rows if row.status == "ok"}
    pairs = [(row, by_name[row.step]) for row in record.rows if row.status == "ok" and row.step in by_name]
    if not pairs:
        raise RecordError("the two have no row in common that has a time in both")
    return pairs


def passes(row: Row) -> list[Row]:
    return row.passes or [row]


def step_ms(row: Row) -> float:
    """The median of the medians of its passes."""
    return median(median(each.step_ms) for each in passes(row))


def product_ms(row: Row) -> float | None:
    times = [ms for each in passes(row) for ms in each.product_ms]
    return median(times) if times else None


def card_ratio(pairs: list[tuple[Row, Row]]) -> float:
    """How much longer the reference work took than in the record; 1 where it was not timed."""
    ratios = [now / then for row, again in pairs if (then := product_ms(row)) and (now := product_ms(again))]
    return median(ratios) if ratios else 1.0


def ratios_of(row: Row, again: Row, card: float) -> dict[str, float]:
    """The run's time over that of the record, by the card's ratio; its peak of memory, its last losses."""
    ratios = {"ms": step_ms(again) / step_ms(row) / card}
    if row.peak_bytes and again.peak_bytes:
        ratios["peak"] = again.peak_bytes / row.peak_bytes
    if row.loss and again.loss:
        ratios["loss"] = fmean(again.loss[-LOSS_WINDOW:]) / fmean(row.loss[-LOSS_WINDOW:])
    return ratios


def waits_for_a_slow_host(row: Row, again: Row) -> bool:
    """Whether a row is launched, by a host that launches more slowly than that of the record."""
    then, now = launch_us(row), launch_us(again)
    return not again.settings.captured and bool(then and now and now > SLOW_HOST * then)


def out_of_bounds(ratios: dict[str, float], slow_host: bool) -> list[str]:
    """The names of ratios beyond BOUNDS; a slow host excuses the time."""
    least, most = BOUNDS
    names = [name for name, ratio in ratios.items() if not least <= ratio <= most]
    return [name for name in names if not (slow_host and name == "ms")]


def confirm(record: Run, again: Run) -> tuple[dict, list[dict], list[str]]:
    """The content of confirmed.json, the rows of a table, and a line for each row that is not confirmed."""
    pairs = pairs_of(record, again)
    card, content, rows, failed = card_ratio(pairs), {}, [], []
    for row, now in pairs:
        ratios, slow_host = ratios_of(row, now, card), waits_for_a_slow_host(row, now)
        content[row.step] = {"step_ms": step_ms(now)} | ratios
        mark = "?" if slow_host else ""
        cells = {"step": row.step, "record, ms": milliseconds(step_ms(row))}
        cells |= {"now, ms": f"{milliseconds(step_ms(now))}{mark}"}
        rows.append(cells | {name: f"{ratio:.3f}" for name, ratio in ratios.items()})
        if names := out_of_bounds(ratios, slow_host):
            failed.append(
                f"{row.step} is not confirmed: {', '.join(names)} beyond {BOUNDS[0]} to {BOUNDS[1]}"
            )
    machine = again.environment
    about = {"date": (again.started_at or "")[:10], "commit": machine.commit, "device": machine.device}
    about |= {"gpu_uuid": machine.gpu_uuid, "versions": machine.versions, "card": card}
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
    if failed:
        say("\n".join(failed))
        return 1
    write_json(options.record / "confirmed.json", content)
    say(f"confirmed: {options.record / 'confirmed.json'}")
    return 0


if __name__ == "__main__":
    run_command(main, "python -m report.confirm")
