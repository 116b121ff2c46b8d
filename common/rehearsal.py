"""The rehearsal of a row: training steps that are undone, so that every row trains from the same weights.

A few steps are launched, which compiles and autotunes. Then the step is captured as a CUDA graph, if the
script can be captured. On a GPU more steps follow, in which FP8 learns its scales. These begin at 1, where
small gradients round to zero, and Adam's moments would remember that. Then the weights are put back in place,
and the optimizer begins anew. What else a step changes is kept: FP8's scales, and the state of random
numbers. The ladder's own model changes no buffer; those of another model are put back too.
"""

import copy
import time
from collections.abc import Callable, Iterator

import torch

from common import parallel
from common.arguments import Measurement
from common.record import Row
from common.text import Skip, progress
from common.timing import Steps

REHEARSED = 10  # steps in all on a GPU: after three of them FP8's scales were seen to be still too small
# Optimizers of PyTorch whose states are zeros before their first step.
BEGIN_AT_ZERO = ("Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Muon", "RMSprop", "SGD")
LONG_STEP_S = 0.5  # beyond it only the launched steps are rehearsed, since more would take many seconds


class InitialState:
    """The weights of an optimizer's parameters, its own state and numbers, and with `model` the buffers of
    that model, as they are now. Weights and buffers are copied to the host's memory."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None):
        self.optimizer, self.model = optimizer, model
        groups = optimizer.param_groups
        self.weights = [(weight, on_host(weight)) for group in groups for weight in group["params"]]
        self.buffers = {name: on_host(buffer) for name, buffer in self._buffers()}
        self.numbers = [copy.deepcopy(numbers_of(group)) for group in groups]
        self.states = copied_states(optimizer.state)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.model.named_buffers() if self.model is not None else iter(())

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back. Of an optimizer whose states begin at zero addresses stay, so that a captured
        graph trains on from here; another one makes its states anew."""
        for weight, initial in self.weights:
            own_part(weight).copy_(initial)
        for name, buffer in self._buffers():  # by name: a model may have replaced it
            initial = self.buffers.get(name)  # None of one that its first forward made, as a cached mask
            if initial is not None and initial.shape == own_part(buffer).shape:
                own_part(buffer).copy_(initial)
        for group, numbers in zip(self.optimizer.param_groups, self.numbers, strict=True):
            restore_numbers(group, numbers)
        if begins_at_zero(self.optimizer):
            set_to_zero(self.optimizer.state)
        else:
            self.optimizer.state.clear()
            self.optimizer.state.update(copied_states(self.states))


def restore_numbers(group: dict, numbers: dict) -> None:
    """Put rates and counts back; a tensor, which a graph may read, in place."""
    for name, value in numbers.items():
        if isinstance(value, torch.Tensor):
            group[name].copy_(value)
        else:
            group[name] = value


def set_to_zero(states: dict) -> None:
    """Set all tensors of an optimizer's states to zero, in place."""
    for of_weight in states.values():
        for state in of_weight.values():
            if isinstance(state, torch.Tensor):
                own_part(state).zero_()


def begins_at_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all tensors of an optimizer's states begin at zero, as those of Adam do. The momentum of SGD
    begins with the first gradient, which dampening would lower had it begun at zero."""
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ in BEGIN_AT_ZERO
    return is_known and not any(group.get("dampening") for group in optimizer.param_groups)


def check_states(optimizer: torch.optim.Optimizer) -> None:
    """Raises Skip for an optimizer whose steps no rehearsal can undo while a graph reads its states."""
    if not begins_at_zero(optimizer):
        name = type(optimizer).__name__
        raise Skip(
            f"the states of {name} may not begin at zero, so a rehearsal cannot be undone: give --cold"
        )


def numbers_of(group: dict) -> dict:
    """What an optimizer's group holds beside its weights: rates, counts."""
    return {name: value for name, value in group.items() if name != "params"}


