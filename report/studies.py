"""How each kind of study is reported: a module with its tables. common/record.py lists the kinds, STUDIES."""

from collections.abc import Callable
from typing import NamedTuple

from common.record import Study
from report import ablations, parity, scaling, sweep
from report.figures import Line


class Kind(NamedTuple):
    """How a study of one kind is reported."""

    tables: Callable[[Study], dict[str, list[dict]]]  # rows by the title of their table
    picture: Callable[[Study], bytes | None] = lambda study: None  # a PNG
    note_of: Callable[[Line], str] = lambda line: line.note


KINDS = {
    "scaling": Kind(scaling.tables),
    "sweep": Kind(sweep.tables),
    "ablations": Kind(ablations.tables, note_of=ablations.note_of),
    "parity": Kind(parity.tables, parity.picture),
}
