"""What an untimed training step really ran, and where its time goes.

Steps run under torch.profiler after the timed ones. common/kernels.py tells what a kernel is by its name.
"""

import contextlib
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity

from common.kernels import BACKWARD, COMPILED_GRAPH, categorize
from common.record import CATEGORIES, HALF_FORMATS, Kernel, Profile, Settings, Symptoms
from common.text import one_line, say

MATRIX_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_linear_pointwise", "_mkl_linear")
DTYPES = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32"}  # by the profiler's names
# Operator that is dispatched to -> the kernel family that runs.
ATTENTION_OPERATORS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_cudnn_attention_forward": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_attention_math": "math",
    "FusedAttnFunc": "cudnn",  # Transformer Engine's
}
# Whose fourth argument is a mask.
MASKED_OPERATORS = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention")
OPTIMIZERS = {"_fused_adam": "fused", "_foreach_": "foreach"}  # by how their operators' names begin
# By which sizes of half-precision matmuls divide, or slow kernels run them: 16 bytes, as NVIDIA's guide
# "Matrix Multiplication Background" has it.
ALIGNED = 8
SYNCHRONIZING = ("_local_scalar_dense", "nonzero")  # .item(), float(), `if tensor`; x[mask]
PROFILED_STEPS, LONG_STEP_MS, KERNELS_KEPT = 3, 1000, 40
WARM_MS, MOST_WARM = 500, 50  # of steps before those that are profiled
MOST_FP8_UNIT = 32  # by which a number of tokens divides, see common/hardware.py
BIASES = 2  # products between the scores and their softmax, as of relative positions
SHORTEST_MS = 0.01  # of a CPU's operator in the timeline of a block


def observe(
    step: Callable[[], object], model: torch.nn.Module, device: torch.device
) -> tuple[Settings, Symptoms]:
    """Run `step`, launched, under torch.profiler: what its operators show. Raises what that raises."""
    operators, of_model = _operators_of(step, device)
    forwards = _compiled_forwards(step, model)
    settings = _settings(operators, of_model, model, forwards)
    if settings.compiled and settings.attention_kernel is None:  # a compiler makes a softmax by hand its own
        with contextlib.suppress(Exception), torch.compiler.set_stance("force_eager"):
            names, eager = _operators_of(step, device)
            if not any("_safe_softmax" in name or "flex_attention" in name for name in names):
                settings.attention_kernel = _settings(names, eager, model, forwards).attention_kernel
    return settings, _symptoms(of_model, model, forwards)


def _operators_of(step: Callable[[], object], device: torch.device) -> tuple[set[str], list[tuple]]:
    """The names of all operators of a step, and names and events of those that are not the optimizer's."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    if device.type == "cpu":
        activities.pop()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        torch.get_device_module(device).synchronize()
    operators, of_model, update_ends = set(), [], 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        name = event.name().rpartition("::")[2]
        operators.add(name)
        if name.startswith("Optimizer."):
            update_ends = event.start_ns() + event.duration_ns()
        if (
            event.start_ns() >= update_ends
        ):  # products of an optimizer, as those of Muon, are none of the model
            of_model.append((name, event))
    return operators, of_model


def _settings(
    operators: set[str], of_model: list[tuple], model: torch.nn.Module, forwards: dict[str, bool]
) -> Settings:
    """What ran, by the names of all operators of a step, and the events of the model's own."""
    multiplied, parts = set(), []  # the dtypes that were multiplied, parts of attention
    scores: Counter[str] = Counter()  # of fused attention, by the family of its kernel
    for name, event in of_model:
        if name in ATTENTION_OPERATORS:
            scores[ATTENTION_OPERATORS[name]] += _count_scores(event.shapes())
        if name in ("bmm", "baddbmm", "_softmax"):
            begin = 1 if name == "baddbmm" else 0  # its mask comes first
            parts.append((name, event.shapes()[begin : begin + 2]))
        if name in MATRIX_OPERATORS or name in ATTENTION_OPERATORS:
            multiplied |= {DTYPES.get(dtype) for dtype in event.dtypes()}
    recipes = {name: recipe for name, module in model.named_modules() if (recipe := _fp8_recipe(module))}
    regions = any(name.startswith(("Torch-Compiled Region", COMPILED_GRAPH)) for name in operators)
    settings = Settings(
        amp_dtype=next((name for name in DTYPES.values() if name in multiplied), None),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        attention_kernel=_attention_kernel(scores, parts),
        compiled=regions and (any(forwards.values()) or not forwards),
        optimizer=_optimizer(operators),
    )
    if recipes:
        settings.fp8_recipe = next(iter(recipes.values()))
        settings.head = "FP8" if any(name.endswith("lm_head") for name in recipes) else "BF16"
    return settings


