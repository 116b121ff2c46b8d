"""What is to be recorded (docs/results/plan.ini), what is, of which commit, and which code has changed since."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
import subprocess
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path

from common.record import MERGED
from common.text import one_line
from report import causes, largest_batch, parity, sweep, traffic
from report.load import PREDICTIONS, RecordError, inside, read_json, read_run
from report.table import commit_name, markdown, pipe_table

PLAN, RUN_ALL = "plan.ini", "./run_all.sh"
OF_A_RUN = (MERGED, f"[1-9]*/{MERGED}", "scaling.json")  # what is kept of a run folder
NOT_KEPT = (".log", ".trace.json.gz")  # of a folder of experiments
TRAFFIC = "attention-traffic", traffic.STEP_TRAFFIC  # begin the name of a file
VARIANTS = "anatomy/variants"
EVERY = ("[0-9]_*.py", "common")
CODE = (*EVERY, ":!common/passes.py")  # what every row is about: passes.py measures what predictions are made of
PREDICTED = (*EVERY, "ladder/predict.py", "ladder/counts.py")  # what a sweep is about: its cells have predictions
RUNNERS = ("parity", "ablations", "__main__")  # of anatomy/: they run what measures, and measure nothing themselves
EXPERIMENTS = ("anatomy", f":!{VARIANTS}", *(f":!anatomy/{name}.py" for name in RUNNERS))
ABOUT = {  # what else figures are about, by a word of their command
    "--peers": ("peers",), "--causes": ("peers",), "anatomy.ablations": (VARIANTS,),
    "anatomy.parity": ("peers", VARIANTS), "anatomy.traffic": EXPERIMENTS, "anatomy all": EXPERIMENTS,
}  # fmt: skip
KEYS = {"pieces", "alone", "busy"}
AGE = "Commits of these records, and what is missing: [recordings](results/README.md)."
SINCE = "<!-- since -->"  # ends a line that git made: where git cannot tell, the line stays as it is


@dataclass(frozen=True)
class Machine:
    """A folder of docs/results: how many GPUs its recordings need, and what the device is called."""

    gpus: int
    device: str


@dataclass(frozen=True)
class Piece:
    seconds: int  # expected
    command: str

    @property
    def is_run(self) -> bool:
        """Whether run_all.sh does it, in a folder that it chooses. Any other command takes --output."""
        return self.command.startswith(RUN_ALL)

    @property
    def continues(self) -> bool:
        """Whether what was given up goes on where it ended, instead of from its beginning."""
        return (self.is_run and "--batch-size max" not in self.command) or "anatomy.parity" in self.command


@dataclass(frozen=True)
class Recording:
    """A section of the plan. Its name is the path of its folder or file below docs/results."""

    name: str
    machine: Machine
    pieces: tuple[Piece, ...]
    alone: bool = True  # no other recording may run on this host meanwhile
    busy: int = 0  # processes a core that keep the host busy meanwhile

    @property
    def seconds(self) -> int:
        return sum(piece.seconds for piece in self.pieces)

    @property
    def is_file(self) -> bool:
        return self.name.endswith(".json")

    def code(self, root: Path, files: list[Path]) -> tuple[str, ...]:
        """Paths of the code that the figures in its files are about; of the variants, those that are in the files."""
        words = " ".join(piece.command for piece in self.pieces)
        about = dict.fromkeys(path for sign, paths in ABOUT.items() if sign in words for path in paths)
        patches = patches_in(root, files) if VARIANTS in about else []
        code = PREDICTED if "--sweep" in words else CODE
        return (*code, *(path for path in about if path != VARIANTS), *patches)

    def files(self, results: Path) -> list[Path]:
        """Its files below a folder like docs/results."""
        place = results / self.name
        if self.is_file:
            return [place] if place.is_file() else []
        return kept_files(place, self.pieces[0].is_run)


def patches_in(root: Path, files: list[Path]) -> list[str]:
    """The patches of those variants that are rows of the files; their whole folder where one has no patch any more."""
    said = _objects([read_json(path) for path in files if path.suffix == ".json"])
    named = [(one.get("row") or one.get("name"), one["script"]) for one in said if "script" in one]
    rows = {name for name, script in named if name != script}  # the others are scripts as they are
    patches = {patch.read_text().partition("\n")[0].removeprefix("Variant: "): str(patch.relative_to(root))
               for patch in (root / VARIANTS).glob("*.patch")}  # fmt: skip
    return sorted(patches[row] for row in rows) if rows <= patches.keys() else [VARIANTS]


def kept_files(folder: Path, is_run: bool) -> list[Path]:
    """What is recorded of a folder: the merges of a run; of experiments all but logs and traces."""
    found = (path for pattern in (OF_A_RUN if is_run else ("**/*",)) for path in sorted(folder.glob(pattern)))
    return [path for path in found if path.is_file() and not path.name.endswith(NOT_KEPT)]


# --- the plan -------------------------------------------------------------------------------------


def read_plan(path: Path) -> list[Recording]:
    """The recordings of a plan, in its order. Raises RecordError, one line."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str
    try:
        with path.open() as file:
            parser.read_file(file)
        machines = {name: _machine(text) for name, text in parser["machines"].items()}
        return [_recording(name, parser[name], machines) for name in parser.sections() if name != "machines"]
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read ({error.strerror})") from None
    except (configparser.Error, ValueError, KeyError, UnicodeError) as error:
        raise RecordError(f"{path.name} is no plan: {str(error).splitlines()[0]}") from None