def copied_states(states: dict) -> dict:
    """An optimizer's states by weight, copied; the weights are not."""
    return {weight: copy.deepcopy(of_weight) for weight, of_weight in states.items()}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return own_part(tensor).detach().to("cpu", copy=True)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor: of FSDP2's DTensor its shard, of any other all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rehearse(
    train_step: Callable,
    optimizer: torch.optim.Optimizer,
    capture: Callable | None,
    batches: list[tuple],
    args: Measurement,
    row: Row,
    model: torch.nn.Module | None = None,
) -> tuple[Steps, InitialState | None]:
    """Launch, capture and rehearse, as the module's docstring tells. Returns the steps that train from here,
    and the weights that they begin with. `model` is one whose buffers change in a step.

    `row` gets the number of rehearsed steps, the seconds, the peak of memory at the capture, and a note where
    a script that can be captured is launched on a GPU. With --cold the launched steps are training steps,
    nothing is undone. Where there are several processes or --cold, None stands for the weights. Raises
    RuntimeError, one line, where the capture fails; of a model that is not the ladder's Skip, also where a
    replay does other work than a launched step.
    """
    began = time.perf_counter()
    initial = None if args.cold else InitialState(optimizer, model)
    steps = Steps(train_step, batches)
    launched_s = launch_steps(steps, args)
    if capture and args.device.type == "cuda":
        row.note = why_launched(args)
        row.settings.captured = row.note is None
    launched = None
    if row.settings.captured:
        if initial:
            check_states(optimizer)
        if initial and args.replay_off:  # before the graph takes as much memory as a step
            launched = losses_of(train_step, initial, batches, args)
        steps.train_step = captured(capture, batches[0], args, row)
    if initial:
        if args.device.type == "cuda" and launched_s <= LONG_STEP_S:
            for _ in steps.run(REHEARSED - args.warmup, "rehearsal"):
                pass
        row.rehearsed = len(steps.losses)
        if launched:
            check_replay(launched, losses_of(steps.train_step, initial, batches, args), args.replay_off)
        progress("putting the weights back")
        initial.restore()
        steps = Steps(steps.train_step, batches)
    row.warmup_s = time.perf_counter() - began
    return steps, initial if args.processes == 1 else None


def launch_steps(steps: Steps, args: Measurement) -> float:
    """Launch `args.warmup` steps; returns the seconds of the last one, in the slowest process."""
    began = time.perf_counter()
    for _ in steps.run(args.warmup, "first steps, in which a compiler works"):
        torch.get_device_module(args.device).synchronize()
        last_s, began = time.perf_counter() - began, time.perf_counter()
    return parallel.across([last_s], "max", args)[0]


def why_launched(args: Measurement) -> str | None:
    """Why a step that can be captured is launched all the same; None where it is captured."""
    if not args.capture:
        return "launched, not captured: --no-capture"
    if args.parallel == "fsdp":
        return (
            "launched, not captured: FSDP2 allocates pinned memory of the host, which no CUDA graph can hold"
        )
    return None


def captured(capture: Callable, batch: tuple, args: Measurement, row: Row) -> Callable:
    """The replay of one step on a batch like this one.

    Capturing trains nothing. Its peak of memory is the row's, since a replay allocates nothing.
    """
    progress("capturing a step as a CUDA graph")
    torch.cuda.synchronize(args.device)
    torch.cuda.reset_peak_memory_stats(args.device)
    try:
        replay = capture(*batch)
    except RuntimeError as error:  # ending a broken capture raises an error of its own, which hides the cause
        cause = error.__context__ or error
        of_memory = isinstance(error, torch.OutOfMemoryError)
        kind = RuntimeError if args.is_ours or of_memory else Skip
        raise kind(f"the step cannot be captured, --no-capture launches it: {cause}") from error
    row.peak_bytes = torch.cuda.max_memory_allocated(args.device)
    return replay


def check_replay(launched: list[float], replayed: list[float], off: float) -> None:
    """Raises Skip where replays from the initial weights have other losses than launched steps: a graph
    repeats what was captured, so a count in Python stands still, and a buffer that is replaced is lost."""
    for k, (ours, theirs) in enumerate(zip(launched, replayed, strict=True)):
        if not abs(theirs - ours) <= off * abs(ours):
            losses = f"its loss {k + 1} is {theirs:.4g}, and launched {ours:.4g}"
            why = "Does the model count in Python, or replace a buffer?"
            raise Skip(f"a replay is not the step: {losses}. {why} --no-capture does without")


def losses_of(step: Callable, initial: InitialState, batches: list[tuple], args: Measurement) -> list[float]:
    """Losses of the first steps from the initial weights, with the same random numbers each time."""
    initial.restore()
    torch.manual_seed(args.seed)
    return [step(*batch).item() for batch in batches[: args.warmup]]