def _symptoms(of_model: list[tuple], model: torch.nn.Module, forwards: dict[str, bool]) -> Symptoms:
    """What costs time without an error, by the events of a model's operators."""
    odd = {size for weight in model.parameters() for size in weight.shape if size % ALIGNED and size > 1}
    whole = in_fp32 = unaligned = 0
    multiplied: set[int] = set()
    for flops, sizes, dtype in _products(of_model):
        whole += flops
        in_fp32 += flops if dtype == "float32" else 0
        if dtype in HALF_FORMATS and sizes & odd:
            unaligned += flops
            multiplied |= sizes & odd
    skipped = sorted(name for name, is_held in forwards.items() if not is_held)
    return Symptoms(
        fp32_share=in_fp32 / whole if whole else None,
        unaligned_share=unaligned / whole if whole else None,
        unaligned_sizes=sorted(multiplied),
        is_masked=any(name in MASKED_OPERATORS and event.shapes()[3] for name, event in of_model),
        synchronizations=_synchronizations([name for name, _ in of_model]),
        compiled_modules=_compiled_modules(model),
        compiled_calls=sum(name.startswith("Torch-Compiled Region") for name, _ in of_model),
        graph_breaks=[*_graph_breaks(model), *(f"{name}: the compiler skips it" for name in skipped)],
    )


def _products(of_model: list[tuple]) -> Iterator[tuple[int, set[int], str | None]]:
    """FLOPs, sizes and dtype of every product: (..., M, K) x (..., K, N)."""
    for name, event in of_model:
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            first = 1 if name in ("addmm", "baddbmm") else 0  # what is added comes before
            (*batch, m, k), (*_, n) = event.shapes()[first : first + 2]
            yield 2 * math.prod([*batch, m, k, n]), {m, k, n}, DTYPES.get(event.dtypes()[first])


def _synchronizations(names: list[str]) -> int:
    """How often a step waited for a number; one on the CPU waits for nothing."""
    asked = sum(name in SYNCHRONIZING for name in names)
    if any(name.startswith("cudaLaunchKernel") for name in names):
        return min(asked, names.count("cudaStreamSynchronize"))
    return asked


def _compiled_modules(model: torch.nn.Module) -> int:
    """How many modules are compiled, without those that lie in another one."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in names)
        if not inside and (module._compiled_call_impl or is_compiled(module.forward)):
            names.append(name)
    return len(names)


def _compiled_forwards(step: Callable[[], object], model: torch.nn.Module) -> dict[str, bool]:
    """The forward() of each class of which modules compile(), and whether the compiler holds code of it: what
    it cannot trace from the start it leaves as it is, without a word. Code of a model that is compiled with
    its loss is the loss's: such a forward() runs in an eager step alone."""
    dynamo = torch._dynamo.eval_frame
    classes = {type(part) for part in model.modules() if part._compiled_call_impl}
    functions = [*filter(inspect.isfunction, (dynamo.innermost_fn(each.forward) for each in classes))]
    held = {id(each.__code__) for each in functions if dynamo._debug_get_cache_entry_list(each.__code__)}
    if len(held) < len(functions):
        run = _code_run_by(step)
        with torch.compiler.set_stance("force_eager"):
            held |= _code_run_by(step) - run
    return {each.__qualname__: id(each.__code__) in held for each in functions}


def _code_run_by(step: Callable[[], object]) -> set[int]:
    """The identities of the code that Python runs: some of the compiler's has no hash."""
    code, before = set(), sys.getprofile()
    sys.setprofile(lambda frame, event, _: code.add(id(frame.f_code)))
    try:
        step()
    finally:
        sys.setprofile(before)
    return code


def is_compiled(function: Callable) -> bool:
    """Whether a function is what torch.compile returned; torch.compiler.disable() marks its own alike."""
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return hasattr(function, "_torchdynamo_orig_callable") and not is_disabled


def _graph_breaks(model: torch.nn.Module) -> list[str]:
    """Why the compiler broke its graphs until now, a line each; without the break at a model whose blocks are
    compiled one by one, which is meant."""
    whole = f"<function {type(model).forward.__qualname__} at"
    reasons = [reason.split("\n") for reason in torch._dynamo.utils.counters["graph_break"]]
    told = [
        f"{lines[0]}: {lines[1].removeprefix('  Explanation: ')}" if lines[1:] else lines[0]
        for lines in reasons
    ]
    told = [text for text in told if not ("torch.compiler.disable" in text and whole in text)]
    return [one_line(re.sub(r"<function (\S+) at \w+>", r"\1", text), 160) for text in told]


