"""What a step's arguments mean on this machine, as JSON: it imports torch, and the process of the ladder does
not. That process names the file of the answer in the environment.

LADDER_FACTS=FILE python -m ladder.facts ARGUMENT ...
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch

from common import flops, hardware
from common.arguments import Arguments, parse_args
from common.record import Workload, write_json
from common.text import run_command, say
from ladder.predict import peak_bytes
from ladder.process import ROOT
from ladder.runs import FACTS, scripts
from ladder.step_kernels import STEPS

LONG_S = 60  # a step


def main() -> None:
    args = parse_args(ROOT / "run_all.sh", None)
    # The free memory, and with it auto's choice, may change from row to row.
    pinned = ["--preset", args.preset, "--batch-size", str(args.batch_size)]
    row_s = least_row_s(args)
    said = [*hardware.about(args.device), *told_of_time(args, row_s)]
    say_facts(args.device, args.workload(), pinned, needed_bytes(args), said, row_s)


def say_facts(
    device: torch.device,
    work: Workload,
    pinned: list[str],
    needed_bytes: dict[str, int],
    said: list[str],
    row_s: float = 0.0,
    seen: dict | None = None,
) -> None:
    """Write the facts of a run for the process of the ladder: what a model prints cannot get in between.

    `pinned` are arguments that every row gets beside the user's, `needed_bytes` the memory of rows by script,
    `said` what a user should know before the first row, `row_s` the seconds that a row of FP32 takes at
    least, where they are known, and `seen` what a pass of a model that is not ours showed.
    """
    facts = {
        "pinned": pinned,
        "device_type": device.type,
        "device": hardware.device_name(device),
        "gpus": torch.cuda.device_count() if device.type == "cuda" else 0,
        "workload": asdict(work),
        "free_bytes": hardware.free_memory_bytes(device),
        "needed_bytes": needed_bytes,
        "said": said,
        "row_s": row_s,
        "seen": seen or {},
    }
    if file := os.environ.get(FACTS):
        write_json(Path(file), facts)
    else:  # somebody looks
        say(json.dumps(facts, indent=1))


def needed_bytes(args: Arguments) -> dict[str, int]:
    """The peak memory of all processes of a row, by script, of those steps that the predictor knows."""
    needed = {}
    for script in scripts():
        step = script.removesuffix(".py")
        if step in STEPS:
            needed[script] = peak_bytes(step, args.config, args.batch_size) * args.processes
    return needed


def least_row_s(args: Arguments) -> float:
    """Seconds that a row of FP32 takes on a CPU at least; 0 on a GPU."""
    if args.device.type == "cuda":
        return 0.0
    step_flops = flops.flops_per_step(args.config, args.batch_size)
    return (args.warmup + args.steps) * step_flops / product_flops_per_s()


def told_of_time(args: Arguments, row_s: float) -> list[str]:
    """How long a row takes at least, where its training steps are long."""
    step_s = row_s / (args.warmup + args.steps)
    if step_s <= LONG_S:
        return []
    return [
        f"In FP32 a training step of this shape takes at least {step_s / 60:.1f} minutes here, and a row "
        f"{row_s / 60:,.0f} minutes"
    ]


def product_flops_per_s(size: int = 1024) -> float:
    """Of this CPU in one product of FP32, `size` by `size`, on all cores: no training step keeps it up."""
    matrix = torch.randn(size, size)
    seconds = []
    for _ in range(4):  # the first also starts the threads
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


if __name__ == "__main__":
    run_command(main, "run_all.sh")
