"""The changes of the rows of `./run_all.sh --model FILE`: each adds its lines to a program, or says why it
cannot."""

import torch

from common import hardware
from common.text import Skip, one_line
from ladder.rows import AMP, COMPILE, FP8, SDPA
from mine.attention import advice_on_attention, kernels_before, needs_mask, switch_of
from mine.batch import describe
from mine.blocks import blocks_of, check_compilable
from mine.file import ModelArguments, called
from mine.program import (
    COPY_BEFORE,
    PRECISION,
    Program,
    attention_lines,
    compile_lines,
    compiled_loss_lines,
    fp8_lines,
    padding_lines,
)


def make(program: Program, names: list[str], before: dict[str, dict]) -> None:
    """Make the changes of these rows, apart from the graph, in the order that they need. `before` are the
    records of the rows before, by their names."""
    if names and program.args.device.type == "cuda":
        program.run(padding_lines(program.model))
    if AMP in names:
        program.run([PRECISION])
        program.contexts.append(f'torch.autocast("{program.args.device.type}", torch.bfloat16)')
    if SDPA in names:
        fuse_attention(program, before)
    if FP8 in names:
        convert_to_fp8(program)
    if COMPILE in names:
        compile_blocks(program)


def fuse_attention(program: Program, before: dict[str, dict]) -> None:
    """Use the switch of a Hugging Face model. Raises Skip, with what was observed, without one, for a model
    that it does not change, and where attention does more than SDPA can."""
    model, args = program.model, program.args
    switch = switch_of(model)
    if switch is None and args.attention is not None:  # it was by hand, and a copy of the file is trained
        return
    if switch is None and not (observed := kernels_before(before)):
        raise Skip("which attention runs was not seen: run the rows before this one, too")
    if switch is None:
        raise Skip(advice_on_attention(observed[-1], args.softmax_at))
    name, configs = type(switch).__name__, [getattr(part, "config", None) for part in switch.modules()]
    wanted = "sdpa" if needs_mask(switch, args.is_masked) else "sdpa_without_mask"
    has_it = all(getattr(config, "_attn_implementation", wanted) == wanted for config in configs if config)
    if has_it and args.attention is None and kernels_before(before):
        raise Skip(advice_on_attention(kernels_before(before)[-1]))
    if any(getattr(config, "attn_logit_softcapping", None) for config in configs):
        raise Skip(f"{name} caps its attention scores, which SDPA leaves out")
    try:
        program.run(switch_lines(model, args))
    except (ValueError, NotImplementedError) as error:  # its class has no such switch
        if kernels_before(before)[-1:] == [None]:
            raise Skip(advice_on_attention(None)) from error
        raise Skip(f"{name} has no such switch: {one_line(error, 150)}") from error
    if switch.config._attn_implementation != wanted:
        raise Skip(f"{name} has attention of its own, which no switch changes")


def convert_to_fp8(program: Program) -> None:
    """Turn layers to FP8, by the file's own function or torchao. Raises Skip where FP8 cannot run."""
    model, args = program.model, program.args
    hardware.require_fp8(args.device)
    if hasattr(args.file, "fp8"):
        called(lambda: program.run([f"fp8_context = {args.module_name}.fp8(model)"]), args.path)
        context = program.scope["fp8_context"]
        if context is None:
            return
        is_made = hasattr(context, "__enter__") and not isinstance(context, type)
        if is_made or not callable(context) or isinstance(context, torch.nn.Module):
            what = "what makes the context of a step, as te.autocast without brackets, or nothing"
            raise Skip(f"fp8() of {args.path.name} returns {describe(context)}: let it return {what}")
        program.contexts.append("fp8_context()")
        return
    blocks = blocks_of(model, args.blocks) or [model]
    if not any(type(part) is torch.nn.Linear for block in blocks for part in block.modules()):
        raise Skip(f"the blocks have no nn.Linear for torchao: define fp8(model) in {args.path.name}")
    try:
        program.run(fp8_lines(model, args.blocks))
    except ImportError as error:
        raise Skip(f"torchao does not import ({one_line(error, 100)}): pip install torchao") from None
    if not any(type(part).__name__ == "Float8Linear" for part in model.modules()):
        raise Skip("no nn.Linear of the blocks has two sizes that divide by 16, as FP8 needs")


def compile_blocks(program: Program) -> None:
    """Compile what can be compiled of a model, and its loss. A block that is compiled anew in each step is an
    error: past its limit the compiler would run it as it is. Raises Skip for what would not be compiled, or
    not train the same."""
    model, args = program.model, program.args
    check_compilable(model, args.blocks)
    if args.drawn_at:
        how = "draw by the functions of `random`, not from a random.Random of your own"
        raise Skip(f"the compiler draws a number once, and repeats it ({args.drawn_at}): {how}")
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    lines = (block_lines(model, args) if args.is_called else []) + loss_lines(model, args)
    if not lines:
        raise Skip("torch.compiler.disable keeps the loss from being compiled, and it calls no model(x)")
    program.run(lines)


# --- lines with what to know about them -----------------------------------------------------------


def switch_lines(model: torch.nn.Module, args: ModelArguments) -> list[str]:
    """`attention_lines`, and where their attention without a mask does not fit."""
    lines = attention_lines(model, args)
    if needs_mask(switch_of(model), args.is_masked):
        return lines
    comments = [line for line in lines if line[0] == "#"]
    return [*comments, "# So do a static cache and assisted generation.", *lines[len(comments) :]]


def block_lines(model: torch.nn.Module, args: ModelArguments) -> list[str]:
    """`compile_lines`, and what comes before training with them."""
    generate = (
        "# Train a step before the first generate(), whose many lengths exhaust the compiler's attempts."
    )
    copy = "# A deepcopy, as for an EMA, would call these: in the copy, del the .forward of each."
    pickle = "# torch.save(model) cannot pickle them: save its state_dict()."
    lines = compile_lines(model, args.blocks)
    of_torch = any(".forward = torch.compile(" in line for line in lines)
    notes = {
        generate: hasattr(model, "generate"),
        copy: of_torch and COPY_BEFORE not in lines,
        pickle: of_torch,
    }
    return [*(note for note, fits in notes.items() if fits), *lines]


def loss_lines(model: torch.nn.Module, args: ModelArguments) -> list[str]:
    """Compile the loss where it is computed: the file's loss(), or the loss_function that a Hugging Face
    model calls. None where neither is."""
    lines = compiled_loss_lines(model, args.loss_module) if args.loss_module else []
    return lines + own_loss_lines(model, args)


def own_loss_lines(model: torch.nn.Module, args: ModelArguments) -> list[str]:
    """Compile the loss_function that a Hugging Face model calls; a loss() that calls no model(x) has it."""
    note = "# torch.save(model) cannot pickle this: save its state_dict(), or use save_pretrained()."
    is_apart = args.calls_loss_function and args.is_called
    lines = compiled_loss_lines(model) if is_apart else []
    return [note, *lines] if lines else []
