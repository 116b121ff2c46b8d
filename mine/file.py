"""A model of yours: what a file must hold for `./run_all.sh --model FILE`, and what its model is.

model()                         a torch.nn.Module with FP32 weights
batches()                       yields what the model takes: a tensor, tuple, list, dataclass or mapping
loss(model, batch)              optional; otherwise the loss is the model's output, or its `.loss`
optimizer(parameters, **how)    optional, one or a list; `how` is for AdamW: fused, and of a graph capturable
fp8(model)                      optional: turns layers to FP8 in place, may return the context of a step

python -m mine.file FILE ARGUMENT ...     checks it, and prints the facts of a run as JSON
"""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import random
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from common import hardware, options, profile
from common.record import Settings, Workload
from common.text import OneLineParser, Skip, explain, one_line, portable_command, run_command, say
from ladder import facts
from ladder.rows import AMP, AS_IT_IS, COMPILE, FP32, FROM, MODEL_ROWS, SDPA
from mine import changes
from mine.attention import switch_of
from mine.batch import (
    call_text,
    check_parts,
    copied,
    described,
    loss_for,
    output_of,
    sha256_of,
    shapes_of,
    units_of,
)
from mine.blocks import count_weights, list_blocks, say_blocks
from mine.optimizers import Optimizers

