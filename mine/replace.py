"""Training a file with its attention by hand as one call of PyTorch's, where both give the same losses."""

import torch

from common.text import Skip, one_line
from ladder.rows import SDPA
from mine import by_hand, patch
from mine import file as model_file
from mine.attention import BY_HAND, has_switch, kernels_before
from mine.batch import copied
from mine.file import ModelArguments

NOISY_BATCHES = 8


def replace_attention(names: list[str], before: dict[str, dict], args: ModelArguments) -> None:
    """Where these rows fuse attention, and a row before ran it by hand: if it is plain in the file, train a
    copy that calls PyTorch's. Raises Skip if the losses of its batches differ, or the copy fails."""
    if SDPA not in names or args.attention or kernels_before(before)[-1:] != [BY_HAND]:
        return
    model, unchanged = args.model(), args.file
    if has_switch(model, args.path.name, args.softmax_at):
        return
    try:
        edit = by_hand.fuse(patch.read(args.path))
        expected = noisy_losses(args) if edit else []
    except Exception:  # it cannot be patched, or its loss fails in evaluation: set_attention says what to do
        return
    if edit is None:
        return
    place = f"attention by hand ({edit.place}, {args.path.name} lines {edit.lines})"
    name = edit.place.partition(".")[0]
    owners = [each for each in model.modules() if name in [base.__name__ for base in type(each).__mro__]]
    if edit.dropout and any(
        type(getattr(each, edit.dropout, None)) is not torch.nn.Dropout for each in owners
    ):
        raise Skip(f"{place} has a self.{edit.dropout} that is no nn.Dropout: it was left as it is")
    try:
        model_file.set_seeds(args.seed)  # as before the file was imported
        args.file = model_file.imported(args.path, args.file.__name__, edit.text)
        losses = noisy_losses(args)
    except Exception as error:
        args.file = unchanged
        raise Skip(f"{place} cannot be one call of PyTorch's: {one_line(error, 100)}") from error
    if not all(map(args.is_same_loss, losses, expected)):
        args.file = unchanged
        raise Skip(f"{place} is not causal, or does more: it was left as it is")
    args.attention = edit


def noisy_losses(args: ModelArguments) -> list[float]:
    """The losses of the first batches, without dropout, of weights that make attention uneven."""
    model = args.noisy_model()
    return [args.loss(model, copied(batch, args.device)).item() for batch in args.drawn[:NOISY_BATCHES]]
