"""What the file of --model is, before its first row: whether its model, batches and loss can be trained, how
much work a step is, and what a step of the unchanged file does already.

python -m mine.check FILE --output FACTS.json ARGUMENT ...
"""

import contextlib
import inspect
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from common import hardware, options, profile
from common.record import Settings, Workload
from common.text import Skip, explain, one_line, run_command, say
from ladder import facts
from ladder.rows import AMP, AS_IT_IS, COMPILE, FROM, MODEL_ROWS, SDPA
from mine.attention import calling_line, needs_mask, switch_of
from mine.batch import copied, sha256_of, tensors_of, units_of
from mine.blocks import check_compilable, count_blocks, count_weights, list_blocks, say_blocks
from mine.changes import loss_lines
from mine.draws import watch_draws
from mine.file import SEEN, ModelArguments, called, in_a_process_of_its_own, parse, weights_sha256
from mine.program import Program, compiled_loss_lines


def check(args: ModelArguments) -> Workload:
    """What one step trains. Raises Skip where two models, or two series of batches, of the same seed differ:
    rows are processes of their own, and would not do the same work. Raises Skip too without an optimizer, and
    without a weight to train."""
    args.weights_sha256, model = weights_sha256(args.model()), args.model()
    if weights_sha256(model) != args.weights_sha256:
        raise Skip(
            f"model() of {args.path.name} makes other weights or buffers each time: seed its generator"
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise Skip(f"model() of {args.path.name} has no weight to train: let one have requires_grad=True")
    work = settle_steps(args, model)
    size = f"{work.parameters / 1e6:,.1f} M parameters, {work.tokens_per_step:,} {work.unit} a step"
    see_start(args, model)
    args.remarks = [f"{work.model}: {size}", *args.remarks]
    if COMPILE not in args.rows_in_file:
        try:
            check_compilable(model, args.blocks)
            if args.is_called or loss_lines(model, args):
                args.remarks.append(f"Row {COMPILE} {say_compiled(args, model)}")
        except Skip:  # its row says why
            pass
    if (count := len(args.drawn)) <= work.steps:
        args.remarks.append(f"batches() ends after {count}: in {work.steps} training steps they come again")
    args.draw_again()
    if work.text_sha256 != args.work_sha256():
        raise Skip(f"batches() of {args.path.name} yields other numbers each time: seed its generator")
    return work


def say_compiled(args: ModelArguments, model: torch.nn.Module) -> str:
    """What row 3_compile does, in a clause."""
    if not args.is_called:
        return "compiles the loss and what it calls of the model: it makes no call model(x)"
    loss = " and the loss"
    if not loss_lines(model, args):
        how = "compute it in loss(model, batch) of the file, from what the model gives"
        loss = f", but not the loss, which forward() computes: {how}"
        if hasattr(args.file, "loss") and args.computes_loss:
            loss = ", but not the loss, which torch.compiler.disable keeps out"
    return say_blocks(model, args.blocks, loss)


def first_loss(args: ModelArguments, model: torch.nn.Module) -> torch.Tensor:
    """The loss of the first batch. Raises Skip if the forward pass changes the batch, calls backward(), or
    returns no finite scalar loss."""
    batch, name = copied(args.drawn[0], args.device), args.path.name
    numbers = sha256_of(batch)
    loss = called(lambda: args.loss(model, batch), args.path)
    if sha256_of(batch) != numbers:
        how = "let it begin with batch = dict(batch)" if isinstance(batch, dict) else "let it change a clone"
        raise Skip(f"a step of {name} changes its batch, which comes again: {how}")
    if any(weight.grad is not None for weight in model.parameters()):
        raise Skip(f"loss() of {name} calls backward(): let it return the loss alone")
    if not isinstance(loss, torch.Tensor):
        raise Skip(f"the loss of {name} is no tensor: let loss() return one number as a tensor")
    if not loss.is_floating_point():
        raise Skip(f"the loss of {name} is of {loss.dtype}, which has no gradient: let loss() return a float")
    if loss.dim():
        raise Skip(
            f"the loss of {name} is no scalar: its shape is {tuple(loss.shape)}: let loss() return its mean"
        )
    if not torch.isfinite(loss):
        raise Skip(
            f"the first loss of {name} is {loss.item()}: look at the first weights and the first batch"
        )
    return loss


def settle_steps(args: ModelArguments, model: torch.nn.Module) -> Workload:
    """What one step trains; sets how many steps there are, where the user did not."""
    unit, units = units_of(args.drawn[0])
    flops = step_flops(args, model)
    args.steps = args.steps or options.default_steps(flops, args.device)
    args.draw_again()  # as many batches as there are steps
    return Workload(
        preset="custom",
        model=args.path.name,
        parameters=sum(weight.numel() for weight in model.parameters()),
        unit=unit,
        tokens_per_step=units,
        flops_per_step=flops,
        text=f"batches() of {args.path.name}",
        text_sha256=args.work_sha256(),
        seed=args.seed,
        lr=args.lr,
        warmup=args.warmup,
        steps=args.steps,
    )


# --- FLOPs ----------------------------------------------------------------------------------------


def of_grouped_heads(formula: Callable, first: int) -> Callable:
    """Extend PyTorch's formula of attention to grouped keys and values: each of their heads counts once for
    every head of queries that shares it. `first` is the position of the queries."""

    def count(*args, **_) -> int:
        shapes = [getattr(each, "shape", each) for each in args]
        for k in (first + 1, first + 2):
            shapes[k] = torch.Size([shapes[k][0], shapes[first][1], *shapes[k][2:]])
        return formula(*shapes)

    return count


ATTENTION = {
    packet: of_grouped_heads(formula, 1 if "backward" in str(packet) else 0)
    for packet, formula in flop_registry.items()
    if "_scaled_dot_product" in str(packet)
}
FORMULAS = flop_registry | ATTENTION
AVERAGES = ("Mean", "Sum", "Add", "Mul", "Div", "Neg")  # operators in backward


def step_flops(args: ModelArguments, model: torch.nn.Module) -> int:
    """FLOPs of a forward and a backward pass, as torch.utils.flop_counter counts them, which also shows
    masks, imports and blocks; 0 where they are not counted."""
    with watch_masks(model) as seen:
        try:
            loss = first_loss(args, model)
            if not loss.requires_grad:
                raise Skip(f"the loss of {args.path.name} has no gradient: was it detached, or grad off?")
            called(loss.backward, args.path)  # its errors are the model's
            if all(weight.grad is None for weight in model.parameters()):
                raise Skip(f"the loss of {args.path.name} gives no weight of model() a gradient")
            fits = True
        except (MemoryError, torch.OutOfMemoryError):
            fits = False
    args.is_masked = bool(seen)
    args.beside = modules_beside(args.path, set(sys.modules) - args.known_modules)
    model.zero_grad()
    flops, of_blocks, forward = count_flops(args, model, fits)
    model.zero_grad()
    args.blocks = list_blocks(model, of_blocks, forward)
    if fits:
        look_into_loss(args, model)
    if not flops and not args.remarks:
        args.remarks.append("FLOPs are not counted: PyTorch's counter cannot follow this model")
    return flops


def look_into_loss(args: ModelArguments, model: torch.nn.Module) -> None:
    """See whether the loss calls the model itself, what computes it, and the first line that draws what a
    compiler would draw once."""
    with (
        contextlib.suppress(Exception),  # of a loss that fails when it is called again, or of TorchScript
        watch_draws(model, args.blocks) as lines,
        torch.compiler.set_stance("force_eager"),
        watch_loss_function(model) as loss_calls,
        watch_calls(model) as calls,
    ):
        loss = args.loss(model, copied(args.drawn[0], args.device))
        args.is_called, args.drawn_at = bool(calls), next(iter(lines), "")
        args.computes_loss = not calls or is_computed_outside(loss, calls)
        args.calls_loss_function = bool(loss_calls)


class Call(NamedTuple):
    """A call of a model: the numbers that autograd counts its operators by, before and behind it, and the
    operators that gave its tensors."""

    begin: int
    end: int
    ends: set[Node]


@contextlib.contextmanager
def watch_loss_function(model: torch.nn.Module) -> Iterator[list]:
    """The calls of a Hugging Face model's loss_function inside the context: other models compute their loss
    without it, and one that wraps a model only hands it on."""
    calls: list = []
    function = model.loss_function if compiled_loss_lines(model) else None

    def counted(*args, **kwargs):
        calls.append(function)
        return function(*args, **kwargs)

    with contextlib.ExitStack() as undo:
        if isinstance(function, torch.nn.Module):
            undo.callback(function.register_forward_pre_hook(lambda *_: calls.append(function)).remove)
        elif function:
            model.loss_function = counted
            undo.callback(setattr, model, "loss_function", function)
        yield calls


@contextlib.contextmanager
def watch_calls(model: torch.nn.Module) -> Iterator[list[Call]]:
    """The calls of the model inside the context."""
    calls: list[Call] = []
    begins: list[int] = []

    @torch.inference_mode(False)
    @torch.enable_grad()
    def count() -> int:
        return (torch.zeros(1, requires_grad=True) + 1).grad_fn._sequence_nr()

    def keep(*given) -> None:
        ends = {tensor.grad_fn for tensor in tensors_of(given[-1])} - {None}
        calls.append(Call(begins.pop(), count(), ends))

    with contextlib.ExitStack() as undo:
        undo.callback(model.register_forward_pre_hook(lambda *_: begins.append(count())).remove)
        undo.callback(model.register_forward_hook(keep).remove)
        yield calls


def is_computed_outside(loss: torch.Tensor, calls: list[Call]) -> bool:
    """Whether a loss is computed from what the model gives, as its gradients flow: not where a call of the
    model computes it, and it only adds to a scalar, or averages one number of each example."""
    ends = set().union(*(call.ends for call in calls))  # none where the model gives an object of its own

    def is_inside(node: Node) -> bool:
        return any(call.begin < node._sequence_nr() < call.end for call in calls)

    queue, between, dimensions = [loss.grad_fn], set(), {0}
    while queue:
        node = queue.pop()
        if node in ends or (node and not ends and is_inside(node)):
            dimensions |= {len(tensor.shape) for tensor in node._input_metadata}
        elif node and node not in between and not is_inside(node):
            between.add(node)
            queue += [before for before, _ in node.next_functions]
    averages = all(node.name().startswith(AVERAGES) for node in between)
    return max(dimensions) > (1 if averages else 0)


def count_flops(
    args: ModelArguments, model: torch.nn.Module, backward: bool
) -> tuple[int, dict[str, int], int]:
    """FLOPs of a step; those of the blocks in the model's forward pass, by their lists; and of that pass. All
    are 0 where the counter fails, and for a model with a recurrent layer. Without `backward`, which may
    not fit the memory, a step counts as three forward passes. Attention counts the full (T, T) square. On a
    CPU it counts as two products, because the counter does not know the fused kernel."""
    if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
        return 0, {}, 0
    on_cpu = args.device.type == "cpu"
    math = sdpa_kernel(SDPBackend.MATH) if on_cpu else contextlib.nullcontext()
    try:
        with (
            FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter,
            math,
            torch.set_grad_enabled(backward),
        ):
            with count_blocks(model, counter.get_total_flops) as of_blocks:
                loss = first_loss(args, model)
            forward = counter.get_total_flops()
            if backward:
                loss.backward()
    except (MemoryError, torch.OutOfMemoryError):
        return count_flops(args, model, backward=False) if backward else (0, {}, 0)
    except Exception as error:  # the counter's, or of a loss that fails when it is called again
        args.remarks.append(f"FLOPs are not counted: under PyTorch's counter, {one_line(error, 100)}")
        return 0, {}, 0
    own = of_blocks.pop("")  # without what the loss does beside it, such as a teacher
    return counter.get_total_flops() * (1 if backward else 3), of_blocks, own or forward


class Operators(TorchDispatchMode):
    """FLOPs of products, by PyTorch's counter, by the dtype that they multiply; and where the largest softmax
    is."""

    def __init__(self):
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()
        self.softmax_at, self.largest = "", 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._overloadpacket is torch.ops.aten._softmax and args[0].numel() > self.largest:
            self.softmax_at, self.largest = calling_line(), args[0].numel()
        count = FORMULAS.get(function._overloadpacket)
        if count and (tensors := [each for each in args if isinstance(each, torch.Tensor)]):
            self.flops[tensors[-1].dtype] += count(*args, **(kwargs or {}), out_val=result)
        return result

    def half(self) -> str:
        """The half format of at least half of these FLOPs; empty if there is none."""
        for dtype in (torch.bfloat16, torch.float16):
            if self.flops[dtype] >= 0.5 * sum(self.flops.values()) > 0:
                return str(dtype).removeprefix("torch.")
        return ""


# --- what a step does already ---------------------------------------------------------------------


def see_start(args: ModelArguments, model: torch.nn.Module) -> None:
    """`rows_in_file`, the changes that the unchanged file makes itself in most of its work, and the name of
    the first row. Raises Skip where --from claims more or less than a training step shows."""
    ran, half = observe_step(args, model)
    if ran is None:
        args.remarks.append("A training step could not be observed, so what the file does was not seen")
        args.first, args.rows_in_file = AS_IT_IS, FROM[args.start or "fp32"]
        return
    ran_in_part = {row: ran.has_run(MODEL_ROWS[row]) for row in (AMP, SDPA, COMPILE)}
    in_most = {AMP: half, COMPILE: compiles_most(model, getattr(args.file, "loss", None))}
    seen = [row for row in ran_in_part if ran_in_part[row] and in_most.get(row, True)]
    check_start(args.start, seen, args.path.name)
    # Hugging Face's switch can do more than its default: without a mask, a graph has a faster kernel.
    switch = switch_of(model) if args.start is None and SDPA in seen else None
    if switch is not None and not needs_mask(switch, args.is_masked):
        seen.remove(SDPA)
    args.rows_in_file = [row for row in seen if args.start != "fp32"]
    parts = [MODEL_ROWS[row] for row in in_most if ran_in_part[row] and row not in seen]
    if args.rows_in_file or parts or ran.float32_matmul_precision != "highest":
        args.first = AS_IT_IS
        has = [f"matmuls in {half}" if row == AMP else MODEL_ROWS[row] for row in args.rows_in_file]
        has += [f"{part} in a part" for part in parts]
        line = f"Row {AS_IT_IS} is the unchanged file, with {' and '.join(has) or 'TF32'}"
        args.remarks.append(f"{line}: no row {', '.join(args.rows_in_file)}" if args.rows_in_file else line)


def observe_step(args: ModelArguments, model: torch.nn.Module) -> tuple[Settings | None, str]:
    """Run a training step of the unchanged file, which may compile, and observe the next one: what ran, and
    the half format of most of its products, empty if none. None where it does not fit the memory, or the
    profiler fails. Raises Skip for an error of the file, and for a step that casts its own weights."""
    program = Program(model, args)
    program.make_optimizer(captured=False)
    train_step = program.train_step()
    batch = copied(args.drawn[0], args.device)

    def step() -> torch.Tensor:
        return called(lambda: train_step(batch), args.path)

    torch._dynamo.reset()  # under the counter of FLOPs it compiled nothing
    try:
        with torch.compiler.set_stance("force_eager"), Operators() as operators:
            step()
        args.softmax_at = operators.softmax_at
        torch._dynamo.reset()
        step()
        ran, _ = profile.observe(step, model, args.device)
    except (Skip, KeyboardInterrupt):
        raise
    except Exception:
        return None, ""
    for name, weight in model.named_parameters():
        if weight.dtype != torch.float32:
            dtype = str(weight.dtype).removeprefix("torch.")
            what_to_do = "cast what it computes, not the weight"
            raise Skip(f"a step of {args.path.name} casts {name} to {dtype}: {what_to_do}")
    return ran, operators.half()


def compiles_most(model: torch.nn.Module, loss: Callable | None) -> bool:
    """Whether modules with at least half of the weights are compiled, or the loss is, which calls them."""
    if loss and profile.is_compiled(loss):
        return True
    weights: dict[int, int] = {}
    for module in model.modules():
        is_wrapped = isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        if is_wrapped or module._compiled_call_impl or profile.is_compiled(module.forward):
            weights |= {id(weight): weight.numel() for weight in module.parameters()}
    return sum(weights.values()) >= 0.5 * count_weights(model)


def check_start(start: str | None, seen: list[str], name: str) -> None:
    """Raises Skip where --from says that a file does what its step did not show, or less."""
    missing = [MODEL_ROWS[row] for row in FROM[start or "fp32"] if row not in seen]
    if missing:
        raise Skip(f"--from {start}: a step of {name} showed no {' and no '.join(missing)}. Leave --from out")
    more = [row for row in seen if row in (AMP, COMPILE) and row not in FROM.get(start, seen)]
    if more:
        words = " and ".join(MODEL_ROWS[row] for row in more)
        raise Skip(f"--from {start}: a step of {name} showed {words}, too. Leave --from out")


def modules_beside(path: Path, names: set[str]) -> list[str]:
    """The files of those modules that lie in the folder of the file, or below it, and are neither the
    project's nor Python's."""
    files = {Path(getattr(sys.modules[name], "__file__", None) or "/") for name in names} - {path}
    known = {path.parent for path in hardware.ROOT.glob("*/__init__.py")}
    known |= {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted(str(file) for file in files if path.parent in file.parents and not known & {*file.parents})


@contextlib.contextmanager
def watch_masks(model: torch.nn.Module) -> Iterator[list[str]]:
    """The names of masks, and of positions, which tell documents apart, that Hugging Face's modules get
    inside the context."""
    seen: list[str] = []

    def look(module, positional, keywords):
        words = dict(keywords)
        with contextlib.suppress(TypeError):
            words |= inspect.signature(module.forward).bind_partial(*positional, **keywords).arguments
        seen.extend(name for name in ("attention_mask", "position_ids") if words.get(name) is not None)

    switched = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in switched]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def main(words: list[str]) -> int:
    args = parse("run_all.sh", words)
    try:
        work = check(args)
    except Exception as error:  # whatever a model does, it is one line
        say(f"run_all.sh: error: {explain(error)[1]}", sys.stderr)
        return 2
    seen = {name: getattr(args, name) for name in SEEN}
    facts.write_facts(args, work, {"--steps": str(work.steps)}, args.remarks, {"seen": seen})
    return 0


if __name__ == "__main__":
    # It ends also where a thread of the file goes on.
    run_command(lambda: main(in_a_process_of_its_own()), "run_all.sh")
