"""A row as a training program in plain PyTorch, with the names of the user's own file: what a reader copies.

Two rows differ by the lines of a change, and none of them needs a function of this project.
"""

from collections.abc import Mapping

from torch import nn

from ladder.rows import AMP, COMPILE, FP8, GRAPH, SDPA
from mine.attention import needs_mask, switch_of
from mine.blocks import blocks_of, callable_parts

COMPILER_LIMIT = 8  # of compilations of one function
UPDATE = ["loss.backward()", "optimizer.step()", "optimizer.zero_grad()"]
WITHOUT_MASK = [  # by the name "sdpa", a CUDA graph gets a mask as a tensor, which is slow
    "from transformers import AttentionInterface",
    'AttentionInterface.register("sdpa_without_mask", AttentionInterface()["sdpa"])',
    'model.set_attn_implementation("sdpa_without_mask")',
]
FP8_BY_TORCHAO = [
    "from torchao.float8 import convert_to_float8_training",
    "def divides(module, name):",
    "    return isinstance(module, torch.nn.Linear) and not any(size % 16 for size in module.weight.shape)",
]
COPIES = {  # of a batch for a graph, which reads it in place: once, and in each step
    dict: (
        "static = {name: tensor.clone() for name, tensor in batch.items()}",
        ["for name in static:", "    static[name].copy_(batch[name])"],
    ),
    list: (
        "static = [tensor.clone() for tensor in batch]",
        ["for place, numbers in zip(static, batch):", "    place.copy_(numbers)"],
    ),
    None: ("static = batch.clone()", ["static.copy_(batch)"]),
}


def program(names: list[str], model: nn.Module, lists: list[str], args) -> str:
    """The program with the changes of these rows. `model` is as its file makes it, `lists` are the names of
    its lists of blocks, and `args` are mine.file's ModelArguments."""
    setup = []
    if AMP in names:
        setup.append('torch.set_float32_matmul_precision("high")')
    if SDPA in names and switch_of(model):
        setup += attention_lines(model, args)
    if FP8 in names:
        setup += fp8_lines(lists, args)
    if COMPILE in names:
        setup += compile_lines(model, lists)
        setup += compiled_loss_lines(model, args.path.stem if hasattr(args.file, "loss") else None)
    setup.append(optimizer_line(args, GRAPH in names))
    step = loss_lines(names, args, "static" if GRAPH in names else "batch")
    lines = [f"# once, after model() of {args.path.name}", *setup]
    if GRAPH in names:
        lines += graph_lines(step, args.drawn[0])
    else:
        lines += ["", "# in each training step", *step]
    return "\n".join(lines) + "\n"


def loss_lines(names: list[str], args, batch: str) -> list[str]:
    """Forward, loss, backward and update."""
    contexts = []
    if AMP in names:
        contexts.append(f'torch.autocast("{args.device.type}", torch.bfloat16)')
    if FP8 in names and hasattr(args.file, "fp8"):
        contexts.append("fp8_context")
    loss = f"loss = {args.loss_text.replace('batch', batch)}"
    return [*([f"with {', '.join(contexts)}:", f"    {loss}"] if contexts else [loss]), *UPDATE]


def optimizer_line(args, captured: bool) -> str:
    how = "fused=True, capturable=True" if captured else "fused=True"
    if hasattr(args.file, "optimizer"):
        return f"optimizer = {args.path.stem}.optimizer(model.parameters(), {how})"
    rate = f"lr={args.lr:g}, betas=(0.9, 0.95), weight_decay=0.1"
    return f"optimizer = torch.optim.AdamW(model.parameters(), {rate}, {how})"


def attention_lines(model: nn.Module, args) -> list[str]:
    """Hugging Face's switch, as mine/changes.py's fused_attention sets it."""
    masked = needs_mask(switch_of(model), args.is_masked)
    return ['model.set_attn_implementation("sdpa")'] if masked else WITHOUT_MASK


def compile_lines(model: nn.Module, lists: list[str]) -> list[str]:
    """The blocks, or the whole model, as mine/changes.py's compile_parts does it."""
    parts = [part for block in blocks_of(model, lists) for part in callable_parts(block)]
    lines = [] if parts else ["model.compile()"]
    if 2 * len(parts) > COMPILER_LIMIT:
        lines.append("# A block that reads its own number compiles once for each.")
        lines.append(f"torch._dynamo.config.recompile_limit = {2 * len(parts)}")
    is_of_pytorch = parts and parts[0].forward.__module__.startswith("torch.nn.")  # compile() leaves these
    each = "block.forward = torch.compile(block.forward)" if is_of_pytorch else "block.compile()"
    for name in lists if parts else []:
        lines += for_each_block(model, name, each)
    if parts:
        lines.append("# Without this, a compiled loss compiles the whole model.")
        lines.append("model.forward = torch.compiler.disable(model.forward)")
    return lines


def compiled_loss_lines(model: nn.Module, module: str | None = None) -> list[str]:
    """The loss of a `module` of the user's, or that of a Hugging Face model."""
    if module:
        return [f"{module}.loss = torch.compile({module}.loss)"]
    if getattr(model, "loss_function", None):
        return ["model.loss_function = torch.compile(model.loss_function)"]
    return []


def for_each_block(model: nn.Module | None, name: str, line: str) -> list[str]:
    values = ".values()" if model is not None and isinstance(model.get_submodule(name), nn.ModuleDict) else ""
    return [f"for block in model.{name}{values}:", f"    {line}"]


def fp8_lines(lists: list[str], args) -> list[str]:
    if hasattr(args.file, "fp8"):
        return [f"fp8_context = {args.path.stem}.fp8(model)"]
    convert = "convert_to_float8_training({}, module_filter_fn=divides)"
    lines = [line for name in lists for line in for_each_block(None, name, convert.format("block"))]
    return FP8_BY_TORCHAO + (lines or [convert.format("model")])


def graph_lines(step: list[str], batch) -> list[str]:
    """The whole step as a CUDA graph, as mine/changes.py's capture_step does it."""
    kind = dict if isinstance(batch, Mapping) else list if isinstance(batch, (list, tuple)) else None
    clone, copy = COPIES[kind]
    return [
        "",
        "# once, after three such steps, all in `with torch.cuda.stream(torch.cuda.Stream()):`",
        clone,
        "graph = torch.cuda.CUDAGraph()",
        "with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):",
        *(f"    {line}" for line in step),
        "",
        "# in each training step",
        *copy,
        "graph.replay()",
    ]