def _machine(text: str) -> Machine:
    gpus, _, device = text.partition(" ")
    return Machine(int(gpus), device)


def _recording(name: str, section: configparser.SectionProxy, machines: dict[str, Machine]) -> Recording:
    machine, inside = name.partition("/")[0], Path(name)
    if machine not in machines or len(inside.parts) < 2 or ".." in inside.parts:
        raise ValueError(f"[{name}] does not begin with a machine of [machines] and a slash")
    if unknown := set(section) - KEYS:
        raise ValueError(f"[{name}] has the unknown key {min(unknown)}")
    pieces = [piece for piece in re.split(r"\n(?=\d+ )", section.get("pieces", "").strip()) if piece]
    cut = [" ".join(piece.split("\n")).partition(" ") for piece in pieces]
    if not cut or not all(seconds.isdecimal() and shlex.split(command) for seconds, _, command in cut):
        raise ValueError(f"[{name}] needs pieces: on each line the expected seconds, then a command")
    made = tuple(Piece(int(seconds), command) for seconds, _, command in cut)
    if len(made) > 1 and any(piece.is_run for piece in made):
        raise ValueError(f"[{name}] has several pieces: {RUN_ALL} makes a folder of its own, and can only be one")
    return Recording(name, machines[machine], made, section.getboolean("alone", True), section.getint("busy", 0))


# --- what records say of themselves -----------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """Of one or several files; empty where they do not say."""

    commits: tuple[str, ...]
    dirty: bool  # the tree had uncommitted changes
    started_at: str  # the first
    devices: tuple[str, ...]
    commands: list[str]

    @property
    def commit(self) -> str:
        return commit_name(", ".join(commit[:7] for commit in self.commits), self.dirty)


def facts(paths: list[Path]) -> Facts:
    """What the files say of how they were recorded. Raises RecordError."""
    contents = [read_json(path) for path in paths if path.suffix == ".json"]
    said = _objects(contents)
    commits, devices = (
        sorted({*_texts([one for one in said if "commit" in one], key)}) for key in ("commit", "device")
    )
    lines = _texts([content for content in contents if isinstance(content, dict)], "command")
    commands = list(dict.fromkeys(line for text in lines for line in text.splitlines()))
    dirty = any(one.get("dirty") for one in said)
    return Facts(tuple(commits), dirty, min(_texts(said, "started_at"), default=""), tuple(devices), commands)


def _objects(contents: list) -> list[dict]:
    """Every object in contents of JSON files, however deep."""
    return [one for content in contents for _, one in inside(content) if isinstance(one, dict)]


def _texts(said: list[dict], key: str) -> list[str]:
    return [one[key] for one in said if isinstance(one.get(key), str) and one[key]]


def check(path: Path) -> None:
    """Raises RecordError where a file is not a valid record of the kind that its name says."""
    readers = {MERGED: read_run, parity.STUDY: parity.read_study, "ablations.json": causes.read_causes,
               sweep.SWEEP: sweep.read_cells, largest_batch.LARGEST: largest_batch.read_largest}  # fmt: skip
    if path.parent.name == causes.FOLDER:
        causes.read_causes(path)
    elif path.stem.startswith(TRAFFIC):
        traffic.read_traffic(path)
    elif path.suffix == ".json":
        readers.get(path.name, read_json)(path)


