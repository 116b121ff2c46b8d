"""What does each choice inside a step give? One script with a small patch, everything else as it is.

    python -m ladder.ablations [--only NAME ...] [--output FOLDER] [ARGUMENT ...]

The ARGUMENTs are those of a step: --preset gpt2 --steps 30. Each file of anatomy/variants/ is a patch of a
script, with what arithmetic predicts for gpt3-6.7b-slice on an H200. A script runs unchanged and with each of
its patches. The same command finishes an interrupted study, and another one adds rows to it.
"""

from pathlib import Path

from common.text import OneLineParser, Skip, aligned, one_line, run_command, say
from ladder import running
from ladder.patches import variants
from ladder.rows import Planned


def rows_of(keys: list[str], arguments: list[str]) -> list[Planned]:
    """Each script of these variants once as it is, and once with each patch."""
    planned = {}
    for key in keys:
        script = Path(f"{variants()[key]['Script']}.py")
        for name, patch in ((script.stem, None), (key, key)):
            planned[name] = Planned(str(script), arguments, f"{name}/{script.stem}.json", patch=patch)
    return list(planned.values())


def choose(words: list[str] | None) -> list[str]:
    """The variants whose name or script contains one of the words, or all. A whole name means this variant
    alone. Raises Skip for a word of none."""
    names = {key: f"{key} {head['Script']}" for key, head in variants().items()}
    if words is None:
        return sorted(names)
    keys = set()
    for word in words:
        whole = {word} & variants().keys()
        named = whole or {key for key, name in names.items() if word in name}
        if not named or not word:
            raise Skip(f"no variant is named like {one_line(word)!r}")
        keys |= named
    return sorted(keys)


def main() -> int:
    parser = OneLineParser(prog="python -m ladder.ablations", description=__doc__)
    text = "variants whose name or script contains one of these"
    parser.add_argument("--only", nargs="+", metavar="NAME", help=text)
    running.add_options(parser)
    try:
        known = variants()
        parser.description = f"{__doc__ or ''}\nVariants: {', '.join(known)}"
        options, arguments = parser.parse_known_args()
        keys, predicted = choose(options.only), "predicted for the slice on an H200"
        say(aligned([{"variant": key, predicted: known[key]["Predicted"]} for key in keys], n_left=2) + "\n")
        return running.run_study("ablations", rows_of(keys, arguments), arguments, options)
    except Skip as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_command(main, "python -m ladder.ablations")
