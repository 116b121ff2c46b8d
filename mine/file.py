"""A model of yours: what a file must hold for `./run_all.sh --model FILE`, and what its model is.

model()                         a torch.nn.Module with FP32 weights
batches()                       yields what the model takes: a tensor, tuple, list, dataclass or mapping
loss(model, batch)              optional; otherwise the loss is the model's output, or its `.loss`
optimizer(parameters, **how)    optional, one or a list; `how` is for AdamW: fused, and of a graph capturable
fp8(model)                      optional: turns layers to FP8 in place, may return what makes the context of
                                a step, as te.autocast without brackets
"""

import builtins
import copy
import functools
import hashlib
import importlib.util
import itertools
import keyword
import linecache
import random
import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch.nn.parameter import UninitializedParameter

from common import hardware, options
from common.record import MY_FILE, Workload
from common.text import OneLineParser, Skip, explain, line_of, one_line, portable_command
from ladder.rows import FP32, FROM
from mine.batch import (
    call_text,
    check_parts,
    copied,
    describe,
    joined,
    loss_for,
    output_of,
    parts_of,
    sha256_of,
    shapes_of,
)
from mine.by_hand import Fused
from mine.optimizers import Optimizers

NEEDED = ("model", "batches")
OPTIONAL = {"loss": "model, batch", "optimizer": "parameters, **how", "fp8": "model"}  # and their arguments
# Shares of a loss by which rounding may change it: in FP32, and where a file multiplies in TF32 or BF16. With
# NOISE on the weights of a GPT, BF16 changed the loss by a share of 5e-5, a missing mask by 5e-3, a scale
# that is 5 % off by 9e-4.
SAME_LOSS, SAME_ROUNDED, NOISE = 5e-5, 5e-4, 0.05
# What a program of mine/program.py calls its own.
NAMES_OF_PROGRAMS = (
    "model",
    "optimizer",
    "batch",
    "loss",
    "graph",
    "static",
    "block",
    "part",
    "each",
    "torch",
    "place",
    "numbers",
    "name",
    "tensor",
    "cloned",
    "copy_into",
    "divides",
    "replay",
    "group",
    "__main__",
    "fp8_context",
)
# What the check saw, for the rows.
SEEN = (
    "beside",
    "is_masked",
    "is_called",
    "computes_loss",
    "calls_loss_function",
    "softmax_at",
    "drawn_at",
    "blocks",
    "loss_text",
    "first",
    "rows_in_file",
    "weights_sha256",
)
LR = 1e-4  # of the AdamW that a file without an optimizer gets


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
    beside: list[str] = field(default_factory=list)
    is_masked: bool = True
    is_called: bool = True  # the model itself, by the loss
    computes_loss: bool = True  # the file's loss(), from what the model gives
    calls_loss_function: bool = True  # the model, its loss_function, as some of Hugging Face do
    softmax_at: str = ""  # where the largest softmax is: `attend, net.py line 31`
    drawn_at: str = ""  # the line that draws a number which a compiler would draw once, see mine/draws.py
    blocks: list[str] = field(default_factory=list)  # names of the lists of blocks, see mine/blocks.py
    loss_text: str = ""  # an expression of the loss of `{batch}`, by the first pass, which trains
    first: str = FP32  # the name of the first row, the file unchanged
    rows_in_file: list[str] = field(default_factory=list)  # the rows whose changes the file makes itself
    remarks: list[str] = field(default_factory=list)  # what a user should know before the first row
    attention: Fused | None = None  # attention by hand, where a row has it as one call
    planned: Workload | None = None  # as the plan of the run has it
    weights_sha256: str = ""  # of the model that was checked; empty if there is none

    def resolve(self) -> None:
        """As the base class does, and import the file. Raises ValueError or Skip, one line."""
        self.path, self.known_modules = self.path.absolute(), set(sys.modules)
        set_seeds(self.seed)  # a file may draw numbers when it is imported
        self.file = load(self.path)
        if self.lr is not None and hasattr(self.file, "optimizer"):
            name = self.path.name
            raise ValueError(f"--lr {self.lr}: {name} has an optimizer of its own, with its rate")
        if hasattr(self.file, "loss"):
            self.loss_text = f"{self.module_name}.loss(model, {{batch}})"
        super().resolve()
        self.command = portable_command("./run_all.sh --model", [str(self.path)])
        options.check_output(self.output)
        if not hasattr(self.file, "optimizer"):
            self.lr = self.lr or LR

    @property
    def module_name(self) -> str:
        """By which a program of the user's imports the file."""
        stem = self.path.stem
        taken = {*sys.stdlib_module_names, *dir(builtins), *keyword.kwlist, *NAMES_OF_PROGRAMS}
        is_name = stem.isidentifier() and unicodedata.normalize("NFKC", stem) == stem  # as Python reads it
        return stem if is_name and stem not in taken else MY_FILE

    @property
    def loss_module(self) -> str | None:
        """That name where the file has a loss() that can be compiled by itself; otherwise None."""
        is_disabled = getattr(getattr(self.file, "loss", None), "_torchdynamo_disable", False)
        computes = hasattr(self.file, "loss") and self.computes_loss
        return self.module_name if computes and not is_disabled else None

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
                how = "model.float() makes them FP32, and AMP casts them where it pays"
                raise Skip(f"{name} is {dtype}: model() must give FP32 weights; {how}")
        if not any(part.training for part in model.modules()):  # as from_pretrained() gives it
            model.train()
        return model.to(self.device)

    def loss(self, model: torch.nn.Module, batch) -> torch.Tensor:
        """The scalar loss of a batch: by the file's `loss`, or the model's output."""
        if hasattr(self.file, "loss"):
            return self.file.loss(model, batch)
        try:
            output = output_of(model, batch)
        except TypeError as error:
            if not re.search(r"forward\(\) (missing|got|takes)", str(error)):
                raise
            how = f"a batch is the model's arguments, unless {self.path.name} defines loss(model, batch)"
            raise Skip(f"{one_line(error)}: {how}") from error
        is_loss = isinstance(output, torch.Tensor)
        loss = output if is_loss else getattr(output, "loss", None)
        if not self.loss_text:  # in evaluation, a model may return something else
            self.loss_text = call_text(batch).replace("batch", "{batch}") + ("" if is_loss else ".loss")
        if loss is None or loss.dim():
            raise Skip(
                f"the model returns {describe(output)}: write in {self.path.name} {loss_for(output, batch)}"
            )
        return loss

    def checked_optimizer(self, made: object, model: torch.nn.Module) -> torch.optim.Optimizer | Optimizers:
        """What the file's optimizer() made, several as one. Raises Skip for what is none."""
        optimizers = [*made] if isinstance(made, (list, tuple)) else [made]
        if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            raise Skip(
                f"optimizer() of {self.path.name} returns no torch.optim.Optimizer, and no list of these"
            )
        trained = {
            id(weight) for each in optimizers for group in each.param_groups for weight in group["params"]
        }
        if trained - set(map(id, model.parameters())):
            raise Skip(
                f"optimizer() of {self.path.name} has weights that are not model()'s: give it `parameters`"
            )
        if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
            raise Skip(f"optimizer() of {self.path.name} returns LBFGS, which makes several passes in a step")
        return Optimizers(optimizers) if isinstance(made, (list, tuple)) else made

    def workload(self) -> Workload:
        return self.planned

    def draw_again(self) -> None:
        vars(self).pop("drawn", None)

    @torch.no_grad()
    def noisy_model(self) -> torch.nn.Module:
        """A copy of the model, for evaluation, whose weights make attention uneven and outputs differ:
        initial ones hide most of what a mask or an order of words changes."""
        model = copy.deepcopy(self.model()).eval()
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for weight in filter(lambda weight: weight.requires_grad, model.parameters()):  # not a mask
            noise = torch.empty(weight.shape, device=weight.device, dtype=torch.float32)
            weight.add_(noise.normal_(0, NOISE, generator=generator))
        return model

    def is_same_loss(self, loss: float, expected: float) -> bool:
        """Whether two losses of a noisy model differ by rounding alone."""
        limit = SAME_LOSS if self.first == FP32 else SAME_ROUNDED
        return abs(loss - expected) <= limit * abs(expected)

    def why_not_joined(self) -> str:
        """Why two batches are not one of twice the examples, each of which counts the same in the loss; empty
        where they are."""
        arrays = [part for part in parts_of(self.drawn[0]) if isinstance(part, (torch.Tensor, np.ndarray))]
        lengths = {part.shape[:1] for part in arrays}
        if len(lengths) != 1 or () in lengths:
            return "their tensors do not share a first dimension"
        model, pair = self.noisy_model(), [self.drawn[0], self.drawn[1 % len(self.drawn)]]
        batches = [pair[0], *pair, joined(pair)]
        again, first, second, both = (self.loss(model, copied(each, self.device)).item() for each in batches)
        if not self.is_same_loss(again, first):
            return "their loss draws random numbers, so whether it is a mean of examples cannot be seen"
        is_mean = self.is_same_loss(both, (first + second) / 2)
        return "" if is_mean else "the loss of two as one is not their mean"

    def join_batches(self, count: int) -> None:
        """Let each step train on so many of the file's batches at once. Raises Skip where that is another
        work."""
        if why := self.why_not_joined():
            raise Skip(f"batches of {self.path.name} cannot be joined: {why}")
        cycle = itertools.cycle(self.drawn)
        self.drawn = [joined([*itertools.islice(cycle, count)]) for _ in range(3)]  # one is untimed
        work = self.planned
        tokens, flops = count * work.tokens_per_step, count * work.flops_per_step
        sha256 = self.work_sha256()
        self.planned = replace(work, tokens_per_step=tokens, flops_per_step=flops, text_sha256=sha256)

    def work_sha256(self) -> str:
        """16 hex digits over the file, the modules beside it that it imports, and all numbers of all
        batches."""
        content = b"\0".join(Path(path).read_bytes() for path in [self.path, *self.beside])
        return hashlib.sha256(content + sha256_of(self.drawn).encode()).hexdigest()[:16]


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
    module = imported(path, name)
    missing = [f"{name}()" for name in NEEDED if not callable(getattr(module, name, None))]
    if missing:
        raise Skip(f"{path.name} lacks {' and '.join(missing)}: see examples/gpt2.py")
    for function, arguments in {"model": "", **OPTIONAL}.items():
        value = getattr(module, function, load)
        is_layer = isinstance(value, torch.nn.Module) and function != "loss"
        if is_layer or not callable(value) or type(value).__module__.startswith("torch.nn."):
            what = f"is a {type(value).__name__}: let it be a function, {function}({arguments})"
            raise Skip(f"{function} of {path.name} {what}")
    return module


