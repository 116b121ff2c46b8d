"""What does each choice inside a step give? One script with a small patch, everything else as it is.

    python -m anatomy.ablations [--only NAME ...] [--output FOLDER] [ARGUMENT ...]

The ARGUMENTs are those of a step: --preset gpt2 --steps 30. Each file of anatomy/variants/ is a patch of a
script, with what arithmetic predicts for gpt3-6.7b-slice on an H200. A script runs unchanged and with each of
its patches. The same command finishes an interrupted study, and another one adds rows to it.
"""

import sys
from pathlib import Path

from common.text import (
    OneLineParser,
    Skip,
    aligned,
    one_line,
    portable_command,
    positive_int,
    run_command,
    say,
)
from ladder.patches import variants
from ladder.running import run_study
from ladder.runs import Planned


def rows_of(keys: list[str], known: dict[str, dict[str, str]], arguments: list[str]) -> list[Planned]:
    """Each script of these variants once as it is, and once with each patch. A place is named like its
    variant."""
    rows = {}
    for key in keys:
        script = Path(f"{known[key]['Script']}.py")
        rows[script.stem] = Planned(str(script), arguments, f"{script.stem}/{script.stem}.json")
        rows[key] = Planned(str(script), arguments, f"{key}/{script.stem}.json", patch=key)
    return list(rows.values())


def main() -> int:
    known = variants()
    parser = OneLineParser(
        prog="python -m anatomy.ablations", description=f"{__doc__}\nVariants: {', '.join(known)}"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="variants whose name or script contains one of these"
    )
    text = "of the study, new or continued (default: a new one under results/)"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=text)
    parser.add_argument(
        "--step-timeout", type=positive_int, metavar="S", help="seconds for a row (default: 1800)"
    )
    options, arguments = parser.parse_known_args()
    names = {key: f"{key} {variant['Script']}" for key, variant in known.items()}
    if strangers := [word for word in options.only or [] if not any(word in name for name in names.values())]:
        parser.error(f"no variant is named like {one_line(strangers[0])}")
    chosen = [key for key in known if any(word in names[key] for word in options.only or [""])]
    say(
        aligned(
            [
                {"variant": key, "predicted for the slice on an H200": known[key]["Predicted"]}
                for key in chosen
            ],
            n_left=2,
        )
        + "\n"
    )
    command = portable_command("python -m anatomy.ablations --output ablations", sys.argv[1:])
    try:
        return run_study(
            "ablations",
            rows_of(chosen, known, arguments),
            arguments,
            options.output,
            command,
            options.step_timeout,
        )
    except Skip as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_command(main, "python -m anatomy.ablations")
