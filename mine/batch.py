"""What a file yields as a batch: a tensor, or a tuple, list, mapping or dataclass of such parts."""

import copy
import dataclasses
import hashlib
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from common.text import Skip


def mapped(function: Callable, *batches):
    """Batches of one structure as one: `function` makes one tensor or array of those at the same place."""
    first = batches[0]
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return function(*batches)
    if isinstance(first, Mapping):
        new = {name: mapped(function, *(batch[name] for batch in batches)) for name in first}
        if not isinstance(first, (UserDict, dict)) or type(first) is dict:
            return new
        like_first = copy.copy(first)  # Hugging Face's BatchEncoding has its parts as attributes, too
        if getattr(first, "__dict__", None) is first:  # an AttrDict
            like_first.__dict__ = like_first
        for name, part in new.items():
            like_first[name] = part
        return like_first
    if is_dataclass(first):
        new = copy.copy(first)  # __init__ may do more
        for name in fields_of(first):
            object.__setattr__(new, name, mapped(function, *(getattr(batch, name) for batch in batches)))
        return new
    if isinstance(first, (tuple, list)):
        parts = [mapped(function, *at_place) for at_place in zip(*batches, strict=True)]
        if isinstance(first, tuple):
            return tuple_like(first, parts)
        like_first = copy.copy(first)
        like_first[:] = parts
        return like_first
    return first


def tuple_like(first: tuple, parts: list) -> tuple:
    """These parts as a tuple or a namedtuple, as the first one; the lengths of a packed sequence stay on the
    CPU."""
    if isinstance(first, PackedSequence):
        new = dict(zip(first._fields, parts, strict=True))
        return first._replace(**new | {"batch_sizes": first.batch_sizes.clone()})
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def copied(batch, device: torch.device | None):
    """A batch with all its tensors copied to a device, None: where they are; and with its arrays copied."""

    def copy_of(part):
        if isinstance(part, np.ndarray):
            return part.copy()
        return part.to(device or part.device, copy=True)

    return mapped(copy_of, batch)


def joined(batches: list):
    """Several batches as one: their tensors and arrays one after the other along the first dimension."""

    def join(*parts):
        return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts)

    return mapped(join, *batches)


def is_dataclass(batch) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def fields_of(batch) -> dict:
    return {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}


def parts_of(batch) -> Iterator:
    """What a batch holds, in order: tensors, arrays, and whatever else."""
    if is_dataclass(batch):
        batch = fields_of(batch)
    if isinstance(batch, (Mapping, tuple, list)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from parts_of(part)
    else:
        yield batch


def tensors_of(batch) -> Iterator[torch.Tensor]:
    """The tensors of a batch in their order."""
    return (part for part in parts_of(batch) if isinstance(part, torch.Tensor))


def sha256_of(batch) -> str:
    """Of all tensors and arrays of a batch. Other parts may be notes, such as a time."""
    digest = hashlib.sha256()
    for part in parts_of(batch):
        if isinstance(part, torch.Tensor):
            part = part.to_dense() if part.layout != torch.strided else part
            part = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(part, np.ndarray) and part.dtype != object:
            digest.update(part.tobytes())
    return digest.hexdigest()


def check_parts(batch) -> None:
    """Raises Skip for an object of another class that holds tensors: they would not be copied, or seen."""
    for part in parts_of(batch):
        if holds_tensors(part):
            what = "tensors, or a tuple, list, dict or dataclass of these"
            raise Skip(f"batches() yields a {type(part).__name__} that holds tensors: let it yield {what}")


def holds_tensors(part: object, depth: int = 3) -> bool:
    """Whether an object has tensors in its attributes, or in theirs."""
    held = [] if isinstance(part, torch.Tensor) else [*getattr(part, "__dict__", {}).values()]
    held += [value for each in held if isinstance(each, Mapping) for value in each.values()]
    inner = [each for each in held if depth and not isinstance(each, type)]
    return any(isinstance(each, torch.Tensor) or holds_tensors(each, depth - 1) for each in inner)


def units_of(batch) -> tuple[str, int]:
    """What a batch holds, and how many: tokens where it has integers of two dimensions, otherwise samples."""
    tensors = list(tensors_of(batch))
    if not any(tensor.numel() for tensor in tensors):
        kind = type(batch).__name__
        what = "tensors (torch.from_numpy makes one), or a tuple, list, dict or dataclass of these"
        raise Skip(f"batches() yields a {kind} without tensors that hold numbers: let it yield {what}")
    has_pictures = any(tensor.is_floating_point() and tensor.dim() > 1 for tensor in tensors)
    sizes = [tensor.numel() for tensor in tensors if tensor.dim() == 2 and is_integer(tensor)]
    if sizes and not has_pictures:
        return "tokens", max(sizes)  # labels may be fewer
    return "samples", len(tensors[0]) if tensors[0].dim() else 1


def is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def shapes_of(batch: object) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors_of(batch))


def output_of(model: torch.nn.Module, batch):
    """What a model returns for a batch, which holds its arguments: by name in a dict, in order in a tuple or
    a list; anything else is the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def call_text(batch) -> str:
    """How a model is called with a batch."""
    if isinstance(batch, Mapping):
        return "model(**batch)"
    return "model(*batch)" if isinstance(batch, (tuple, list)) else "model(batch)"


def describe(output) -> str:
    """What a model returned, for a person."""
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a dict of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, (tuple, list)):
        return f"({', '.join(map(describe, output))})"
    return f"a {type(output).__name__}"


def loss_for(output, batch) -> str:
    """The function that makes a loss of what a model returned."""
    call = call_text(batch)
    parts = [*output.items()] if isinstance(output, Mapping) else []
    parts = [*enumerate(output)] if isinstance(output, (tuple, list)) else parts
    scalars = [key for key, part in parts if isinstance(part, torch.Tensor) and part.dim() == 0]
    value = f"{call}[{scalars[0]!r}]" if scalars else f"a scalar made of {call}"
    return f"`def loss(model, batch): return {value}`"
