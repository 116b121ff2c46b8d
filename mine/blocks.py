"""The blocks of a model, which are compiled one by one, since equal ones compile once: lists of equal modules
that hold most of its weights and do most of its work."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from common.text import Skip

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LEAST_OF_A_LIST, LEAST_OF_ALL = 0.1, 0.5  # of the weights, and of the work where it was counted


def list_blocks(model: nn.Module, flops: dict[str, int], work: int) -> list[str]:
    """The names of the lists of blocks of a model; none where these are less than half of it, which is then
    compiled whole. `flops` are those of each list's members in a forward pass, called as block(x), of which
    `work` is the whole: compile() would change nothing where a model calls block.forward(x)."""
    weights, shares = count_weights(model), {}
    for name, blocks in outermost_lists(model):
        shares[name] = (count_weights(blocks) / weights, flops.get(name, 0) / work if work else 1.0)
    large = {name: share for name, share in shares.items() if min(share) >= LEAST_OF_A_LIST}
    sums = [sum(share[k] for share in large.values()) for k in range(2)]
    return [*large] if min(sums, default=0) >= LEAST_OF_ALL else []


@contextlib.contextmanager
def count_blocks(model: nn.Module, count: Callable[[], int]) -> Iterator[dict[str, int]]:
    """By how much `count()` grew inside of the context while members of each list of blocks were called, by
    the model's own call, and by `""` in that call as a whole: a loss that calls a part of it alone, as
    model.encode(x), is compiled with it."""
    grown, began, handles, calls = {"": 0}, {}, [], []

    def enter(*_):
        calls.append(count())

    def leave(*_):
        grown[""] += count() - calls.pop()

    handles += [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
    for name, blocks in outermost_lists(model):
        grown[name] = 0

        def begin(part, _):
            began[part] = count()

        def end(part, *_, name=name):
            grown[name] += count() - began[part] if calls else 0

        for part in parts_of(blocks.children()):
            handles += [part.register_forward_pre_hook(begin), part.register_forward_hook(end)]
    try:
        yield grown
    finally:
        for handle in handles:
            handle.remove()


def outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The lists of equal modules by their names, and none that lies in another one."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if name and module not in inside and isinstance(module, LISTS) and are_equal([*module.children()]):
            inside |= set(module.modules())
            yield name, module


def are_equal(modules: list[nn.Module]) -> bool:
    """Whether most of at least two modules are of one class and one size, and have parts: layers alone are no
    blocks."""
    if len(modules) < 2:
        return False
    kinds = Counter((type(each), *(weight.shape for weight in each.parameters())) for each in modules)
    return max(kinds.values()) > len(modules) / 2 and any([*each.children()] for each in modules)


def blocks_of(model: nn.Module, lists: list[str]) -> list[nn.Module]:
    """The members of these lists."""
    return [block for name in lists for block in model.get_submodule(name).children()]


def parts_of(blocks: Iterable[nn.Module]) -> list[nn.Module]:
    return [part for block in blocks for part in callable_parts(block)]


def callable_parts(module: nn.Module) -> list[nn.Module]:
    """A module that has a forward, or the nearest ones inside it that have: a list of layers has none."""
    if getattr(module.forward, "__func__", None) is not nn.Module.forward:
        return [module]
    return [part for child in module.children() for part in callable_parts(child)]


def check_compilable(model: nn.Module, lists: list[str]) -> None:
    """Raises Skip, with what to do, where compile() would leave the blocks of these lists, or the whole model
    without any, as they are, or would fail."""
    if any(getattr(part, "sparse", False) for part in model.modules()):
        raise Skip(
            "its gradients are sparse, which the compiler cannot follow: sparse=False makes them dense"
        )
    if torch._dynamo.config.suppress_errors:
        raise Skip("torch._dynamo.config.suppress_errors hides what is not compiled: do not set it")
    for part in parts_of(blocks_of(model, lists) or [model]):
        name = type(getattr(part, "_orig_mod", part)).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise Skip(f"{part.original_name} is TorchScript, which it does not compile: leave torch.jit out")
        if getattr(part.compile, "__func__", None) is not nn.Module.compile:
            raise Skip(f"{name}.compile is not PyTorch's: give yours another name")
        if getattr(part.forward, "_torchdynamo_disable", False):
            raise Skip(f"torch.compiler.disable keeps {name}.forward from being compiled: leave it out")


def is_transformer_engine(block: nn.Module) -> bool:
    """Whether a block holds layers of Transformer Engine, which torch.compile cannot trace."""
    return any(type(part).__module__.startswith("transformer_engine") for part in block.modules())


def count_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def say_blocks(model: nn.Module, lists: list[str], loss: str) -> str:
    """What a row compiles, and its share of the weights, in a clause; `loss` says whether the loss, too."""
    if not lists:
        why = "no list of equal modules has most of its weights and, as block(x) in model(x), of its work"
        return f"compiles the whole model: {why}"
    share = sum(count_weights(model.get_submodule(name)) for name in lists) / count_weights(model)
    names = f"{len(blocks_of(model, lists))} modules of {' and '.join(lists)}"
    return f"compiles the {names} ({share:.0%} of the weights){loss}"
