"""One row of `./run_all.sh --model FILE`: the file's model, with one change more than the rows before.

python mine/row.py ROW FILE --output FOLDER/ROW.json ARGUMENT ...     FOLDER has the plan of the run

A row reads the records of the rows before it in its folder, and keeps the changes that did not clearly make
a step slower; on a CPU, all of them.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import benchmark, hardware
from common.record import AS_IT_IS, LARGER, PATCHED, PLAN, WORTH, Workload, middle_half, read_object
from common.text import Skip, one_line, run_command
from ladder.rows import AMP, FP8, FP32, GRAPH, SDPA
from ladder.rows import MODEL_ROWS as ROWS
from mine import changes, patch
from mine import file as model_file
from mine.attention import has_switch
from mine.file import ModelArguments
from mine.optimizers import each_of
from mine.program import Program
from mine.replace import import_anew, plain_attention, replace_attention
from mine.state import ModelState, capture, check_states

USABLE = 0.92  # of a GPU's memory, by a step
MOST_BATCHES = 32  # in one

# --- which changes a row has ----------------------------------------------------------------------


def rows_before(folder: Path, name: str) -> dict[str, dict]:
    """The ok rows before one of this name, by their names, from their records in a run folder."""
    rows = {}
    for earlier in list(ROWS)[: list(ROWS).index(name)]:
        for row in read_object(folder / f"{earlier}.json").get("rows", []):
            if row.get("status") == "ok":
                rows[earlier] = row
    return rows


def rows_to_keep(before: dict[str, dict], device_type: str) -> list[str]:
    """The rows whose changes are kept: none clearly slower than what it was added to. A slower one whose
    kernels take less time waits for its host, and is kept until a later row shows what it is worth: a CUDA
    graph launches all kernels at once. The times of a CPU decide nothing."""
    names, waiting, base = [], [], None
    for name, row in before.items():
        slower = base and middle_half(row["step_ms"])[0] > middle_half(base["step_ms"])[1]
        if device_type == "cpu" or not slower:
            names, waiting, base = [*names, *waiting, name], [], row
        elif has_shorter_kernels(row, base):
            waiting.append(name)
    return [name for name in [*names, *waiting] if ROWS[name]]


def has_shorter_kernels(row: dict, other: dict) -> bool:
    """Whether the kernels of a step clearly take less time than those of another; False without profiles of a
    GPU."""
    profiles = [each.get("profile") or {} for each in (row, other)]
    if any(profile.get("idle_ms") is None for profile in profiles):
        return False
    own, others = (sum(profile["categories"].values()) for profile in profiles)
    return WORTH * own < others


# --- building -------------------------------------------------------------------------------------


def refuse(names: list[str], args: ModelArguments) -> None:
    """Raises Skip for the change of a row that this machine cannot make."""
    change = names[-1] if names else ""
    if change == AMP and not args.amp:
        raise Skip(f"{hardware.device_name(args.device)} does not multiply BF16: AMP would gain nothing")
    if change == GRAPH and args.device.type != "cuda":
        raise Skip("CUDA graphs need a GPU")
    if change == GRAPH and not args.capture:
        raise Skip("turned off by --no-capture")


def check_unchanged(args: ModelArguments) -> None:
    """Raises RuntimeError where the file, or the numbers of its batches, are not those of the plan."""
    if args.work_sha256() != args.planned.text_sha256:
        changed = f"{args.path.name}, or what it imports or reads, has changed since the run began"
        raise RuntimeError(f"{changed}, or its batches differ in each process: seed its generator")


def build(names: list[str], before: dict[str, dict], args: ModelArguments) -> tuple:
    """What the `main` of a step returns, with these changes; the last is the row's own."""
    refuse(names, args)
    if args.first == FP32:
        torch.set_float32_matmul_precision("highest")
    replace_attention(names, before, args)
    model = args.model()
    check_unchanged(args)
    if args.weights_sha256 and model_file.weights_sha256(model) != args.weights_sha256:
        drawn = f"model() of {args.path.name} makes other weights in each process"
        raise RuntimeError(f"{drawn}: seed its generator by a number, and draw them in model()")
    program = Program(model, args)
    changes.make(program, names, before)
    optimizer = program.make_optimizer(captured=GRAPH in names)
    args.code = args.code or program.text()
    if GRAPH in names and not args.cold:
        for each in each_of(optimizer):
            check_states(each)
    model_file.set_seeds(args.seed)  # whatever a row drew until here: its losses may draw, too
    train_step = skip_unsupported(program.train_step(), names)
    if GRAPH not in names:
        return train_step, model, optimizer
    return train_step, model, optimizer, partial(capture, program, train_step, optimizer, FP8 in names, args)


def skip_unsupported(train_step: Callable, names: list[str]) -> Callable:
    """A step is skipped whose compiler gives up, because past its limit it would run the blocks as they are,
    and one with a product that FP8 cannot have. PyTorch and Transformer Engine then say "divisible by"."""

    def step(batch):
        try:
            return train_step(batch)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            why = "something in them, such as a counter, is another number in each step"
            raise Skip(
                f"the blocks or the loss are compiled anew again and again: {why} (TORCH_LOGS=recompiles)"
            ) from error
        except (RuntimeError, AssertionError) as error:
            if FP8 not in names or "divisible by" not in str(error):
                raise
            needs = f"FP8 needs sizes that divide by 16, batch x length too ({one_line(error, 150)})"
            raise Skip(f"{needs}: change them, or leave such layers out in fp8(model)") from error

    return step


