"""Training a file with its attention by hand as one call of PyTorch's, where both give the same losses."""

import builtins
from collections.abc import Iterator
from types import ModuleType, NoneType

import torch

from common.text import Skip, one_line
from ladder.rows import SDPA
from mine import by_hand, patch
from mine import file as model_file
from mine.attention import BY_HAND, has_switch, kernels_before
from mine.batch import copied
from mine.file import ModelArguments
from mine.masks import Scores, is_triangle

FEW_BATCHES = 8


def replace_attention(names: list[str], before: dict[str, dict], args: ModelArguments) -> None:
    """Where these rows fuse attention, and a row before ran it by hand: if it is plain in the file, train a
    copy that calls PyTorch's. Raises Skip if its lines do more, if the losses of its batches differ, or if
    the copy fails."""
    if SDPA not in names or args.attention or kernels_before(before)[-1:] != [BY_HAND]:
        return
    unchanged = args.file
    if has_switch(args.model(), args.path.name, args.softmax_at) or not (edit := plain_attention(args)):
        return
    try:
        expected = noisy_losses(args)
    except Exception:  # its loss fails in evaluation: the row says what to do
        return
    ran_in_half = runs_in_half(args)
    try:
        model_file.set_seeds(args.seed)  # as before the file was imported
        args.file = model_file.imported(args.path, args.file.__name__, edit.text)
        losses = noisy_losses(args)
    except Exception as error:
        args.file = unchanged
        reason = f"cannot be one call of PyTorch's: {one_line(error, 100)}"
        raise Skip(f"{name_of(edit, args)} {reason}") from error
    if not all(map(args.is_same_loss, losses, expected)):
        args.file = unchanged
        apart = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True))
        raise Skip(f"{name_of(edit, args)} has another loss with PyTorch's call, by up to {apart:.2%}")
    if ran_in_half and not runs_in_half(args):
        args.file = unchanged
        how = "give query, key and value one dtype, as q.to(v.dtype)"
        raise Skip(f"{name_of(edit, args)} runs with a model in BF16, and PyTorch's call would not: {how}")
    args.attention = edit


def runs_in_half(args: ModelArguments) -> bool:
    """Whether a model whose weights are BF16, as for inference, takes a batch."""
    try:
        args.loss(args.noisy_model().bfloat16(), copied(args.drawn[0], args.device))
    except Exception:  # such as a batch of FP32
        return False
    return True


def plain_attention(args: ModelArguments) -> by_hand.Fused | None:
    """The file with its largest attention as one call, by what it does in a few batches of training; None
    where that is not plain. Raises Skip where plain lines do what no call does."""
    try:
        text = patch.read(args.path)
    except Skip:
        return None
    edit = by_hand.fuse(text)
    *_, line = args.softmax_at.rpartition(f" {args.path.name} line ")
    if edit is None or not line.isdecimal() or int(line) not in edit.rows:
        return None
    model, scores = args.model(), Scores(args.path, edit.rows)
    check_dropout(model, edit, args)
    with torch.compiler.set_stance("force_eager"), scores:
        for batch in args.drawn[:FEW_BATCHES]:
            args.loss(model, copied(batch, args.device))
    scores.faults += [*faults_of_keys(model, edit, args), *faults_of_masks(model, edit, args)]
    if scores.faults:
        raise Skip(f"{name_of(edit, args)} {scores.faults[0]}")
    return by_hand.fuse(text, scales_query=True) if edit.is_scaled and scores.has_tensor_scale else edit


def owners_of(model: torch.nn.Module, edit: by_hand.Fused) -> list[torch.nn.Module]:
    """The modules of the class that holds the attention, or of one that inherits it."""
    name = edit.place.partition(".")[0]
    return [each for each in model.modules() if name in [base.__name__ for base in type(each).__mro__]]