NEEDED = ("model", "batches")
LR = 1e-4  # of the AdamW that a file without an optimizer gets
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(kw_only=True)
class ModelArguments(options.Measurement):
    """How one row trains the model of a file."""

    start: str | None = options.option(
        options.RUN,
        "of --model: what the file does already (default: what one of its steps shows)",
        flag="--from",
        choices=[*FROM],
    )
    path: Path
    file: ModuleType | None = None  # imported
    known_modules: set[str] = field(default_factory=set)  # names of those that were imported before it
    # What one pass showed before the first row: modules in its folder that it imports, whenever it does, and
    # whether attention got a mask of its own.
    beside: list[Path] = field(default_factory=list)
    is_masked: bool = True
    blocks: list[str] = field(default_factory=list)  # names of the lists of blocks, see mine/blocks.py
    loss_text: str = "model({batch})"  # an expression of the loss
    first: str = FP32  # the name of the first row, the file unchanged
    given: list[str] = field(default_factory=list)  # the rows whose changes the file makes itself
    said: list[str] = field(default_factory=list)  # what a user should know before the first row
    planned: Workload | None = None  # as the plan of the run has it

    def resolve(self) -> None:
        """As the base class does, and import the file. Raises ValueError or Skip, one line."""
        self.path, self.known_modules = self.path.absolute(), set(sys.modules)
        set_seeds(self.seed)  # a file may draw numbers when it is imported
        self.file = load(self.path)
        if self.lr is not None and hasattr(self.file, "optimizer"):
            name = self.path.name
            raise ValueError(f"--lr {self.lr}: {name} has an optimizer of its own, with its rate")
        super().resolve()
        self.command = portable_command("./run_all.sh --model", [str(self.path)])
        options.check_output(self.output)
        if not hasattr(self.file, "optimizer"):
            self.lr = self.lr or LR

    @property
    def module_name(self) -> str:
        """By which a program of the user's imports the file."""
        stem = self.path.stem
        return stem if stem.isidentifier() and stem not in sys.stdlib_module_names else "my_file"

    def about(self) -> list[str]:
        return [*hardware.about(self.device), f"model of {self.path.name}"]

    def batches(self) -> list[tuple]:
        """Each batch as the only argument of a training step; the last one is untimed. Fewer than there are
        steps come again."""
        batches = [(copied(batch, self.device),) for batch in self.drawn]
        return batches if len(batches) > 1 else 2 * batches

    @functools.cached_property
    def drawn(self) -> list:
        """The batches that the file yields, one more than there are steps. Raises Skip without any, and for
        tensors of several shapes."""
        set_seeds(self.seed)
        count = (self.steps or options.MOST_STEPS) + 1
        batches = called(lambda: self.copies(count), self.path)
        if not batches:
            raise Skip(f"batches() of {self.path.name} yields nothing")
        check_parts(batches[0])
        if len(set(map(shapes_of, batches))) > 1:
            what_to_do = "pad them to one, or drop a last batch that is smaller"
            raise Skip(f"batches() of {self.path.name} yields tensors of several shapes: {what_to_do}")
        return batches

    def copies(self, count: int) -> list:
        """The first batches. Each is copied before the next one is drawn, which may fill the same tensors."""
        host = torch.device("cpu")  # where they take no memory of a row
        return [copied(batch, host) for batch in itertools.islice(self.file.batches(), count)]

    def model(self) -> torch.nn.Module:
        """The model as its file makes it, on the device. Raises Skip for weights that are not FP32."""
        set_seeds(self.seed)
        if isinstance(self.file.model, torch.nn.Module):
            raise Skip(f"model of {self.path.name} is a module: let it be a function that returns one")
        with self.device:  # where most models are built fast
            model = called(self.file.model, self.path)
        if not isinstance(model, torch.nn.Module):
            raise Skip(f"model() of {self.path.name} returns no torch.nn.Module")
        for name, weight in model.named_parameters():
            if isinstance(weight, UninitializedParameter):
                raise Skip(f"{name} has no size yet: let model() call the model once on a batch")
            if weight.is_complex():
                halves = "keep two FP32 weights, and join them by torch.complex in forward"
                raise Skip(f"{name} is complex, which neither BF16 nor FP8 multiplies: {halves}")
            if weight.dtype != torch.float32:
                dtype = str(weight.dtype).removeprefix("torch.")
                raise Skip(f"{name} is {dtype}: model() must give FP32 weights; AMP casts them where it pays")
        return model.to(self.device).train()

    def loss(self, model: torch.nn.Module, batch) -> torch.Tensor:
        """The scalar loss of a batch: by the file's `loss`, or the model's output."""
        if hasattr(self.file, "loss"):
            return self.file.loss(model, batch)
        try:
            output = output_of(model, batch)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            how = f"a batch is the model's arguments, unless {self.path.name} defines loss(model, batch)"
            raise Skip(f"{one_line(error)}: {how}") from error
        loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if loss is None or loss.dim():
            raise Skip(
                f"the model returns {described(output)}: write in {self.path.name} {loss_for(output, batch)}"
            )
        return loss

    def optimizer(self, model: torch.nn.Module, captured: bool) -> torch.optim.Optimizer:
        """The file's optimizer, or AdamW; fused in every row. Raises Skip for what is none."""
        how = {"fused": True} | ({"capturable": True} if captured else {})
        weights = list(model.parameters())  # and no generator, which groups of a file would share
        if not hasattr(self.file, "optimizer"):
            return torch.optim.AdamW(weights, lr=self.lr, **ADAMW, **how)
        made = called(lambda: self.file.optimizer(weights, **how), self.path)
        optimizers = [*made] if isinstance(made, (list, tuple)) else [made]
        if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            raise Skip(
                f"optimizer() of {self.path.name} returns no torch.optim.Optimizer, and no list of these"
            )
        trained = {
            id(weight) for each in optimizers for group in each.param_groups for weight in group["params"]
        }
        if trained - set(map(id, weights)):
            raise Skip(
                f"optimizer() of {self.path.name} has weights that are not model()'s: give it `parameters`"
            )
        if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
            raise Skip(f"optimizer() of {self.path.name} returns LBFGS, which makes several passes in a step")
        return optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers)

    def workload(self) -> Workload:
        return self.planned

    def first_loss(self, model: torch.nn.Module) -> torch.Tensor:
        """The loss of the first batch. Raises Skip for a pass that changes it, and for one that has no finite
        scalar loss, or has done the backward pass already."""
        batch, name = copied(self.drawn[0], self.device), self.path.name
        numbers = sha256_of(batch)
        loss = called(lambda: self.loss(model, batch), self.path)
        if sha256_of(batch) != numbers:
            raise Skip(f"a step of {name} changes its batch in place: let it change a clone")
        if any(weight.grad is not None for weight in model.parameters()):
            raise Skip(f"loss() of {name} calls backward(): let it return the loss alone")
        if not isinstance(loss, torch.Tensor):
            raise Skip(f"the loss of {name} is no tensor")
        if not loss.is_floating_point():
            raise Skip(f"the loss of {name} is of {loss.dtype}, which has no gradient")
        if loss.dim():
            raise Skip(f"the loss of {name} is no scalar: its shape is {tuple(loss.shape)}")
        if not torch.isfinite(loss):
            raise Skip(f"the first loss of {name} is {loss.item()}")
        return loss

    def step_flops(self, model: torch.nn.Module) -> int:
        """FLOPs of a forward and a backward pass, as torch.utils.flop_counter counts them, which also shows
        masks, imports and blocks; 0 where they are not counted."""
        with masks_seen(model) as seen:
            try:
                loss = self.first_loss(model)
                if not loss.requires_grad:
                    raise Skip(f"the loss of {self.path.name} has no gradient: was it detached, or grad off?")
                called(loss.backward, self.path)  # its errors are the model's
                if all(weight.grad is None for weight in model.parameters()):
                    raise Skip(f"the loss of {self.path.name} gives no weight of model() a gradient")
                fits = True
            except (MemoryError, torch.OutOfMemoryError):
                fits = False
        self.is_masked = bool(seen)
        self.beside = modules_beside(self.path, set(sys.modules) - self.known_modules)
        model.zero_grad()
        counts = self.count_flops(model, fits)
        model.zero_grad()
        self.blocks = list_blocks(model, counts)
        if not counts and not self.said:
            self.said.append("FLOPs are not counted: PyTorch's counter cannot follow this model")
        return counts.get("Global", 0)

    def count_flops(self, model: torch.nn.Module, backward: bool) -> dict[str, int]:
        """By the names of modules, and of all as Global; empty of what the counter cannot follow: where it
        fails, and a recurrent layer. Without `backward`, which may not fit the memory, three times those of
        the forward pass. Attention is the whole (T, T) square; on a CPU, whose kernel the counter does not
        know, two products."""
        if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
            return {}
        on_cpu = self.device.type == "cpu"
        math = sdpa_kernel(SDPBackend.MATH) if on_cpu else contextlib.nullcontext()
        try:
            with FlopCounterMode(display=False) as counter, math, torch.set_grad_enabled(backward):
                loss = self.first_loss(model)
                if backward:
                    loss.backward()
        except (MemoryError, torch.OutOfMemoryError):
            return self.count_flops(model, backward=False) if backward else {}
        except Exception as error:  # the counter's, or of a loss that fails when it is called again
            self.said.append(f"FLOPs are not counted: under PyTorch's counter, {one_line(error, 100)}")
            return {}
        times = 1 if backward else 3
        return {name: times * sum(each.values()) for name, each in counter.get_flop_counts().items()}

    def settle_steps(self, model: torch.nn.Module) -> Workload:
        """What one step trains; sets how many steps there are, where the user did not."""
        unit, units = units_of(self.drawn[0])
        step_flops = self.step_flops(model)
        self.steps = self.steps or options.default_steps(step_flops, self.device)
        self.draw_again()  # as many batches as there are steps
        return Workload(
            preset="custom",
            model=self.path.name,
            parameters=sum(weight.numel() for weight in model.parameters()),
            unit=unit,
            tokens_per_step=units,
            flops_per_step=step_flops,
            text=f"batches() of {self.path.name}",
            text_sha256=self.work_sha256(),
            seed=self.seed,
            lr=self.lr,
            warmup=self.warmup,
            steps=self.steps,
        )

    def see_loss(self, model: torch.nn.Module) -> None:
        """Sets the expression of the loss of `batch`, as a reader writes it."""
        if hasattr(self.file, "loss"):
            self.loss_text = f"{self.module_name}.loss(model, {{batch}})"
            return
        with torch.no_grad():
            output = output_of(model, copied(self.drawn[0], self.device))
        of_output = "" if isinstance(output, torch.Tensor) else ".loss"
        self.loss_text = f"{call_text(self.drawn[0])}{of_output}".replace("batch", "{batch}")

    def see_start(self, model: torch.nn.Module) -> None:
        """`given`, the changes that the unchanged file makes itself in most of its work, and the name of the
        first row. Raises Skip where --from claims more or less than a training step shows."""
        ran, half = self.observe_step(model)
        if ran is None:
            self.said.append("A training step could not be observed, so what the file does was not seen")
            self.first, self.given = AS_IT_IS, FROM[self.start or "fp32"]
            return
        ran_in_part = {row: ran.has_run(MODEL_ROWS[row]) for row in (AMP, SDPA, COMPILE)}
        in_most = {AMP: half, COMPILE: compiles_most(model, getattr(self.file, "loss", None))}
        seen = [row for row in ran_in_part if ran_in_part[row] and in_most.get(row, True)]
        check_start(self.start, seen, self.path.name)
        # Hugging Face's switch can do more than its default: without a mask, a graph has a faster kernel.
        if self.start is None and SDPA in seen and switch_of(model):
            seen.remove(SDPA)
        self.given = [row for row in seen if self.start != "fp32"]
        parts = [MODEL_ROWS[row] for row in in_most if ran_in_part[row] and row not in seen]
        if self.given or parts or ran.float32_matmul_precision != "highest":
            self.first = AS_IT_IS
            has = [f"matmuls in {half}" if row == AMP else MODEL_ROWS[row] for row in self.given]
            has += [f"{part} in a part" for part in parts]
            line = f"Row {AS_IT_IS}: the file unchanged, which has {', '.join(has) or 'TF32'}"
            self.said.append(f"{line}: no row {', '.join(self.given)}" if self.given else line)

    def observe_step(self, model: torch.nn.Module) -> tuple[Settings | None, str]:
        """What ran in a training step of the unchanged file after one that may compile, and the half format
        of most of its products, empty of none. None where it does not fit the memory, or the profiler fails.
        Raises Skip for an error of the file, and for a step that casts its own weights."""
        optimizer = self.optimizer(model, captured=False)
        train_step = changes.training_step(model, self.loss, optimizer, contextlib.nullcontext)
        batch = copied(self.drawn[0], self.device)

        def step() -> torch.Tensor:
            return called(lambda: train_step(batch), self.path)

        torch._dynamo.reset()  # under the counter of FLOPs it compiled nothing
        try:
            with torch.compiler.set_stance("force_eager"), ProductDtypes() as products:
                step()
            torch._dynamo.reset()
            step()
            ran, _ = profile.observe(step, model, self.device)
        except (Skip, KeyboardInterrupt):
            raise
        except Exception:
            return None, ""
        for name, weight in model.named_parameters():
            if weight.dtype != torch.float32:
                dtype = str(weight.dtype).removeprefix("torch.")
                what_to_do = "cast what it computes, not the weight"
                raise Skip(f"a step of {self.path.name} casts {name} to {dtype}: {what_to_do}")
        return ran, products.half()

    def draw_again(self) -> None:
        vars(self).pop("drawn", None)

    def work_sha256(self) -> str:
        """16 hex digits over the file, the modules beside it that it imports, and all numbers of all
        batches."""
        content = b"\0".join(path.read_bytes() for path in [self.path, *self.beside])
        return hashlib.sha256(content + sha256_of(self.drawn).encode()).hexdigest()[:16]


