"""What a rehearsal undoes of a model that is not ours, and whether a replay of its step is the step.

A step of the ladder changes weights and Adam's moments alone. One of another model may also change buffers,
rates, and states of an optimizer that do not begin at zero.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch

from common import proof
from common.benchmark import InitialState, on_host, own_part
from common.record import IN_TRAINING, ROUNDED
from common.text import Skip, one_line
from mine.batch import copied
from mine.file import ModelArguments, set_seeds
from mine.optimizers import Optimizers, each_of
from mine.program import Program

# Optimizers of PyTorch whose states are zeros before their first step.
BEGIN_AT_ZERO = ("Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Muon", "RMSprop", "SGD")
# By which losses of a replay may differ from those of launched steps: FP8 has other scales each time.
REPLAY_OFF, REPLAY_OFF_IN_FP8 = 0.002, 0.02
RANDOM = 1e-4  # distance of two passes from which, and from ten times rounding, random numbers are at work
OWN_GENERATOR = 0.01  # distance of two passes of one seed from which no kernel's order is the cause
PASSES = 8  # whose spread shows how far random numbers alone turn the gradients


class ModelState(InitialState):
    """Also the buffers of the model, and the numbers and states of any optimizer, as they are now."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        seed: int = 0,
        in_fp32: bool = False,
    ):
        super().__init__(model, optimizer)
        self.seed = seed  # of the first pass of `sample`
        self.in_fp32 = in_fp32  # whether `sample` leaves out what the file does beyond eager FP32
        self.buffers = {name: on_host(buffer) for name, buffer in model.named_buffers()}
        self.numbers = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        # Of one whose states begin at zero they are not needed, and would be the row's memory.
        others = [each for each in each_of(optimizer) if not begins_at_zero(each)]
        self.states = [(each, copied_states(each.state)) for each in others]

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back. Of an optimizer whose states begin at zero addresses stay, so that a captured
        graph trains on from here; another one makes its states anew."""
        super().restore()
        for name, buffer in self.model.named_buffers():  # by name: a model may have replaced it
            initial = self.buffers.get(name)  # None if its first forward made it, as a cached mask
            if initial is not None and initial.shape == own_part(buffer).shape:
                own_part(buffer).copy_(initial)
        for group, numbers in zip(self.optimizer.param_groups, self.numbers, strict=True):
            for name, value in numbers.items():
                if isinstance(value, torch.Tensor):  # in place, where a graph may read it
                    group[name].copy_(value)
                else:
                    group[name] = value
        for each, states in self.states:
            each.state.clear()
            each.state.update(copied_states(states))

    def sample(self, train_step: Callable, batch: tuple) -> dict:
        """As `sample_passes`, in eager FP32 where this row is the reference of others, and does more."""
        with eager_fp32() if self.in_fp32 else contextlib.nullcontext():
            return self.sample_passes(train_step, batch)

    def sample_passes(self, train_step: Callable, batch: tuple) -> dict:
        """Of several passes, each with random numbers of its own, the same in every row that draws as the
        first one does: PASSES where two of them differ. Dropout is off, where the model can be evaluated."""
        modes = [(part, part.training) for part in self.model.modules()]
        try:
            self.model.eval()
            passes = [self.sample_pass(train_step, batch, 0)]
        except Exception as error:
            for part, mode in modes:
                part.training = mode
            passes = [self.sample_pass(train_step, batch, 0)]
            self.notes.append(f"{IN_TRAINING}, because evaluation fails ({one_line(error, 100)})")
        again, other = (self.sample_pass(train_step, batch, k) for k in (0, 1))
        passes.append(other)
        noise = proof.distance(passes[0], again)  # of kernels that add in any order
        if proof.distance(*passes) > RANDOM + 10 * noise:
            if torch._dynamo.utils.counters["stats"]["unique_graphs"]:  # a compiler draws other numbers
                torch._dynamo.reset()
                torch._inductor.config.fallback_random = True
                passes = [self.sample_pass(train_step, batch, k) for k in range(2)]
            passes += [self.sample_pass(train_step, batch, k) for k in range(2, PASSES)]
        if noise > OWN_GENERATOR:
            self.notes.append(
                "passes of one seed differ: draw by torch or numpy.random, not a generator of your own"
            )
        if sparse := [name for name, part in self.model.named_modules() if getattr(part, "sparse", False)]:
            self.notes.append(f"not in the proof: {', '.join(sparse[:3])}, whose gradients are sparse")
        samples = passes[0] | proof.renamed(self.sample_rounded(train_step, batch), ROUNDED)
        for k, each in enumerate(passes[1:], start=1):
            samples |= proof.renamed(each, k)
        return samples

    def sample_pass(self, train_step: Callable, batch: tuple, k: int) -> dict:
        set_seeds(self.seed + k)
        return super().sample(train_step, batch)

    def sample_rounded(self, train_step: Callable, batch: tuple) -> dict:
        """Of the first pass with weights in BF16: how far rounding alone turns gradients. Far, where a router
        chooses between experts that are nearly equal."""
        set_seeds(self.seed)
        self.restore()
        with torch.no_grad():
            for weight in filter(torch.is_floating_point, self.model.parameters()):
                own_part(weight).copy_(own_part(weight).bfloat16())
        return proof.sample(train_step, self.optimizer, self.model, batch)


@contextlib.contextmanager
def eager_fp32() -> Iterator[None]:
    """Nothing compiled runs, autocast does nothing, and matmuls are FP32, whatever a file does itself."""
    enter, precision = torch.autocast.__enter__, torch.get_float32_matmul_precision()

    def enter_disabled(autocast):
        autocast._enabled = False
        return enter(autocast)

    torch.autocast.__enter__ = enter_disabled
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.autocast.__enter__ = enter
        torch.set_float32_matmul_precision(precision)


def copied_states(states: dict) -> dict:
    """An optimizer's states by weight, copied; the weights are not."""
    return {weight: copy.deepcopy(of_weight) for weight, of_weight in states.items()}


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


