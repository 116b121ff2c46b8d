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
    said = [*hardware.about(args.device), *told_of_time(args)]
    say_facts(args.device, args.workload(), pinned, needed_bytes(args), said)


def say_facts(
    device: torch.device, work: Workload, pinned: list[str], needed_bytes: dict[str, int], said: list[str]
) -> None:
    """Write the facts of a run for the process of the ladder: what a model prints cannot get in between.

    `pinned` are arguments that every row gets beside the user's, `needed_bytes` the memory of rows by script,
    and `said` what a user should know before the first row.
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


def told_of_time(args: Arguments) -> list[str]:
    """How long a row of FP32 takes on a CPU at least, where it is long."""
    if args.device.type == "cuda":
        return []
    step_s = flops.flops_per_step(args.config, args.batch_size) / product_flops_per_s()
    if step_s <= LONG_S:
        return []
    step_minutes, row_minutes = step_s / 60, step_s * (args.warmup + args.steps) / 60
    return [
        f"In FP32 a training step of this shape takes at least {step_minutes:.0f} minutes here, "
        f"and a row {row_minutes:,.0f}",
        "A row ends after 30 minutes (--step-timeout). A smaller shape shows the same",
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
