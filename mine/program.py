"""A row's training program in plain PyTorch, with the names of the user's own file: the row runs the lines
that a reader copies.

Two rows differ by the lines of a change, and none of them needs a function of this project.
"""

import keyword
import linecache
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from mine.attention import needs_mask, switch_of
from mine.batch import copied, tensors_of
from mine.blocks import blocks_of, callable_parts, is_transformer_engine, parts_of
from mine.file import ModelArguments, called
from mine.optimizers import Optimizers

COMPILER_LIMIT = 8  # of compilations of one function
ALIGNED, PADDED = 8, 64  # sizes of a product: numbers that 16 bytes hold in BF16, and what to pad to
PRECISION = 'torch.set_float32_matmul_precision("high")'  # what autocast leaves in FP32 is TF32
UPDATE = ["loss.backward()", "optimizer.step()", "optimizer.zero_grad()"]
EACH = "for each in optimizer:"  # of a list: all step before gradients go, since two may share weights
UPDATES = ["loss.backward()", EACH, "    each.step()", EACH, "    each.zero_grad()"]
COPY_BEFORE = "# Copy the model, as for an EMA, before this line: a later deepcopy would call this model."
WITHOUT_MASK = [  # by the name "sdpa", a CUDA graph gets a mask as a tensor, which is slow
    "# Without any mask but the causal one, which begins at the first key: padded batches, generate() of",
    '# several prompts, and a prompt that continues a cache need "sdpa".',
    "from transformers import AttentionInterface",
    'AttentionInterface.register("sdpa_without_mask", AttentionInterface()["sdpa"])',
]
FP8_BY_TORCHAO = [
    "from torchao.float8 import convert_to_float8_training",
    "def divides(module, name):",
    "    return isinstance(module, torch.nn.Linear) and not any(size % 16 for size in module.weight.shape)",
]
TRAIN_STEP = """
def train_step(batch):
{step}
    return loss.detach()  # so that nothing of a step outlives it
"""
CAPTURE = """
def capture(batch):
{clone}
{graph}
    loss = loss.detach()

    def replay(batch):
{copies}
        graph.replay()
        return loss.clone()  # the next replay overwrites `loss`

    return replay
"""
GRAPH = [
    "graph = torch.cuda.CUDAGraph()",
    "with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):",
]
BEFORE_GRAPH = [
    "# once, after three such steps, all in `with torch.cuda.stream(torch.cuda.Stream()):`",
    "# The graph keeps the learning rate. A schedule needs it as a tensor on the GPU, and fill_ it:",
    '# for group in {groups}: group["lr"] = torch.tensor(group["lr"], device="cuda")',
]


class Program:
    """The program of a `model` with the changes that were made: lines that ran once, and those of each
    step."""

    def __init__(self, model: nn.Module, args: ModelArguments):
        self.model, self.args = model, args
        self.setup: list[str] = []
        self.contexts: list[str] = []  # of forward and loss
        self.is_captured = False
        self.scope = {"torch": torch, "model": model, args.module_name: args.file}
        self.scope |= {"cloned": partial(copied, device=None), "copy_into": copy_into}

    def run(self, lines: list[str]) -> None:
        """Add lines to what runs once, and run them."""
        self.execute("\n".join(lines), self.scope)
        self.setup += lines

    def execute(self, text: str, names: dict) -> None:
        """Run a text whose functions look up their names in the scope; `names` gets what it defines."""
        # As a file of this folder: mine/attention.py looks for the user's line that calls an operator.
        path = f"{Path(__file__).with_suffix('')} of {self.args.path.name}"
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # for a traceback
        exec(compile(text, path, "exec"), self.scope, names)

    def make_optimizer(self, captured: bool) -> torch.optim.Optimizer | Optimizers:
        """The file's optimizer, or AdamW; fused in every row. Raises Skip for what is none."""
        self.is_captured = captured
        lines = [optimizer_line(self.args, captured)]
        called(lambda: self.run(lines), self.args.path)
        return self.args.checked_optimizer(self.scope["optimizer"], self.model)

    def step(self, batch: str = "batch") -> list[str]:
        """The lines of a training step of the `batch` of this name."""
        loss = f"loss = {self.args.loss_text.format(batch=batch)}"
        forward = [f"with {', '.join(self.contexts)}:", f"    {loss}"] if self.contexts else [loss]
        return forward + (UPDATES if isinstance(self.scope["optimizer"], (list, tuple)) else UPDATE)

    def graph(self) -> list[str]:
        """The lines that capture a step of the batch `static` as a CUDA graph."""
        return GRAPH + indented(self.step("static"))

    def train_step(self) -> Callable:
        """A training step as a function of a batch, which returns the loss."""
        return self.define("train_step", TRAIN_STEP, step=self.step())

    def capture(self, batch: object) -> Callable:
        """The replay of the step's graph, as a function of a batch, which returns the loss."""
        clone, copies = copy_lines(batch)
        lines = {"clone": [clone], "graph": self.graph(), "copies": indented(copies)}
        return self.define("capture", CAPTURE, **lines)(batch)

    def define(self, name: str, text: str, **lines: list[str]) -> Callable:
        names: dict[str, Callable] = {}
        bodies = {place: "\n".join(indented(of_place)) for place, of_place in lines.items()}
        self.execute(text.format(**bodies), names)
        return names[name]

    def text(self) -> str:
        """What a reader copies."""
        name, lines = self.args.path.name, []
        if edit := self.args.attention:
            place = f"# in {edit.place} of {name}, in place of lines {edit.lines}"
            lines = [place, *(f"# {line}" for line in edit.call.split("\n")), ""]
        lines += [f"# once, after model() of {name}", *self.setup, ""]
        each = self.step()
        if self.is_captured:
            clone, copies = copy_lines(self.args.drawn[0])
            groups = "optimizer.param_groups"
            if isinstance(self.scope["optimizer"], (list, tuple)):
                groups = "[group for each in optimizer for group in each.param_groups]"
            lines += [line.replace("{groups}", groups) for line in BEFORE_GRAPH]
            lines += [clone, *self.graph(), ""]
            each = [*copies, "graph.replay()"]
        return "\n".join([*lines, "# in each training step", *each]) + "\n"


