"""Training a file with its attention by hand as one call of PyTorch's, where both do the same: the mask of
every batch that is trained is causal, and the losses are the same."""

from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.text import Skip, one_line
from ladder.rows import SDPA
from mine import by_hand, patch
from mine import file as model_file
from mine.attention import BY_HAND, calling_frame, has_switch, kernels_before
from mine.batch import copied, mapped
from mine.file import ModelArguments

FEW_BATCHES = 8
DIMENSIONS = 4  # of the scores that a fused kernel takes


def replace_attention(names: list[str], before: dict[str, dict], args: ModelArguments) -> None:
    """Where these rows fuse attention, and a row before ran it by hand: if it is plain in the file, train a
    copy that calls PyTorch's. Raises Skip if its lines do more, if the losses of its batches differ, or if
    the copy fails."""
    if SDPA not in names or args.attention or kernels_before(before)[-1:] != [BY_HAND]:
        return
    if has_switch(args.model(), args.path.name, args.softmax_at) or not (edit := plain_attention(args)):
        return
    unchanged, name = args.file, name_of(edit, args)
    try:
        import_anew(args, patch.read(args.path))
        expected, ran_in_half = noisy_losses(args), runs_in_half(args)
        try:
            import_anew(args, edit.text)
            losses = noisy_losses(args)
            args.loss(args.model(), copied(args.drawn[0], args.device)).backward()
        except Exception as error:
            raise Skip(f"{name} cannot be one call of PyTorch's: {one_line(error, 100)}") from error
        if not all(map(args.is_same_loss, losses, expected)):
            apart = max(
                abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True)
            )
            raise Skip(f"{name} has another loss with PyTorch's call, by up to {apart:.2%}")
        if ran_in_half and not runs_in_half(args):
            how = "give query, key and value one dtype, as q.to(v.dtype)"
            raise Skip(f"{name} runs with a model in BF16, and PyTorch's call would not: {how}")
        import_anew(args, edit.text)
        args.attention = edit
    finally:
        if args.attention is None:
            args.file = unchanged


def import_anew(args: ModelArguments, text: str) -> None:
    """Import a text as the file: whatever its loss counts or draws begins again."""
    model_file.set_seeds(args.seed)
    args.file = model_file.imported(args.path, args.file.__name__, text)


def runs_in_half(args: ModelArguments) -> bool:
    """Whether a model whose weights are BF16, as for inference, takes a batch."""
    batch = mapped(in_half, copied(args.drawn[0], args.device))
    try:
        args.loss(args.noisy_model().bfloat16(), batch)
    except Exception:  # it is made for FP32
        return False
    return True


def in_half(part: object) -> object:
    is_float = isinstance(part, torch.Tensor) and part.is_floating_point()
    return part.bfloat16() if is_float else part


def plain_attention(args: ModelArguments) -> by_hand.Fused | None:
    """The file with its largest attention as one call, by what it does with all batches in training, and with
    some in evaluation; None where that is not plain, or evaluation fails. Raises Skip where plain lines do
    what no call does."""
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
        for batch in args.drawn:
            args.loss(model, copied(batch, args.device))
        try:
            noisy_losses(args)
        except Exception:  # the row says what to do
            return None
    if edit.is_masked and not scores.lengths:
        scores.faults.append("has a mask, and never as many queries as keys: pass attn_mask")
    if scores.faults:
        raise Skip(f"{name_of(edit, args)} {scores.faults[0]}")
    return by_hand.fuse(text, edit.is_scaled and scores.has_tensor_scale, tuple(sorted(scores.lengths)))


class Scores(TorchDispatchMode):
    """What these lines of a file do to attention's scores inside the context: `faults`, which PyTorch's call
    does not have, whether a tensor scales them, and the lengths of sequences with a causal mask."""

    def __init__(self, path: Path, lines: frozenset[int]):
        super().__init__()
        self.path, self.lines = str(path), lines
        self.faults: list[str] = []
        self.has_tensor_scale, self.lengths = False, set()
        self.are_scores = self.are_weights = False  # what was computed last: before the softmax, behind it

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        frame = calling_frame() if name in ("bmm", "_softmax", "mul", "div", *by_hand.FILLS) else None
        if frame and frame.f_code.co_filename == self.path and frame.f_lineno in self.lines:
            self.look(name, *args[:2])
        return function(*args, **(kwargs or {}))

    def look(self, name: str, scores: torch.Tensor, other: object) -> None:
        if name == "bmm":  # of queries and keys, then of weights and values
            self.are_scores, self.are_weights = not self.are_weights, False
        elif not self.are_scores:  # such as dropout of the weights, or a norm of the queries
            return
        elif name == "_softmax":
            self.are_scores, self.are_weights = False, True
            if scores.dim() != DIMENSIONS:
                kernels = "fused kernels take (batch, heads, length, width)"
                self.faults.append(f"has scores of {scores.dim()} dimensions: {kernels}")
        elif name in by_hand.FILLS:
            rows, keys = scores.shape[-2:]
            if rows == keys:  # at other lengths the file's own lines run
                self.lengths.add(rows)
            causal = torch.ones(rows, keys, dtype=torch.bool, device=other.device).triu(1 + keys - rows)
            if not (other == causal).all():
                self.faults.append("is not causal: pass its mask to F.scaled_dot_product_attention")
        elif isinstance(other, torch.Tensor):
            self.has_tensor_scale = True
            if other.shape[-2:].numel() > 1:
                self.faults.append(
                    "scales its scores one by one, which F.scaled_dot_product_attention cannot"
                )


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