class ProductDtypes(TorchDispatchMode):
    """FLOPs of products, by PyTorch's counter, by the dtype that they multiply."""

    def __init__(self):
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        count = flop_registry.get(function._overloadpacket)
        if count and (tensors := [each for each in args if isinstance(each, torch.Tensor)]):
            self.flops[tensors[-1].dtype] += count(*args, **(kwargs or {}), out_val=result)
        return result

    def half(self) -> str:
        """The half format of at least half of these FLOPs; empty of none."""
        for dtype in (torch.bfloat16, torch.float16):
            if self.flops[dtype] >= 0.5 * sum(self.flops.values()) > 0:
                return str(dtype).removeprefix("torch.")
        return ""


def compiles_most(model: torch.nn.Module, loss: Callable | None) -> bool:
    """Whether modules with at least half of the weights are compiled, or the loss is, which calls them."""
    if hasattr(loss, "_torchdynamo_orig_callable"):
        return True
    weights: dict[int, int] = {}
    for module in model.modules():
        is_wrapped = isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        if is_wrapped or module._compiled_call_impl or hasattr(module.forward, "_torchdynamo_orig_callable"):
            weights |= {id(weight): weight.numel() for weight in module.parameters()}
    return sum(weights.values()) >= 0.5 * count_weights(model)