def indented(lines: list[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]


def copy_into(static: object, batch: object) -> None:
    """Copy each tensor of a batch into that of another one of the same structure."""
    for place, numbers in zip(tensors_of(static), tensors_of(batch), strict=True):
        place.copy_(numbers)


def copy_lines(batch) -> tuple[str, list[str]]:
    """How a graph gets its batch, which it reads in place: once, and in each step."""
    if isinstance(batch, torch.Tensor):
        return "static = batch.clone()", ["static.copy_(batch)"]
    if type(batch) in (list, tuple) and all(isinstance(part, torch.Tensor) for part in batch):
        copies = ["for place, numbers in zip(static, batch):", "    place.copy_(numbers)"]
        return f"static = {type(batch).__name__}(tensor.clone() for tensor in batch)", copies
    if type(batch) is dict and all(isinstance(part, torch.Tensor) for part in batch.values()):
        copies = ["for name in static:", "    static[name].copy_(batch[name])"]
        return "static = {name: tensor.clone() for name, tensor in batch.items()}", copies
    return "static = cloned(batch)  # write cloned(), which clones each tensor", [
        "copy_into(static, batch)  # and copy_into(), which copies each tensor"
    ]


# --- the lines of each change ---------------------------------------------------------------------


def padding_lines(model: nn.Module) -> list[str]:
    """What to do about a vocabulary that tensor cores multiply slowly, as a comment: it changes the weights,
    so no row has it."""
    sizes = {part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)}
    for name, part in model.named_modules():
        size = part.out_features if isinstance(part, nn.Linear) else 0
        if size % ALIGNED and size in sizes:
            padded = -(-size // PADDED) * PADDED
            how = f"pad {place_of(model, name)} and the embedding to {padded}"
            if hasattr(model, "resize_token_embeddings"):
                how = f"model.resize_token_embeddings(pad_to_multiple_of={PADDED})"
            return [f"# not measured: a vocabulary of {size} is multiplied slowly: {how}"]
    return []


def optimizer_line(args, captured: bool) -> str:
    how = "fused=True, capturable=True" if captured else "fused=True"
    if hasattr(args.file, "optimizer"):
        return f"optimizer = {args.module_name}.optimizer(list(model.parameters()), {how})"
    rate = f"lr={args.lr!r}, betas=(0.9, 0.95), weight_decay=0.1"
    return f"optimizer = torch.optim.AdamW(model.parameters(), {rate}, {how})"


def place_of(model: nn.Module, name: str) -> str:
    """A module by its name, as Python writes it: `model.stages[1].blocks`."""
    text, parent = "model", model
    for part in filter(None, name.split(".")):
        child, is_list = parent.get_submodule(part), isinstance(parent, (nn.Sequential, nn.ModuleList))
        if isinstance(parent, nn.ModuleDict):
            text += f"[{part!r}]"
        elif is_list and part.isdecimal() and int(part) < len(parent) and parent[int(part)] is child:
            text += f"[{part}]"  # a slice of nn.Sequential keeps the keys of the whole
        elif part.isidentifier() and not keyword.iskeyword(part):
            text += f".{part}"
        else:
            text += f".get_submodule({part!r})"
        parent = child
    return text


def attention_lines(model: nn.Module, args) -> list[str]:
    """Hugging Face's switch to F.scaled_dot_product_attention."""
    switch = switch_of(model)
    place = next(place_of(model, name) for name, module in model.named_modules() if module is switch)
    is_plain = needs_mask(switch, args.is_masked)
    call = f'set_attn_implementation("{"sdpa" if is_plain else "sdpa_without_mask"}")'
    inside = [part.config for part in switch.modules() if hasattr(part, "set_attn_implementation")]
    lines = [f"{place}.{call}"]
    if any(config is not switch.config for config in inside):
        has_switch = 'hasattr(part, "set_attn_implementation")'
        lines = [f"for part in {place}.modules():", f"    if {has_switch}:", f"        part.{call}"]
    return lines if is_plain else WITHOUT_MASK + lines


def compile_lines(model: nn.Module, lists: list[str]) -> list[str]:
    """Compile the blocks, since equal ones compile once, or the whole model."""
    of_lists = {
        name: [block for block in blocks_of(model, [name]) if not is_transformer_engine(block)]
        for name in lists
    }
    parts = [part for blocks in of_lists.values() for part in parts_of(blocks)]
    if not lists:
        return [COPY_BEFORE] * is_of_torch(model) + compile_part("model", model)
    lines = []
    if 2 * len(parts) > COMPILER_LIMIT:
        lines.append("# A block that reads its own number compiles once for each.")
        lines.append(f"torch._dynamo.config.recompile_limit = {2 * len(parts)}")
    for name, blocks in of_lists.items():
        lines += compile_list(model, name, blocks)
    return [*lines, "# Without this, a compiled loss compiles the whole model.", *disable_lines(model)]


def disable_lines(model: nn.Module) -> list[str]:
    """Keep a model from being compiled with its loss: its class, so that copies and torch.save still work;
    the model alone where its class also stands in a block, or is PyTorch's, or its forward() is its own."""
    is_inside = any(isinstance(part, type(model)) for part in model.modules() if part is not model)
    if is_inside or is_of_torch(model) or "forward" in vars(model):
        return [COPY_BEFORE, "model.forward = torch.compiler.disable(model.forward)"]
    return ["type(model).forward = torch.compiler.disable(type(model).forward)"]


def compile_list(model: nn.Module, name: str, blocks: list[nn.Module]) -> list[str]:
    """These blocks of a list: in a loop if one line fits all, otherwise each part by its name."""
    parts_of_blocks = [callable_parts(block) for block in blocks]
    parts = [part for of_block in parts_of_blocks for part in of_block]
    whole = len(blocks) == len([*model.get_submodule(name).children()])
    if parts and whole and len({is_of_torch(part) for part in parts}) == 1:
        if parts == blocks:
            return for_each_block(model, name, *compile_part("block", parts[0]))
        if parts_of_blocks == [[*block.children()] for block in blocks]:  # lists of layers, without a forward
            (inner,) = compile_part("part", parts[0])
            return for_each_block(model, name, "for part in block.children():", f"    {inner}")
    names = {module: name for name, module in model.named_modules()}
    return [line for part in parts for line in compile_part(place_of(model, names[part]), part)]


def is_of_torch(part: nn.Module) -> bool:
    return part.forward.__module__.startswith("torch.nn.")


def compile_part(name: str, part: nn.Module) -> list[str]:
    """compile() leaves PyTorch's own modules as they are."""
    if is_of_torch(part):
        return [f"{name}.forward = torch.compile({name}.forward)"]
    return [f"{name}.compile()"]


def compiled_loss_lines(model: nn.Module, module: str | None = None) -> list[str]:
    """The loss of a `module` of the user's, or that of a Hugging Face model."""
    if module:
        return [f"{module}.loss = torch.compile({module}.loss)"]
    settable = getattr(getattr(type(model), "loss_function", None), "fset", True)
    if callable(getattr(model, "loss_function", None)) and settable:
        return ["model.loss_function = torch.compile(model.loss_function)"]
    return []


def for_each_block(model: nn.Module, name: str, *lines: str) -> list[str]:
    module = model.get_submodule(name)
    members, values = (module.values(), ".values()") if isinstance(module, nn.ModuleDict) else (module, "")
    if [*members] != [*module.children()]:  # without what is None, and whatever its own iterator gives
        values = ".children()"
    return [f"for block in {place_of(model, name)}{values}:", *(f"    {line}" for line in lines)]


def fp8_lines(model: nn.Module, lists: list[str]) -> list[str]:
    """The nn.Linear layers of the blocks, or of the whole model, in FP8 by torchao, one scale a tensor."""
    convert = "convert_to_float8_training({}, module_filter_fn=divides)"
    lines = [line for name in lists for line in for_each_block(model, name, convert.format("block"))]
    return FP8_BY_TORCHAO + (lines or [convert.format("model")])