# --- the patched file and the larger batch --------------------------------------------------------


def build_patched(names: list[str], before: dict[str, dict], args: ModelArguments) -> tuple:
    """`build` of the patched file, with the changes that are left."""
    return build(patch_file(names, args), before, args)


def patch_file(names: list[str], args: ModelArguments) -> list[str]:
    """Put those changes of these rows into the file that can be placed there, and the patch into `args.code`.
    Returns the rows whose changes are left to make. Raises Skip where none can be placed. Attention by hand
    is looked at in training again, as in its row."""
    text, model = patch.read(args.path), args.model()
    is_own = not has_switch(model, args.path.name, args.softmax_at)
    attention = plain_attention(args) if SDPA in names and is_own else None
    begun = attention.text if attention else text
    patched, placed = patch.edit(begun, names, model, args.blocks, args)
    placed += [SDPA] if attention else []
    if not placed:
        raise Skip(f"none of the changes can be placed in {args.path.name}")
    args.code = patch.difference(args.path.name, text, patched)
    import_anew(args, patched)
    return [name for name in names if name not in placed]


def build_larger(names: list[str], before: dict[str, dict], args: ModelArguments, row: dict) -> tuple:
    """`build` with as many batches in one as should fit by the `row` that has these changes. Raises Skip
    where it freed no memory."""
    check_unchanged(args)
    first = next(iter(before.values()))
    count = batches_that_fit(row["peak_bytes"], hardware.free_memory_bytes(args.device), args)
    is_freed = args.device.type == "cpu" or row["peak_bytes"] < first["peak_bytes"]
    if count < 2 or not is_freed:
        raise Skip("the changes free no memory for a second batch")
    # Before batches are joined: it runs attention by hand, too, whose scores may not fit a larger one.
    replace_attention(names, before, args)
    args.join_batches(count)
    return build(names, before, args)


def batches_that_fit(peak: int, memory: int, args: ModelArguments) -> int:
    """How many batches at once a step has memory for that needs `peak` bytes for one, by what no batch
    changes: weights, and the two moments of the default AdamW. Gradients count as the batch's, which errs on
    the safe side."""
    weights = list(args.model().parameters())
    fixed = sum(4 * weight.numel() for weight in weights)
    if not hasattr(args.file, "optimizer"):
        fixed += sum(8 * weight.numel() for weight in weights if weight.requires_grad)
    return min(MOST_BATCHES, int((USABLE * memory - fixed) / max(1, peak - fixed)))


# --- the process ----------------------------------------------------------------------------------


def planned_arguments(argv: list[str]) -> tuple[ModelArguments, Path]:
    """The arguments of a row with what the check has seen, and the folder of the run."""
    args = model_file.parse("run_all.sh", argv)
    folder = args.output.parent
    folder = folder.parent if folder.name.startswith("pass-") else folder  # of --repeat: as the first pass
    plan = read_object(folder / PLAN)
    args.planned = Workload(**plan["workload"])
    for name in model_file.SEEN:
        setattr(args, name, plan["seen"][name])
    return args, folder


def initial_state(args: ModelArguments, model, optimizer, in_fp32: bool = False) -> ModelState:
    """What a row puts back. It notes where the row trains other lines than the file's."""
    state = ModelState(model, optimizer, seed=args.seed, in_fp32=in_fp32)
    if edit := args.attention:
        state.notes.append(f"attention of {edit.place}, lines {edit.lines}, is one call of PyTorch's here")
    return state


def main(words: list[str]) -> int:
    """Run a row: its name, of PATCHED and LARGER the name of the recommended row too, and the arguments."""
    if len(words) < 2:
        raise SystemExit("mine/row.py: error: give a ROW and a FILE; ./run_all.sh --model FILE runs all rows")
    name, *argv = words
    recommended = argv.pop(0) if name in (PATCHED, LARGER) else name
    args, folder = planned_arguments(argv)
    before = rows_before(folder, recommended)
    args.name, args.source = name, (hardware.ROOT / "mine" / "program.py").read_text()
    if name == recommended:
        names = rows_to_keep(before, args.device.type) + ([name] if ROWS[name] else [])
        args.changes, build_row = [ROWS[each] for each in [*args.rows_in_file, *names]], build
    else:
        row = read_object(folder / f"{recommended}.json")["rows"][0]
        args.changes = row["changes"]
        names = [each for each in ROWS if ROWS[each] in args.changes and each not in args.rows_in_file]
        build_row = build_patched if name == PATCHED else partial(build_larger, row=row)
    initial = partial(initial_state, args, in_fp32=name == AS_IT_IS)
    return benchmark.run_and_record(partial(build_row, names, before), args, initial)


if __name__ == "__main__":
    run_command(lambda: main(model_file.in_a_process_of_its_own()), "run_all.sh")