def residual_dtype(train_step: Callable, batch: tuple, model: torch.nn.Module) -> str | None:
    """The dtype of the residual stream: what the LayerNorm before the head reads while a step runs, nothing
    compiled. None for a model in which neither has its usual name, and for a batch that is not tokens and
    targets, (B, T) each."""
    parts = [part for name, part in model.named_modules() if name.endswith(("ln_f", "lm_head"))]
    if not parts or len(batch) != 2:
        return None
    # Nothing is compiled, so a whole batch may need more memory: as few sequences as FP8 multiplies.
    count = MOST_FP8_UNIT // math.gcd(MOST_FP8_UNIT, batch[0].shape[1])
    seen: list[torch.dtype] = []
    hook = parts[0].register_forward_pre_hook(lambda part, inputs: seen.append(inputs[0].dtype))
    try:
        with torch.compiler.set_stance("force_eager"):
            train_step(*(tensor[:count] for tensor in batch))
    finally:
        hook.remove()
    return str(seen[0]).removeprefix("torch.") if seen else None


def _count_scores(shapes: list) -> int:
    """The scores of fused attention, by the shapes of its queries (..., T, D) and keys (..., S, D); at least
    one."""
    if len(shapes) < 2 or min(map(len, shapes[:2])) < 2:
        return 1
    return math.prod(shapes[0][:-1]) * shapes[1][-2]


def _attention_kernel(fused: Counter[str], parts: list[tuple[str, list]]) -> str | None:
    """The family of kernel that most scores of attention go through. Attention is "by hand" where a softmax
    lies between two products of its heads: scores (..., T, S) are what one before gives, and what the next
    one multiplies. PyTorch's math kernel does so too."""
    by_hand = 0
    for k, (name, shapes) in enumerate(parts):
        if name == "_softmax":
            before, after = parts[max(0, k - BIASES - 1) : k], parts[k + 1 : k + 2]
            gives = any(other != name and [a[0][-2], a[1][-1]] == shapes[0][-2:] for other, a in before)
            takes = any(other != name and b[0][-2:] == shapes[0][-2:] for other, b in after)
            by_hand += math.prod(shapes[0]) if gives and takes else 0
    if by_hand > fused.total():
        return "by hand"
    return max(fused, key=fused.get, default=None)


def _optimizer(operators: set[str]) -> str | None:
    """`AdamW, fused`: the class whose `step` ran, and how."""
    # For example Optimizer.step#AdamW.step.
    steps = [name.partition("#")[2] for name in operators if name.startswith("Optimizer.step#")]
    algorithms = " and ".join(sorted({name.partition(".")[0] for name in steps}))
    for begin, how in OPTIMIZERS.items():
        if algorithms and any(operator.startswith(begin) for operator in operators):
            return f"{algorithms}, {how}"
    return algorithms or None


def _fp8_recipe(module: torch.nn.Module) -> str | None:
    """How a module of Transformer Engine or torchao multiplies FP8; None for any other."""
    if getattr(module, "fp8", False):
        return repr(module.fp8_meta.get("recipe"))
    if type(module).__name__ == "Float8Linear":
        return f"torchao, {module.config.cast_config_input.scaling_granularity.name.lower()}"
    return None


def profile_steps(step: Callable[[], object], median_ms: float, device: torch.device) -> Profile:
    """The record's profile of a step that took `median_ms` when timed. Raises RuntimeError where it shows no
    kernels.

    The profiler slows the host, so its own gaps are not counted: idle is what the timed median leaves over.
    """
    n_steps = 1 if median_ms > LONG_STEP_MS else PROFILED_STEPS
    profiler, on_gpu = _profiled(step, n_steps, median_ms, device), device.type == "cuda"
    launches = launches_of(profiler, on_gpu)
    if not launches:
        raise RuntimeError("the profiler shows no kernels")
    kernels, categories = {}, dict.fromkeys(CATEGORIES, 0.0)
    for launch in launches:
        kernel = kernels.setdefault(launch.name, Kernel(launch.name, launch.category, 0.0, 0.0))
        kernel.ms, kernel.launches = kernel.ms + launch.ms / n_steps, kernel.launches + 1 / n_steps
        categories[launch.category] += launch.ms / n_steps
    communication_ms, idle_ms = categories["communication"], None
    if on_gpu:
        categories["communication"] = _exposed_ms(launches) / n_steps
        idle_ms = max(0.0, median_ms - sum(categories.values()))
    longest = sorted(kernels.values(), key=lambda kernel: -kernel.ms)[:KERNELS_KEPT]
    profile = Profile(idle_ms, categories, longest, len(launches) / n_steps, communication_ms)
    shown = launches if on_gpu else [launch for launch in launches if launch.ms >= SHORTEST_MS]
    profile.forward, profile.backward = one_block(shown, n_steps)
    return profile