def check_dropout(model: torch.nn.Module, edit: by_hand.Fused, args: ModelArguments) -> None:
    """Raises Skip for a dropout of the weights that is another module than nn.Dropout, or has hooks, which
    would not be called."""
    for part in owners_of(model, edit) if edit.dropout else []:
        dropout, which = getattr(part, edit.dropout, None), ""
        if type(dropout) is not torch.nn.Dropout:
            which = "that is no nn.Dropout"
        elif dropout._forward_hooks or dropout._forward_pre_hooks:
            which = "with hooks"
        if which:
            cannot = "which F.scaled_dot_product_attention cannot apply"
            raise Skip(f"{name_of(edit, args)} has a self.{edit.dropout} {which}, {cannot}")


def faults_of_keys(model: torch.nn.Module, edit: by_hand.Fused, args: ModelArguments) -> Iterator[str]:
    """By what keys may outnumber queries, as with a cache: is_causal=True would then show a query the first
    keys alone."""
    names = [edit.adds_keys] if edit.adds_keys else []
    for name in sorted(edit.of_keys):
        places = [args.file if hasattr(args.file, name.partition(".")[0]) else builtins]
        if name.startswith("self."):
            places = owners_of(model, edit)
        names += [] if all(keeps_length(values_along(place, name)) for place in places) else [name]
    for name in names[:1]:
        rule = f"is_causal={edit.query}.size(-2) == {edit.key}.size(-2)"
        yield (
            f"may have more keys than queries, by {name}: pass {rule} to F.scaled_dot_product_attention, "
            "and a mask where a prompt continues a cache"
        )


def keeps_length(values: list[object]) -> bool:
    """Whether what makes keys leaves their number alone, by the values along its name: a size, a layer, a
    function, a weight, and no other tensor or list."""
    value, owner = values[-1], getattr(values[-1], "__self__", None)
    is_function = callable(value) and isinstance(owner, (NoneType, ModuleType))
    known = (bool, int, float, str, torch.nn.Module, ModuleType)
    known += (torch.dtype, torch.device, torch.memory_format)
    parts = value if isinstance(value, tuple) else [value]
    is_weight = any(isinstance(each, torch.nn.Parameter) for each in values)
    return is_weight or is_function or all(isinstance(part, known) for part in parts)


def faults_of_masks(model: torch.nn.Module, edit: by_hand.Fused, args: ModelArguments) -> Iterator[str]:
    """Why the mask is not the causal one: a tensor that it is made of is no triangle, or is not found, among
    attributes of its module and what the file defines."""
    for name, is_made_here in edit.masks.items():
        of_self = name.startswith("self.")
        if is_made_here and not of_self:  # a local name
            continue
        places = owners_of(model, edit) if of_self else [args.file]
        tensors = [tensor for place in places for tensor in tensors_in(values_along(place, name)[-1])]
        if not (tensors or is_made_here):
            yield f"has a mask that is made elsewhere ({name}): make it beside its attention"
        for tensor in tensors:
            has_rows = tensor.dim() > 1 and min(tensor.shape[-2:]) > 1  # and no positions, (1, T)
            if has_rows and not is_triangle(tensor):
                yield "is not causal in longer batches, by its whole mask"


def values_along(place: object, name: str) -> list[object]:
    """The values of a dotted name from its first part to the whole, in a module or in a file; of what is
    missing, None."""
    values = []
    for part in name.removeprefix("self.").split("."):
        values.append(place := getattr(place, part, None))
    return values


def tensors_in(value: object) -> list[torch.Tensor]:
    """A tensor, or those of a list, a dict or a module."""
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        value = [*value.values()]
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in parts if isinstance(each, torch.Tensor)]


def name_of(edit: by_hand.Fused, args: ModelArguments) -> str:
    return f"attention by hand ({edit.place}, {args.path.name} lines {edit.lines})"


def noisy_losses(args: ModelArguments) -> list[float]:
    """The losses of the first batches, without dropout, of weights that make attention uneven."""
    model = args.noisy_model()
    return [args.loss(model, copied(batch, args.device)).item() for batch in args.drawn[:FEW_BATCHES]]
