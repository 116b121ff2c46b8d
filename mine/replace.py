"""Training a file with its attention by hand as one call of PyTorch's, where both give the same losses."""

import torch

from common.text import Skip, one_line
from ladder.rows import SDPA
from mine import by_hand, patch
from mine import file as model_file
from mine.attention import BY_HAND, has_switch, kernels_before
from mine.batch import copied
from mine.file import ModelArguments
from mine.masks import Scores

FEW_BATCHES = 8


def replace_attention(names: list[str], before: dict[str, dict], args: ModelArguments) -> None:
    """Where these rows fuse attention, and a row before ran it by hand: if it is plain in the file, train a
    copy that calls PyTorch's. Raises Skip if its lines do more, if the losses of its batches differ, or if
    the copy fails."""
    if SDPA not in names or args.attention or kernels_before(before)[-1:] != [BY_HAND]:
        return
    unchanged = args.file
    try:
        if has_switch(args.model(), args.path.name, args.softmax_at) or not (edit := plain_attention(args)):
            return
        expected = noisy_losses(args)
    except Skip:
        raise
    except Exception:  # its loss fails in evaluation: the row says what to do
        return
    try:
        model_file.set_seeds(args.seed)  # as before the file was imported
        args.file = model_file.imported(args.path, args.file.__name__, edit.text)
        losses = noisy_losses(args)
    except Exception as error:
        args.file = unchanged
        raise Skip(
            f"{name_of(edit, args)} cannot be one call of PyTorch's: {one_line(error, 100)}"
        ) from error
    if not all(map(args.is_same_loss, losses, expected)):
        args.file = unchanged
        raise Skip(f"{name_of(edit, args)} does more than PyTorch's call: it was left as it is")
    args.attention = edit


def plain_attention(args: ModelArguments) -> by_hand.Fused | None:
    """The file with its largest attention as one call; None where that is not plain. Raises Skip where plain
    lines do what no call does."""
    try:
        text = patch.read(args.path)
    except Skip:
        return None
    edit = by_hand.fuse(text)
    if edit is None:
        return None
    model, scores = args.model(), Scores(args.path, edit.rows)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), scores:
        for batch in args.drawn[:FEW_BATCHES]:
            args.loss(model, copied(batch, args.device))
    if not scores.is_largest:
        return None
    name = edit.place.partition(".")[0]
    owners = [each for each in model.modules() if name in [base.__name__ for base in type(each).__mro__]]
    if edit.dropout and any(
        type(getattr(each, edit.dropout, None)) is not torch.nn.Dropout for each in owners
    ):
        raise Skip(
            f"{name_of(edit, args)} has a self.{edit.dropout} that is no nn.Dropout: it was left as it is"
        )
    if scores.scale is not None and scores.scale.shape[-2:].numel() > 1:
        scores.faults.append("scales its scores one by one")
    if edit.is_scaled and scores.scale is not None:
        edit = by_hand.fuse(text, scales_query=True)
    if scores.faults:
        raise Skip(f"{name_of(edit, args)} {scores.faults[0]}: it was left as it is")
    return edit


def name_of(edit: by_hand.Fused, args: ModelArguments) -> str:
    return f"attention by hand ({edit.place}, {args.path.name} lines {edit.lines})"


def noisy_losses(args: ModelArguments) -> list[float]:
    """The losses of the first batches, without dropout, of weights that make attention uneven."""
    model = args.noisy_model()
    return [args.loss(model, copied(batch, args.device)).item() for batch in args.drawn[:FEW_BATCHES]]