def check_start(start: str | None, seen: list[str], name: str) -> None:
    """Raises Skip where --from says that a file does what its step did not show, or less."""
    missing = [MODEL_ROWS[row] for row in FROM[start or "fp32"] if row not in seen]
    if missing:
        raise Skip(f"--from {start}: a step of {name} showed no {' and no '.join(missing)}")
    more = [row for row in seen if row in (AMP, COMPILE) and row not in FROM.get(start, seen)]
    if more:
        words = " and ".join(MODEL_ROWS[row] for row in more)
        raise Skip(f"--from {start}: a step of {name} showed {words}, too. Leave --from out")


def parse(name: str, argv: list[str]) -> ModelArguments:
    """The arguments of a row. Anything wrong prints one line and exits with code 2."""
    parser = OneLineParser(prog=name)
    parser.add_argument("path", type=Path, metavar="FILE")
    options.add_options(parser, ModelArguments)
    given = parser.parse_args(argv)
    args = ModelArguments(name=given.path.stem, **vars(given))
    try:
        args.resolve()
    except (ValueError, Skip) as error:
        parser.error(str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        parser.error(f"{args.path.name}: {explain(error)[1]}")
    return args


def in_a_process_of_its_own() -> list[str]:
    """Make this process the file's: its imports find its own modules, also those that are called as rooms of
    this project (ours are imported already), and `sys.argv` holds its name alone. Returns what it held."""
    words, rooms = sys.argv[1:], {path.parent.name for path in hardware.ROOT.glob("*/__init__.py")}
    for name in [*sys.modules]:
        if name.partition(".")[0] in rooms:
            del sys.modules[name]
    own = {hardware.ROOT, hardware.ROOT / "mine"}
    sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() not in own]
    return words


