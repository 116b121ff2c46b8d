"""Training a file with its attention by hand as one call of PyTorch's, where both give the same losses."""

import torch

from common.text import Skip, one_line
from ladder.rows import SDPA
from mine import by_hand, patch
from mine import file as model_file
from mine.attention import BY_HAND, has_switch, kernels_before
from mine.batch import copied
from mine.file import ModelArguments
from mine.keys import name_of_more
from mine.masks import Scores, faults_of_masks

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
        import_anew(args, patch.read(args.path))
        expected = noisy_losses(args)
    except Exception:  # its loss fails in evaluation: the row says what to do
        args.file = unchanged
        return
    ran_in_half = runs_in_half(args)
    try:
        import_anew(args, edit.text)
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
    import_anew(args, edit.text)
    args.attention = edit


def import_anew(args: ModelArguments, text: str) -> None:
    """Import a text as the file: whatever its loss counts or draws begins again."""
    model_file.set_seeds(args.seed)
    args.file = model_file.imported(args.path, args.file.__name__, text)


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
    owners = owners_of(model, edit)
    if name := name_of_more(edit.more_keys, owners, args.file):
        rule = f"is_causal={edit.query}.size(-2) == {edit.key}.size(-2)"
        how = f"pass {rule} to F.scaled_dot_product_attention, and a mask where a prompt continues a cache"
        scores.faults.append(f"may have more keys than queries, by {name}: {how}")
    scores.faults += faults_of_masks(edit.masks, owners, args.file)
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


def name_of(edit: by_hand.Fused, args: ModelArguments) -> str:
    return f"attention by hand ({edit.place}, {args.path.name} lines {edit.lines})"


def noisy_losses(args: ModelArguments) -> list[float]:
    """The losses of the first batches, without dropout, of weights that make attention uneven."""
    model = args.noisy_model()
    return [args.loss(model, copied(batch, args.device)).item() for batch in args.drawn[:FEW_BATCHES]]