def is_of_this_code(root: Path, files: list[Path], recording: Recording) -> bool:
    """Whether files were recorded from commits, by the code as it is now."""
    changed = changes(root, files, recording)
    return bool(changed) and not facts(files).dirty and all(names == [] for names in changed.values())


def changes(root: Path, files: list[Path], recording: Recording) -> dict[str, list[str] | None]:
    """By commit that the files name, what has changed since of the code that they are about: see `changed_since`.

    Where a sweep was predicted at another commit than it was measured, each is asked of its own code.
    """
    of, code = facts(files), recording.code(root, files)
    predicted = {*_texts(_objects([read_json(path) for path in files if path.suffix == ".json"]), "predicted_commit")}
    about = dict.fromkeys(of.commits, CODE if predicted else code) | dict.fromkeys(predicted, code)
    return {commit: changed_since(root, (commit,), paths) for commit, paths in sorted(about.items())}


def is_whole(files: list[Path], recording: Recording) -> bool:
    """Whether no file is a study of losses that was interrupted, or that lacks a row of its command."""
    words = shlex.split(" ".join(piece.command for piece in recording.pieces).partition("--rows ")[2])
    planned = [*takewhile(lambda word: not word.startswith("--"), words)]
    for study in (parity.read_study(path) for path in files if path.name == parity.STUDY):
        rows = {run.row for run in study.runs}
        there = (any(row == name or row.startswith(f"{name}_") for row in rows) for name in planned)
        if parity.missing(study) or not all(there):
            return False
    return True


# --- git ------------------------------------------------------------------------------------------


