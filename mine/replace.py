"""Training a file with its attention by hand as one call of PyTorch's, where both give the same losses."""

import torch

from common.text import Skip, one_line
from ladder.rows import FP32
from mine import by_hand, patch
from mine import file as model_file
from mine.attention import switch_of
from mine.batch import copied
from mine.file import ModelArguments

# Shares of a loss by which rounding may change it: in FP32, and where a file multiplies in TF32 or BF16. With
# noise of 0.05 on the weights of a GPT, BF16 changed the loss by a share of 5e-5, a missing mask by 5e-3, a
# scale that is 5 % off by 9e-4.
SAME_LOSS, SAME_ROUNDED, NOISE, NOISY_BATCHES = 5e-5, 5e-4, 0.05, 8


def replace_attention(args: ModelArguments) -> None:
    """If the file's attention is plain, train a copy that calls PyTorch's. Raises Skip if the losses of its
    batches differ, or the copy fails."""
    model, before = args.model(), args.file
    if switch_of(model):
        return
    try:
        edit = by_hand.fused(patch.read(args.path))
        expected = noisy_losses(args) if edit else []
    except Exception:  # it cannot be patched, or its loss fails in evaluation: set_attention says what to do
        return
    if edit is None:
        return
    place = f"attention by hand ({edit.place}, {args.path.name} lines {edit.lines})"
    owners = [module for module in model.modules() if type(module).__name__ == edit.place.partition(".")[0]]
    if edit.dropout and any(
        type(getattr(each, edit.dropout, None)) is not torch.nn.Dropout for each in owners
    ):
        raise Skip(f"{place} has a self.{edit.dropout} that is no nn.Dropout: it was left as it is")
    try:
        model_file.set_seeds(args.seed)  # as before the file was imported
        args.file = patch.load(args.path, args.file.__name__, edit.text)
        losses = noisy_losses(args)
    except Exception as error:
        args.file = before
        raise Skip(f"{place} cannot be one call of PyTorch's: {one_line(error, 100)}") from error
    limit = SAME_LOSS if args.first == FP32 else SAME_ROUNDED
    if not all(abs(a - b) <= limit * abs(b) for a, b in zip(losses, expected, strict=True)):
        args.file = before
        raise Skip(f"{place} is not causal, or does more: it was left as it is")
    args.attention = edit


def noisy_losses(args: ModelArguments) -> list[float]:
    """The losses of the first batches, without dropout, of weights that make attention uneven: with initial
    ones a mask hardly changes it."""
    model = args.model().eval()
    generator = torch.Generator(args.device).manual_seed(args.seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.empty(weight.shape, device=weight.device, dtype=torch.float32)
            weight.add_(noise.normal_(0, NOISE, generator=generator))
    return [args.loss(model, copied(batch, args.device)).item() for batch in args.drawn[:NOISY_BATCHES]]