def load(path: Path) -> ModuleType:
    """The file as a module. Raises Skip, one line, where it cannot be imported or lacks a function."""
    if path.suffix != ".py" or not path.is_file():
        raise Skip(f"--model {path}: there is no such Python file")
    sys.argv[:] = [str(path)]
    sys.path.insert(0, str(path.parent))  # of what the file imports beside it
    name = f"{path.stem}_file" if path.stem in sys.modules else path.stem  # torch.py hides no torch
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: dataclasses look there
    called(lambda: spec.loader.exec_module(module), path)
    missing = [f"{name}()" for name in NEEDED if not callable(getattr(module, name, None))]
    if missing:
        raise Skip(f"{path.name} lacks {' and '.join(missing)}: see examples/gpt2.py")
    return module


def modules_beside(path: Path, names: set[str]) -> list[Path]:
    """The files of those modules that lie in the folder of the file, or below it, and are neither the
    project's nor Python's."""
    files = {Path(getattr(sys.modules[name], "__file__", None) or "/") for name in names} - {path}
    known = {path.parent for path in hardware.ROOT.glob("*/__init__.py")}
    known |= {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted(file for file in files if path.parent in file.parents and not known & {*file.parents})


@contextlib.contextmanager
def masks_seen(model: torch.nn.Module) -> Iterator[list[str]]:
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


def called(function: Callable, path: Path):
    """What a function of the file returns. Raises Skip, one line with the file's line, where it fails."""
    try:
        return function()
    except (Skip, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, and what a file derives itself
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {frames[-1].lineno}" if frames else ""
        advice = ""
        if isinstance(error, SystemExit):
            advice = ": let what reads options or exits stand under `if __name__ == '__main__':`"
        if isinstance(error, FileNotFoundError):
            advice = f": it runs in {hardware.ROOT}, so name a file by Path(__file__).parent"
        raise Skip(f"{path.name}{where}: {type(error).__name__}: {one_line(error)}{advice}") from error


def set_seeds(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def check(args: ModelArguments) -> Workload:
    """What one step trains. Raises Skip where two models, or two series of batches, of the same seed differ:
    rows are processes of their own, and would not do the same work. Raises Skip too without an optimizer, and
    without a weight to train."""
    numbers, model = checksums(args.model()), args.model()
    if checksums(model) != numbers:
        raise Skip(
            f"model() of {args.path.name} makes other weights or buffers each time: seed its generator"
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise Skip(f"model() of {args.path.name} has no weight to train")
    work = args.settle_steps(model)
    size = f"{work.parameters / 1e6:,.1f} M parameters, {work.tokens_per_step:,} {work.unit} a step"
    args.see_start(model)
    args.see_loss(model)
    args.said = [f"{work.model}: {size}", *args.said]
    if COMPILE not in args.given:
        args.said.append(f"Row {COMPILE}: {say_blocks(model, args.blocks)}")
    args.draw_again()
    if work.text_sha256 != args.work_sha256():
        raise Skip(f"batches() of {args.path.name} yields other numbers each time: seed its generator")
    return work


def checksums(model: torch.nn.Module) -> list[str]:
    """Of every weight and buffer that a checkpoint would hold."""
    tensors = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return [str(tensor.double().sum().item()) for tensor in real]


def main(words: list[str]) -> int:
    args = parse("run_all.sh", words)
    try:
        work = check(args)
    except Exception as error:  # whatever a model does, it is one line
        say(f"run_all.sh: error: {explain(error)[1]}", sys.stderr)
        return 2
    seen = {name: getattr(args, name) for name in ("is_masked", "blocks", "loss_text", "first", "given")}
    seen["beside"] = [str(path) for path in args.beside]
    facts.say_facts(args.device, work, {"--steps": str(work.steps)}, args.said, {"seen": seen})
    return 0


if __name__ == "__main__":
    run_command(
        lambda: main(in_a_process_of_its_own()), "run_all.sh"
    )  # which ends also where a thread of the file goes on