def imported(path: Path, name: str, text: str | None = None) -> ModuleType:
    """The file as a module of this name, or another `text` in its place, which finds its folder and its data
    as before."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import does: dataclasses look there
    if text is None:
        called(lambda: spec.loader.exec_module(module), path)
    else:
        lines = text.splitlines(keepends=True)
        linecache.cache[str(path)] = (len(text), None, lines, str(path))  # for inspect
        called(lambda: exec(compile(text, str(path), "exec"), vars(module)), path)
    return module


def called(function: Callable, path: Path):
    """What a function of the file returns. Raises Skip, one line with the file's line, where it fails."""
    try:
        return function()
    except (Skip, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, and what a file derives itself
        place, advice = line_of(error) or path.name, ""
        if isinstance(error, SystemExit):
            advice = ": let what reads options or exits stand under `if __name__ == '__main__':`"
        if re.match("'list' object has no attribute '(parameters|named_)", str(error)):
            advice = ": optimizer() gets a list of weights, not the model"
        if isinstance(error, ImportError) and f"'{path.stem}" in str(error):
            advice = f": rename {path.name}, a library has a module of that name"
        elif isinstance(error, ModuleNotFoundError):
            advice = f": install it for {sys.executable}, which runs the file"
        if isinstance(error, TypeError) and "argument 'fused'" in str(error):
            advice = ": let optimizer() take **how, and pass on what your class takes of it"
        elif isinstance(error, ImportError) and "relative import" in str(error):
            advice = (
                ": write `import name` for a file beside it, or put the folder above a package on sys.path"
            )
        if isinstance(error, FileNotFoundError):
            advice = f": it runs in {hardware.ROOT}, so name a file by Path(__file__).parent"
        raise Skip(f"{place}: {type(error).__name__}: {one_line(error)}{advice}") from error


def set_seeds(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def weights_sha256(model: torch.nn.Module) -> str:
    """16 hex digits over the sum of every weight and buffer that a checkpoint would hold."""
    tensors = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    sums = [str(tensor.double().sum().item()) for tensor in real]
    return hashlib.sha256(" ".join(sums).encode()).hexdigest()[:16]
