"""What does each change of the guide give, in a training loop as people have it?

    python -m anatomy.loop [--output FOLDER]

The loop is examples/loop/loop.py: GPT-2 of 124 M parameters on a GPU, 16 sequences of 1,024 tokens a step,
and a toy on a CPU. It runs as it is, and then with one patch of its folder after the other, each on top of
those before. Every state is a process of its own and trains on the same batches. FOLDER gets a record and
its report.

Prediction, for an H200. In FP32 and with attention by hand nearly all of a step's 380 ms are matmuls and
scores. AMP and fused attention should bring it to about 45 ms, which is what unmodified nanoGPT takes.
Compilation should save a fifth of that, and FP8 little at 768 channels. The graph should save the time in
which the GPU waits for the host.
"""

import datetime
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from common.record import MERGED, Row, Run, Workload, read_object, write_json
from common.text import OneLineParser, Skip, portable_command, run_command, say
from ladder import process, running, runs
from ladder.patches import apply

LOOP = process.ROOT / "examples" / "loop"
FIRST = "0-as-it-is"
ANSWER = "row.json"
TELLS = f"""
import json

peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
content = {{"step_ms": times, "loss": losses, "peak_bytes": peak, "tokens": B * T * micro_steps}}
content["shape"], content["rate"] = [L, H, C, T, V], top_rate
Path("{ANSWER}").write_text(json.dumps(content))
"""


def patches() -> list[Path]:
    """The changes, in the order in which they are made."""
    return sorted(LOOP.glob("*.patch"))


def make_states(folder: Path) -> dict[str, Path]:
    """The loop as it is and after each patch, by name, each in a folder of its own. Raises Skip where a patch
    does not fit."""
    states = {FIRST: folder / FIRST / "loop.py"}
    states[FIRST].parent.mkdir(parents=True)
    shutil.copy(LOOP / "loop.py", states[FIRST])
    for patch in patches():
        before, after = [*states.values()][-1].parent, folder / patch.stem
        shutil.copytree(before, after)
        apply(patch, after, "loop.py")
        states[patch.stem] = after / "loop.py"
    return states


def run_state(row: Row, script: Path, log: Path, limit_s: int, stop: process.Stop) -> dict:
    """Run a state into its row, and return what its process answered; a state that broke stays a row."""
    from common import benchmark  # here, since it imports torch: docs/tables.py reads the patches without

    row.status, row.source = "ok", script.read_text()
    script.write_text(row.source + TELLS)
    words = ["-c", f"import os; os.chdir({str(script.parent)!r}); exec(open('loop.py').read())"]
    ended = process.run([sys.executable, *words], log, limit_s, stop, row.step, {})
    answer = read_object(script.with_name(ANSWER))
    if ended or not answer:
        row.status, row.reason = ended or ("failed", "it left no times")
        if row.status == "failed":
            error = RuntimeError(process.last_line(log, "Error: ") or row.reason)
            row.status, row.reason = benchmark.explain(error)
        if row.reason.startswith("No module named"):
            row.status, row.reason = "skipped", f"not installed: {row.reason}"
        return {}
    row.step_ms, row.loss, row.peak_bytes = (answer[key] for key in ("step_ms", "loss", "peak_bytes"))
    return answer


def workload_of(answer: dict, steps: int) -> Workload:
    """What a state of the loop trained, by what the first one answered."""
    from common import flops  # here, since these import torch
    from common.model import GPTConfig

    n_layer, n_head, n_embd, seq_len, vocab_size = answer["shape"]
    config, batch_size = GPTConfig(n_layer, n_head, n_embd, seq_len, vocab_size), answer["tokens"] // seq_len
    attention = flops.attention_flops(n_layer * batch_size * n_head, seq_len, n_embd // n_head)
    return Workload(
        preset="custom",
        model="loop.py",
        parameters=flops.parameters(config),
        tokens_per_step=answer["tokens"],
        flops_per_step=flops.flops_per_step(config, batch_size) + attention,  # of the whole (T, T) square
        text="the standard library",
        text_sha256=hashlib.sha256((LOOP / "loop.py").read_bytes()).hexdigest()[:16],
        seed=1,
        lr=answer["rate"],
        warmup=0,
        steps=steps,
    )


def refuse_other_work(row: Row, answer: dict, first: dict) -> None:
    """Make a state that trained other work than the first one a failed row."""
    differing = [name for name in ("tokens", "shape", "rate") if answer[name] != first[name]]
    if len(answer["loss"]) != len(first["loss"]):
        differing.append("number of training steps")
    if differing:
        row.status, row.step_ms = "failed", []
        row.reason = f"its patch changes the work: {', '.join(differing)}"


def empty_folder(output: Path | None) -> Path:
    """Where the record goes. Raises Skip for what is no folder, and for one that holds something."""
    folder = output.resolve() if output else running.new_folder("loop")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Skip(f"--output {output} is no empty folder")
    return folder


def run_states(folder: Path, limit_s: int, stop: process.Stop) -> Run:
    """Every state, one after the other. Raises Skip where a patch does not fit, and ValueError for a GPU that
    PyTorch cannot use."""
    from common import hardware

    environment = hardware.describe(hardware.resolve_device("auto"))
    states = make_states(folder / "states")
    stop.listen()
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    command = portable_command("python -m anatomy.loop", sys.argv[1:])
    run, changes, first = Run(command, started_at, environment, None, []), [], {}
    for name, script in states.items():
        if stop.requests:
            break
        if name != FIRST:
            changes.append(name.partition("-")[2])
        run.rows.append(row := Row(name, changes=[*changes]))
        log = folder / f"{name}.log"
        if answer := run_state(row, script, log, limit_s, stop):
            first = first or answer
            run.workload = run.workload or workload_of(answer, len(row.loss))
            refuse_other_work(row, answer, first)
        if row.status == "ok":
            log.unlink()
        say(f"{name}: {row.reason or 'done'}")
    shutil.rmtree(folder / "states", ignore_errors=True)
    return run


def main() -> int:
    parser = OneLineParser(prog="python -m anatomy.loop", description=__doc__)
    running.add_options(
        parser, output="of the record: an empty or a new one (default: a new one under results/)"
    )
    options = parser.parse_args()
    try:
        folder = empty_folder(options.output)
        stop = process.Stop()
        run = run_states(folder, options.step_timeout or runs.LIMIT_S, stop)
        write_json(folder / MERGED, run)
    except (Skip, OSError, ValueError) as error:
        parser.error(str(error))
    reported = subprocess.run(process.module_command("report", str(folder)), cwd=process.ROOT).returncode
    return 130 if stop.requests else reported


if __name__ == "__main__":
    run_command(main, "python -m anatomy.loop")