def _profiled(step: Callable, n_steps: int, median_ms: float, device: torch.device) -> torch.profiler.profile:
    """`n_steps` steps under the profiler, right after steps for WARM_MS: a GPU that waited is cooler and
    faster. Prints its table to stderr."""
    kind, own = ProfilerActivity.CUDA, "self_device_time_total"
    if device.type == "cpu":
        kind, own = ProfilerActivity.CPU, "self_cpu_time_total"
    warm = min(math.ceil(WARM_MS / median_ms), MOST_WARM)
    schedule = torch.profiler.schedule(wait=0, warmup=warm, active=n_steps, repeat=1)
    with torch.profiler.profile(activities=[kind], schedule=schedule) as profiler:
        for k in range(warm + n_steps):
            step()
            if k in (warm - 1, warm + n_steps - 1):
                torch.get_device_module(device).synchronize()
            profiler.step()
    say(profiler.key_averages().table(own, row_limit=20), sys.stderr)
    return profiler


def launches_of(profiler: torch.profiler.profile, on_gpu: bool) -> list[Kernel]:
    """By start, every kernel, copy and fill of a GPU; or every operator of a CPU, with the time that it
    spends itself."""
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    launches = _kernels(events) if on_gpu else _operators(events)
    return [launch for launch in launches if launch.ms > 0]


def _kernels(events: list) -> Iterator[Kernel]:
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            ms, start_ms = event.time_range.elapsed_us() / 1e3, event.time_range.start / 1e3
            yield Kernel(event.name, categorize(event.name), ms, start_ms=start_ms)


def _operators(events: list) -> Iterator[Kernel]:
    """Operators in an optimizer's step carry its name."""
    update_ends = 0.0
    for event in events:
        name = event.name
        if name.startswith("ProfilerStep"):  # the profiler's mark of a whole step: what no operator has
            name = "Python, between operators"
        elif name.startswith("Optimizer.step"):
            update_ends = event.time_range.end
        elif event.time_range.end <= update_ends:
            name = f"Optimizer.step: {name}"
        ms, start_ms = event.self_cpu_time_total / 1e3, event.time_range.start / 1e3
        yield Kernel(name, categorize(name), ms, start_ms=start_ms)


def _exposed_ms(launches: list[Kernel]) -> float:
    """How long communication runs while no other kernel does."""
    computing = [launch for launch in launches if launch.category != "communication"]
    return _covered_ms(launches) - _covered_ms(computing)


def _covered_ms(launches: list[Kernel]) -> float:
    """How long at least one of the kernels runs; they are in the order of their start."""
    covered, until = 0.0, 0.0
    for launch in launches:
        end = launch.start_ms + launch.ms
        covered += max(0.0, end - max(launch.start_ms, until))
        until = max(until, end)
    return covered


def one_block(launches: list[Kernel], n_steps: int) -> tuple[list[Kernel], list[Kernel]]:
    """Forward and backward of the last block of `n_steps` whose kernels are `launches`, by start.

    A block is what lies between the longest kernels of two consecutive attentions, the first of the two
    included. Both are empty where a step has fewer than two of either.
    """
    halves = []
    for backward in (False, True):
        half = [launch for launch in launches if bool(re.search(BACKWARD, launch.name)) == backward]
        starts = _starts_of_attention(half)
        if len(starts) < 2 * n_steps:
            return [], []
        first, end = starts[-2:]
        block = [launch for launch in half if first <= launch.start_ms < end]
        halves.append([replace(launch, start_ms=launch.start_ms - first) for launch in block])
    return tuple(halves)


def _starts_of_attention(launches: list[Kernel]) -> list[float]:
    """When the kernel of attention that takes longest in all begins, each time."""
    attention, total = [launch for launch in launches if launch.category == "attention"], Counter()
    for launch in attention:
        total[launch.name] += launch.ms
    longest = max(total, key=total.get, default=None)
    return [launch.start_ms for launch in attention if launch.name == longest]
