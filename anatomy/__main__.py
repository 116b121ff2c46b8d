"""Experiments that show why each step helps. Each has one question, a prediction by arithmetic, and one
table.

python -m anatomy                                  lists them
python -m anatomy NAME [--quick] [--json FILE]     runs one; --help has its prediction and its sizes
python -m anatomy all [--device NAME] [--quick]    runs all but gradients, and prints one Markdown page
"""

import ast
import importlib
import sys
import time
from datetime import date
from pathlib import Path

from common.text import OneLineParser, one_line, portable_command, progress, run_command, say

# In the order in which they are read. `host` comes last: a profiler that has run may slow what is launched
# after it.
ALL = (
    *("roofline", "memory", "kernel", "layout", "precision", "learning", "context", "attention", "masks"),
    *("gradients", "fusion", "graph", "compiler", "capture", "techniques", "input_pipeline", "host"),
)

LONG = ("gradients",)  # trains a model first: two minutes of a GPU


def question(name: str) -> str:
    """The first line of an experiment's docstring; nothing is imported."""
    text = (Path(__file__).parent / f"{name}.py").read_text()
    return ast.get_docstring(ast.parse(text)).partition("\n")[0]


def run_all(words: list[str]) -> int:
    """Run the experiments in this process and print the page part by part. Returns 1 if one failed."""
    from anatomy import lab as shared
    from common import hardware
    from common.record import write_json

    parser = OneLineParser(prog="python -m anatomy all")
    shared.add_options(parser)
    options, failed, records = parser.parse_args(words), False, []
    try:
        environment = hardware.describe(shared.Lab("all", options).device)
    except ValueError as error:
        parser.error(one_line(error).replace("--output", "--json"))
    facts = environment.versions | {"commit": environment.commit, "on": date.today()}
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    command = portable_command("python -m anatomy", sys.argv[1:])
    say(f"# Anatomy on {environment.device}\n\n`{command}`, {about}")
    for name in (name for name in ALL if name not in LONG):
        lab, began = shared.Lab(name, options), time.monotonic()
        try:
            sentence = importlib.import_module(f"anatomy.{name}").run(lab)
        except Exception as error:  # those of CUDA and of compilers have no common class
            sentence, failed = f"It failed: {type(error).__name__}: {one_line(error)}", True
        progress("")
        say(f"\n## {name}: {question(name)}\n\n{lab.tables('github')}\n\n{sentence}")
        say(f"{name}: {time.monotonic() - began:.0f} s", sys.stderr)
        records.append(lab.record(question(name), sentence))
    if options.json:
        write_json(options.json, shared.file_of(environment) | {"experiments": records})
    return int(failed)


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["all"]:
        return run_all(words[1:])
    if words and words[0] in ALL:
        from anatomy.lab import run_experiment

        run_experiment(words[0], words[1:])
        return 0
    questions = [f"  {name:15} {question(name)}" for name in ALL]
    parser = OneLineParser(
        prog="python -m anatomy", description="\n".join([(__doc__ or "").strip(), "", *questions])
    )
    parser.add_argument("name", nargs="?", choices=[*ALL, "all"], metavar="NAME", help="or all")
    parser.parse_args(words)
    say(parser.description)
    return 0


if __name__ == "__main__":
    run_command(main, "python -m anatomy")
