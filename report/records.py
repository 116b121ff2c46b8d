"""What is recorded: of one machine, for the pages that judge a sentence by it; and every run, for tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from common.record import MERGED, Roofs, Row, Run
from report import parity, predictions
from report.analysis import is_timed
from report.causes import FOLDER, Causes, read_causes
from report.doubts import compared
from report.load import read_json, read_run
from report.sweep import SWEEP, Shapes, by_shape, read_cells
from report.traffic import moved_bytes

GPU, GPUS, CPU = "h200", "h200-x2", "epyc-2-cores"  # folders of docs/results
BUSY = "-busy-host"  # how the name of a run ends whose host was kept busy
SLICE = "gpt3-6.7b-slice"  # the workload of README's table
OF_SLICE = f"{SLICE}/{MERGED}"
T = TypeVar("T")


@dataclass
class Records:
    """The figures of each experiment, the runs by name, and the folder that holds them and the other records.

    What is not recorded raises KeyError, which only `measured` turns into words.
    """

    experiments: dict[str, dict] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    folder: Path = Path()

    @classmethod
    def read(cls, folder: Path) -> Records:
        experiments = {path.stem: read_json(path)["figures"] for path in folder.glob("anatomy/*.json")}
        experiments |= {path.stem: read_json(path) for path in folder.glob("*-traffic.json")}
        runs = {path.parent.name: read_run(path) for path in sorted(folder.glob(f"*/{MERGED}"))}
        return cls(experiments, runs, folder)

    def measured(self, figure: Callable[[Records], T], otherwise: T | None = None) -> T | None:
        """What a function makes of these records; where they lack what it needs, something else."""
        try:
            return figure(self)
        except KeyError:
            return otherwise

    def rows(self, *steps: str, of: tuple[str, ...] = ()) -> dict[str, tuple[Row, ...]]:
        """By run, `of` all or some, the profiled rows of these steps where it has them all."""
        found = {}
        for name, run in self.runs.items():
            profiled = {row.step: row for row in run.steps if row.profile and is_timed(row)}
            if name in (of or self.runs) and profiled.keys() >= set(steps):
                found[name] = tuple(profiled[step] for step in steps)
        if not found:
            raise KeyError(" and ".join(steps))
        return found

    def faster(self, before: str, after: str) -> dict[str, float]:
        """By run, how many times faster a step is than another, where no serious doubt is about either. A run on a host
        that was kept busy on purpose is left out."""
        found = {}
        for name, run in self.runs.items():
            if name.endswith(BUSY):
                continue
            rows = {row.step[0]: row for row in run.steps}
            speedup = compared(rows[after], rows[before], run) if {before, after} <= rows.keys() else None
            if speedup and not speedup.mark:
                found[name] = speedup.ratio
        if not found:
            raise KeyError(f"{before} and {after}")
        return found

    def attention_bytes(self) -> tuple[float, float]:
        """Bytes that the GPU counted, of attention by hand and fused."""
        traffic = self.experiments["attention-traffic"]
        by_hand, fused = (moved_bytes(traffic, kind) for kind in ("by hand", "fused"))
        if not (by_hand and fused):
            raise KeyError("counters")
        return by_hand, fused

    def roofs(self) -> Roofs:
        """What the machine reaches, measured with the run of README's table."""
        if not (roofs := self.runs[SLICE].roofs):
            raise KeyError("roofs")
        return roofs

    def causes(self, workload: str) -> Causes:
        return read_causes(self.path(f"{FOLDER}/{workload}.json"))

    def sweep(self) -> Shapes:
        return by_shape(read_cells(self.path(SWEEP)))

    def study(self) -> parity.Study:
        """The study of losses that has the peers."""
        self.path(f"parity/{parity.STUDY}")
        return parity.studies(self.folder)[0][1]  # it is the first by name

    def path(self, name: str) -> Path:
        """Raises KeyError where there is no such file."""
        if not (self.folder / name).exists():
            raise KeyError(name)
        return self.folder / name


def recorded_runs(folder: Path, pattern: str = "*/*") -> list[tuple[Path, Run]]:
    """Every recorded run below a folder, the one with the least work first."""
    folders = [path.parent for path in sorted(folder.glob(f"{pattern}/{MERGED}"))]
    runs = [(path, predictions.add_later(read_run(path / MERGED), path)) for path in folders]
    return sorted(runs, key=lambda named: named[1].workload.flops_per_step)