def capture(
    program: Program,
    train_step: Callable,
    optimizer: torch.optim.Optimizer | Optimizers,
    in_fp8: bool,
    args: ModelArguments,
    batch: object,
) -> Callable:
    """The replay of a step. Raises Skip where it cannot be captured and, unless --cold, where replays have
    other losses than launched steps."""
    batches = [(copied(drawn, args.device),) for drawn in args.drawn[: args.warmup]]
    here = None if args.cold else ModelState(program.model, optimizer)
    launched = losses_of(train_step, here, batches, args.seed) if here else []
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(args.device)  # those steps are not the graph's
    try:
        replay = program.capture(batch)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # ending a broken capture raises an error of its own, which hides the cause
        cause = error.__context__ or error
        raise Skip(f"the step cannot be captured, --no-capture launches it: {cause}") from error
    if here:
        replayed = losses_of(replay, here, batches, args.seed)
        check_replay(launched, replayed, REPLAY_OFF_IN_FP8 if in_fp8 else REPLAY_OFF)
    return replay


def losses_of(step: Callable, initial: ModelState, batches: list[tuple], seed: int) -> list[float]:
    """Losses of steps from a state, with the same random numbers each time."""
    initial.restore()
    torch.manual_seed(seed)
    return [step(*batch).item() for batch in batches]


def check_replay(launched: list[float], replayed: list[float], off: float) -> None:
    """Raises Skip where replays have other losses than launched steps: a graph repeats what was captured, so
    a count in Python stands still, and a buffer that is replaced is lost."""
    for k, (ours, theirs) in enumerate(zip(launched, replayed, strict=True)):
        if not abs(theirs - ours) <= off * abs(ours):
            losses = f"its loss {k + 1} is {theirs:.4g}, and launched {ours:.4g}"
            why = "Does the model count in Python, or replace a buffer?"
            raise Skip(f"a replay is not the step: {losses}. {why} --no-capture does without")