def git(root: Path, *words: str) -> str | None:
    """What git prints; None where it fails or is not there."""
    command = ["git", "-c", f"safe.directory={root}", "-c", "core.quotepath=off", "-C", str(root), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def changed_since(root: Path, commits: tuple[str, ...], code: tuple[str, ...]) -> list[str] | None:
    """The files of some code that differ from what they were at these commits; None where git cannot tell.

    A file that came since is none of them: only one that is changed itself can make use of it. A patch that came since
    is one: rows name patches. A file that differs in comments and docstrings alone is none.
    """
    patches = [path for path in code if path.startswith(VARIANTS)]
    asked = [("a", code), *([("A", patches)] if patches else [])]
    compare = ("diff", "--name-only", "--no-renames")
    found = [[git(root, *compare, f"--diff-filter={kind}", commit, "--", *paths) for kind, paths in asked]
             for commit in commits]  # fmt: skip
    diffs = [None if None in each else "".join(each) for each in found]
    if not (root / ".git").exists() or not commits or None in diffs:
        return None
    names = {(commit, name) for commit, text in zip(commits, diffs, strict=True) for name in text.splitlines()}
    return sorted(
        {name for commit, name in names if not is_same_code(git(root, "show", f"{commit}:{name}"), root / name)}
    )


def is_same_code(before: str | None, path: Path) -> bool:
    """Whether a file of Python differs from an earlier text in comments, docstrings and layout alone."""
    if before is None or path.suffix != ".py" or not path.exists():
        return False
    return without_docstrings(before) == without_docstrings(path.read_text())


def without_docstrings(source: str) -> str:
    """The syntax tree of a text as a line; the text itself where it is no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def describe_files(names: list[str]) -> str:
    """The scripts by name, other files by their folder alone: "`0_baseline.py`, files of `common/`"."""
    folders = sorted({name.partition("/")[0] for name in names if "/" in name})
    said = [f"`{name}`" for name in names if "/" not in name] + [f"files of `{folder}/`" for folder in folders]
    return ", ".join(said)


def made_by_git(document: Path, made: list[str] | None) -> list[str]:
    """The lines that git made; where git cannot tell, those that the document has."""
    return [line for line in document.read_text().splitlines() if line.endswith(SINCE)] if made is None else made


# --- what pages say of it ---------------------------------------------------------------------------


def readme_lines(root: Path, record: Path) -> list[str] | None:
    """Whether README's record is older than the code that it describes, and which other runs of its machine are; None
    where git cannot tell."""
    of = facts([record])
    if (changed := changed_since(root, of.commits, CODE)) is None:
        return None
    since = (
        "The code of the scripts, or of `common/`, has changed since this run"
        if changed
        else "The code of the scripts and of `common/` is that of this run, except `passes.py`, which predictions use"
    )
    others = (path for path in sorted(record.parents[1].glob(f"*/{MERGED}")) if path != record)
    older = [f"`{path.parent.name}`" for path in others if changed_since(root, facts([path]).commits, CODE)]
    since += f". It has changed since the runs {', '.join(older)}, which other tables show" if older else ""
    return [f"{since}. The [recordings](docs/results/README.md) list what changed and what is missing. {SINCE}"]


def page_lines(root: Path, results: Path) -> list[str] | None:
    """How many records are older than the code that they are about, and by commit what has changed since.

    None where git cannot tell: outside a checkout, or in one that holds a part of the history alone. In a whole one, a
    commit that is missing never became part of it.
    """
    plan = read_plan(results / PLAN)
    changed = [changes(root, files, one) for one in plan if (files := one.files(results))]
    lost = sorted({commit for each in changed for commit, names in each.items() if names is None})
    if lost and (
        len(lost) == len({*chain(*changed)}) or git(root, "rev-parse", "--is-shallow-repository") != "false\n"
    ):
        return None
    older, silent = sum(any(each.values()) for each in changed), changed.count({})
    unfinished = sum(not is_whole(one.files(results), one) for one in plan)
    said = f"Of {len(plan)} planned recordings {len(plan) - len(changed)} are missing, {unfinished} unfinished, and "
    said += f"{older} are older than the code they describe." + f" The commit of {silent} is not known." * bool(silent)
    names: dict[str, set[str]] = {}
    for commit, files in (item for each in changed for item in each.items()):
        names.setdefault(commit, set()).update(files or ())
    since = {commit: describe_files(sorted(files)) or "nothing" for commit, files in names.items()}
    since |= dict.fromkeys(lost, "not known, because it never became part of this history")
    return [f"{said} {SINCE}", *(f"- Since commit {commit[:7]}: {since[commit]}. {SINCE}" for commit in sorted(since))]


def recordings_page(results: Path) -> str:
    """A table of all that is planned or recorded: commit, date, machine and command."""
    plan = read_plan(results / PLAN)
    cells = [_cells(one.name, one.files(results), one) for one in plan]
    known = {path for one in plan for path in one.files(results)}
    others = (path for path in sorted(results.glob("*/**/*.json")) if path not in known and path.name != PREDICTIONS)
    cells += [_cells(f"{path.relative_to(results).as_posix()}, not in the plan", [path]) for path in others]
    return pipe_table(("recording", "commit", "date", "machine", "command"), cells, n_left=5)


def _cells(name: str, files: list[Path], planned: Recording | None = None) -> tuple[str, ...]:
    of = facts(files)
    commands = of.commands or [piece.command for piece in (planned.pieces if planned else ())]
    command = f"{'planned: ' * (not of.commands)}`{_code(commands[0])}`" if commands else "-"
    command += f" and {len(commands) - 1} more" * (len(commands) > 1)
    unfinished = planned is not None and not is_whole(files, planned)
    commit = of.commit + ", unfinished" * unfinished if files else "not recorded"
    return markdown(name), commit, of.started_at[:10] or "-", markdown(", ".join(of.devices)) or "-", command


def _code(command: str) -> str:
    """A command as it may stand between backticks in a table."""
    return one_line(command, 1000).replace("`", "'").replace("|", "\\|")


def with_since(parts: dict[str, list[str]], root: Path, results: Path, shown: Path) -> dict[str, list[str]]:
    """The generated parts of each page, by name, with what says how old their records are. README is about `shown`."""
    ends = {"README.md": readme_lines(root, shown), "docs/results/README.md": page_lines(root, results)}
    for name, (first, *others) in parts.items():
        lines = "\n".join(made_by_git(root / name, ends[name])) if name in ends else AGE
        gap = "\n" * (1 + (name != "README.md"))  # there the line ends the paragraph about the table
        parts[name] = [f"{first}{gap}{lines}", *others]
    return parts
