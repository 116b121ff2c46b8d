"""The lines that a run recommends are a program: what they train is what the row trained."""

import ast
import contextlib
import copy
import shutil
import subprocess
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import goldens
import pytest
import runs
import torch
import torch.nn.functional as F
from conftest import program_of, run_python
from torch import nn

from common.record import AS_IT_IS, Proof, write_json
from common.text import Skip
from ladder import process, rows, running
from ladder.rows import AMP, COMPILE, GRAPH, SDPA
from mine import batch as model_batch
from mine import changes, patch
from mine import check as model_check
from mine import file as model_file
from mine import program as lines
from mine import row as model_row
from mine.blocks import callable_parts
from report import applied, proof
from report.__main__ import render
from report.derive import derive
from report.load import load

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    def forward(self, x):
        return x + self.mlp(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x, y=None):
        for block in self.blocks:
            x = block(x)
        return x if y is None else F.mse_loss(x, y)

def model():
    return Net()
"""
LOSS = "def loss(model, batch):\n    x, y = batch\n    return F.mse_loss(model(x), y)\n"
RECOMMENDS = """
import os, sys
if "--recommended" in sys.orig_argv:
    print("3_compile", flush=True)
    os._exit(0)
"""
BATCHES = "def batches():\n    while True:\n        yield "
KINDS = {
    "a loss of its own": f"{LOSS}{BATCHES}torch.randn(4, 16), torch.ones(4, 16)\n",
    "a tuple": f"{BATCHES}torch.randn(4, 16), torch.ones(4, 16)\n",
    "a dict": f"{BATCHES}{{'x': torch.randn(4, 16), 'y': torch.ones(4, 16)}}\n",
}


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """The arguments of a row of a file, after its check."""
    monkeypatch.setattr("sys.path", [*__import__("sys").path])

    def check(text):
        (tmp_path / "net.py").write_text(text)
        words = [
            str(tmp_path / "net.py"),
            "--device",
            "cpu",
            "--steps",
            "3",
            "--output",
            str(tmp_path / "r.json"),
        ]
        args = model_file.parse("run_all.sh", words)
        args.planned = model_check.check(args)
        args.amp_dtype = torch.bfloat16
        return args

    return check


def split(program):
    """The lines of once, and those of each step."""
    once, _, each = program.rpartition("# in each training step")
    return once, each


def changed(names, args, model=None):
    """The program of a row with these changes."""
    program = lines.Program(model or args.model(), args)
    changes.make(program, names, {})
    program.make_optimizer(captured=GRAPH in names)
    return program


def train_by_lines(program, args, count=3):
    """The losses of a program's steps."""
    torch.manual_seed(args.seed)
    scope = {"torch": torch, "model": args.model(), args.path.stem: args.file}
    once, each = split(program)
    exec(once, scope)
    losses = []
    for (batch,) in args.batches()[:count]:
        exec(each, scope | {"batch": batch}, scope)
        losses.append(scope["loss"].item())
    return losses


@pytest.mark.parametrize("names", [[], [AMP], [AMP, COMPILE]], ids=lambda names: "+".join(names) or "none")
@pytest.mark.parametrize("kind", KINDS)
def test_the_lines_train_as_the_row_that_they_describe(kind, names, checked, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    args = checked(MODEL + KINDS[kind])
    train_step, *_ = model_row.build(names, {}, args)
    expected = [train_step(*batch).item() for batch in args.batches()[:3]]
    assert train_by_lines(args.code, args) == expected and expected[0] != expected[1]


def test_blocks_are_named_and_nothing_of_this_project_is(checked):
    args = checked(MODEL + KINDS["a loss of its own"])
    blocks, args.blocks = args.blocks, []
    whole = changed([COMPILE], args).text()
    assert "model.compile()" in whole and "torch.compiler.disable" not in whole
    args.blocks = blocks
    program = changed([AMP, COMPILE, GRAPH], args).text()
    assert "for block in model.blocks:\n    block.compile()\n# Without" in program
    assert "type(model).forward = torch.compiler.disable(type(model).forward)\n" in program
    assert "net.loss = torch.compile(net.loss)" in program and "capturable=True" in program
    assert 'with torch.autocast("cpu", torch.bfloat16):' in program
    assert not any(name in program for name in ("mine", "ladder", "common.", "changes."))
    compile(program, "program", "exec")


def test_what_the_file_does_itself_is_no_line(checked):
    text = MODEL + KINDS["a loss of its own"].replace(
        "return F", "with torch.autocast('cpu', torch.bfloat16):\n        return F"
    )
    args = checked(text)
    assert args.rows_in_file == [AMP] and args.first == AS_IT_IS
    assert "autocast" not in changed([COMPILE], args).text()


class Own(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "blocks",
    [
        [nn.ModuleList([Own(), nn.Sequential(nn.Linear(2, 2))]) for _ in range(2)],
        [Own(), nn.Sequential(nn.Linear(2, 2))],
        [nn.ModuleList([nn.ModuleList([Own()])]) for _ in range(2)],
        [nn.ModuleList(), nn.ModuleList([Own()])],
    ],
    ids=["attention and layers", "a stem of its own", "three levels", "an empty one"],
)
def test_the_lines_compile_every_part_that_the_row_compiles(blocks, monkeypatch):
    model = nn.Module()
    model.blocks = nn.ModuleList(blocks)
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self))
    monkeypatch.setattr(torch, "compile", lambda forward: compiled.append(forward.__self__) or forward)
    exec("\n".join(lines.compile_lines(model, ["blocks"])), {"model": model, "torch": torch})
    assert compiled == [part for block in blocks for part in callable_parts(block)]
    assert all(not lines.is_of_torch(part) or "forward" in vars(part) for part in compiled)


def test_what_a_program_cannot_say_is_a_comment(checked):
    args = checked(MODEL + KINDS["a tuple"])
    program = changed([COMPILE, GRAPH], args).text()
    assert "The graph keeps the learning rate" in program


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.scale = nn.ModuleList(Own() for _ in range(2)), torch.ones(1)

    def forward(self, x):
        return x * self.scale


def test_copies_of_a_model_that_is_not_compiled_with_its_loss_are_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr(Net, "forward", Net.forward)  # undone at the end

    def disabled(model):
        exec("\n".join(lines.disable_lines(model)), {"model": model, "torch": torch})
        assert model.forward._torchdynamo_disable

    model = Net()
    disabled(model)
    disabled(model)  # model() may be called again
    assert "forward" not in vars(model)
    twin = copy.deepcopy(model)
    twin.scale = torch.zeros(1)
    assert model(torch.ones(1)) == 1 and twin(torch.ones(1)) == 0
    torch.save(model, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=False)(torch.ones(1)) == 1
    for other in (nn.Sequential(Own()), nn.ModuleList([Own()]), Own()):
        other.inner = type(other)()
        disabled(other)
        assert lines.disable_lines(other)[0] == lines.COPY_BEFORE
    assert not hasattr(Own.forward, "_torchdynamo_disable")
    assert not hasattr(nn.Sequential.forward, "_torchdynamo_disable")


@pytest.mark.parametrize(
    "name", ["model", "loss", "torch", "batch", "class", "list", "replay", "my-model", "mode\u0300le"]
)
def test_a_file_called_as_a_name_of_the_program_gets_another(name):
    assert model_file.ModelArguments.module_name.fget(SimpleNamespace(path=Path(f"{name}.py"))) == "my_file"


def test_one_optimizer_in_a_list_is_stepped_as_a_list(checked):
    own = "def optimizer(parameters, **how):\n    return [torch.optim.AdamW(parameters, **how)]\n"
    args = checked(MODEL + KINDS["a loss of its own"] + own)
    assert "each.step()" in changed([], args).text()
    assert "for each in optimizer for group in each.param_groups]" in changed([GRAPH], args).text()


def test_optimizers_that_share_weights_all_step_before_gradients_go(checked):
    both = "def optimizer(parameters, **how):\n    return [torch.optim.AdamW(parameters, **how), "
    losses = []
    for rate in ("0.5", "0"):  # of two lengths: bytecode of a file of one length and second is taken again
        own = f"{both}torch.optim.SGD(parameters, {rate})]\n"
        args = checked(MODEL + KINDS["a loss of its own"] + own)
        train_step, *_ = model_row.build([], {}, args)
        losses.append([train_step(*batch).item() for batch in args.batches()[:2]])
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]


def test_only_a_loss_function_that_can_be_set_is_compiled():
    class Fixed(nn.Module):
        loss_function = property(lambda self: F.mse_loss)

    assert lines.compiled_loss_lines(Fixed()) == []
    for value, expected in (("mse", 0), (F.mse_loss, 1)):
        model = nn.Linear(2, 2)
        model.loss_function = value
        assert len(lines.compiled_loss_lines(model)) == expected


FORCES = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 16)
    def forward(self, x):
        x = x.clone().requires_grad_(True)
        (force,) = torch.autograd.grad(self.net(x).sin().sum(), x, create_graph=True)
        return force.square().mean()
def model():
    return Net()
"""


def test_a_model_whose_forward_needs_gradients_trains_by_its_lines(checked):
    args = checked(FORCES + BATCHES + "torch.randn(4, 16)\n")
    assert args.loss_text == "model({batch})"
    train_step, *_ = model_row.build([], {}, args)
    assert train_step(*args.batches()[0]).isfinite()


def test_what_a_model_returns_in_evaluation_is_no_line_of_its_training(checked):
    returns = "        return x if y is None else F.mse_loss(x, y)\n"
    another = "        return F.mse_loss(x, y) if self.training else Out(F.mse_loss(x, y))\n"
    assert returns in MODEL
    out = "class Out:\n    def __init__(self, loss):\n        self.loss = loss\n"
    args = checked(MODEL.replace(returns, another) + out + KINDS["a tuple"])
    args.join_batches(2)  # which evaluates
    assert args.loss_text == "model(*{batch})"


def test_an_optimizer_that_takes_no_words_is_told_to(checked):
    own = "def optimizer(parameters):\n    return torch.optim.SGD(parameters, 0.1)\n"
    with pytest.raises(Skip, match=r"let optimizer\(\) take \*\*how"):
        checked(MODEL + KINDS["a loss of its own"] + own)


def test_a_name_in_quotes_is_not_that_of_the_model(checked):
    returns = "Net()  # of model"
    tree = ast.parse(f"return {returns}").body[0]
    made = patch.before_return(tree, [f"return {returns}"], "", ["model.parts['model'].compile()"], set())
    assert "net.parts['model'].compile()" in made


def test_parts_are_named_as_python_writes_them():
    model = nn.Module()
    model.layers = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Sequential(nn.Linear(2, 2))})
    model.stages = nn.Sequential(nn.Module(), nn.Module())
    model.stages[1].blocks = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(2))
    assert lines.compile_lines(model, ["layers", "stages.1.blocks"])[:5] == [
        "for block in model.layers.values():",
        "    block.forward = torch.compile(block.forward)",
        "for block in model.stages[1].blocks:",
        "    for part in block.children():",
        "        part.forward = torch.compile(part.forward)",
    ]
    assert lines.place_of(model, "layers.a") == "model.layers['a']"
    compiled = ["model.forward = torch.compile(model.forward)"]
    assert lines.compile_lines(nn.Sequential(), []) == [lines.COPY_BEFORE, *compiled]
    model.features = nn.Sequential(nn.GELU(), *(nn.ModuleList([Own(), Own()]) for _ in range(3)))[1:]
    model.add_module("my-blocks", nn.ModuleList([Own(), nn.Sequential(), None]))
    model.add_module("0", nn.Module())
    model.get_submodule("0").add_module("class", Own())
    for name, module in model.named_modules():
        assert eval(lines.place_of(model, name), {"model": model}) is module, name
    assert lines.for_each_block(model, "features.3", "pass")[0].endswith("features.get_submodule('3'):")
    (loop, _) = lines.for_each_block(model, "my-blocks", "pass")
    assert loop == "for block in model.get_submodule('my-blocks').children():", "one of them is None"


def test_a_copy_of_compiled_blocks_of_pytorch_s_own_is_told_how_to_be_a_model_of_its_own():
    model = Own()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    added = changes.block_lines(model, SimpleNamespace(blocks=["layers"]))
    assert "del the .forward of each" in added[0] and "state_dict" in added[1]
    exec("\n".join(added[:-2]), {"torch": torch, "model": model})  # all but what changes the class
    other, x = copy.deepcopy(model), torch.ones(1, 2)
    with torch.no_grad():
        other.layers[0].weight.zero_()
    before = torch.equal(other.layers[0](x), model.layers[0](x))
    for block in other.layers:
        del block.forward
    assert before and not torch.equal(other.layers[0](x), model.layers[0](x))


def test_a_batch_of_another_kind_is_copied_by_functions_to_write():
    tensor = torch.ones(2)
    for batch, kind in (
        (tensor, "batch.clone()"),
        ((tensor, tensor), "tuple(tensor"),
        ({"x": tensor}, "{name"),
    ):
        assert lines.copy_lines(batch)[0].startswith(f"static = {kind}")
    for batch in ((tensor, {"m": tensor}), {"x": tensor, "use_cache": False}, SimpleNamespace(x=tensor)):
        assert lines.copy_lines(batch)[0].startswith("static = cloned(batch)  #")


class Loss(nn.Module):
    """Its loss is the sum of what the batch holds, times a weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.ones(())), []

    def forward(self, batch):
        self.read.append(list(model_batch.tensors_of(batch)))
        return self.weight * sum(tensor.sum() for tensor in self.read[-1])


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: (x, x + 1),
        lambda x: [x],
        lambda x: {"x": x},
        lambda x: (x, {"more": x}),
        lambda x: {"x": x, "use_cache": False},
    ],
)
def test_a_graph_reads_a_batch_of_its_own_and_gives_a_loss_of_its_own(form, monkeypatch):
    """In place of a torch.cuda.CUDAGraph: the step is captured by running it once."""
    graph = SimpleNamespace(replay=None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    model = Loss()
    batches = [form(torch.full((2,), float(k))) for k in (1, 2)]
    replay = program_of(model, torch.optim.SGD(model.parameters(), 0.0)).capture(batches[0])
    (static,) = model.read
    given = [part for batch in batches for part in model_batch.tensors_of(batch)]
    assert not {part.data_ptr() for part in static} & {part.data_ptr() for part in given}
    expected, at_replay = [*model_batch.tensors_of(batches[1])], []
    graph.replay = lambda: at_replay.extend(torch.equal(*pair) for pair in zip(static, expected, strict=True))
    losses = [replay(batches[1]) for _ in range(2)]
    assert len(at_replay) == 2 * len(static) and all(at_replay), "copied before the replay"
    assert losses[0].data_ptr() != losses[1].data_ptr() and not losses[0].requires_grad


PATCHES = {
    "a loss of its own": (
        [
            '+    torch.set_float32_matmul_precision("high")',
            '+@torch.autocast("cpu", torch.bfloat16)',
            "+@torch.compile",
        ],
        [AMP, COMPILE],
    ),
    "a tuple": (["-    return Net()", "+    net = Net()", "+    return net"], [COMPILE]),
}


@pytest.mark.parametrize("kind", PATCHES)
def test_a_patch_applies_and_the_patched_file_trains_as_the_row(kind, checked, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda work, **_: work)
    monkeypatch.setattr(nn.Module, "compile", lambda self: None)
    args = checked(MODEL + KINDS[kind])
    train_step, *_ = model_row.build([AMP, COMPILE], {}, args)
    expected = [train_step(*batch).item() for batch in args.batches()[:3]]
    args.code = None
    rest = model_row.patch_file([AMP, COMPILE], args)
    added, placed = PATCHES[kind]
    assert rest == [name for name in (AMP, COMPILE) if name not in placed]
    assert set(added) <= set(args.code.splitlines()) and "+    for block in" in args.code
    train_step, *_ = model_row.build(rest, {}, args)
    assert [train_step(*batch).item() for batch in args.batches()[:3]] == expected
    (tmp_path / "net.patch").write_text(args.code)
    for command in (["git", "apply", "--check", "net.patch"], ["git", "apply", "net.patch"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    patched, _ = patch.edit(MODEL + KINDS[kind], [AMP, COMPILE], args.model(), args.blocks, args)
    assert (tmp_path / "net.py").read_text() == patched


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    return Net()\n", "\treturn Net()\n", "\tnet = Net()\n\tfor block in"),
        ("    return Net()\n", "    return (\n        Net()\n    )\n", "    net = (\n        Net()\n    )\n"),
        (
            "def model():\n    return Net()\n",
            "net = Net\n\ndef model():\n    return net()\n",
            "network = net()\n",
        ),
        ("    return Net()\n", "    made = Net()\n    return made\n", "    for block in made.blocks:"),
        ("    return Net()\n", "    block = Net()\n    return block\n", "    for block in net.blocks:"),
        ("torch.ones(4, 16)\n", "torch.ones(4, 16)", "+    net = Net()"),  # no end of the last line
        ("def model():\n    return Net()\n", "def model(): return Net()\n", None),
        ("    return Net()\n", "    if True:\n        return Net()\n", None),
        ("    return Net()\n", "    if not torch:\n        return None\n    return Net()\n", None),
        (
            "    return Net()\n",
            "    def make():\n        return Net()\n    return make()\n",
            "    net = make()\n    for block",
        ),
        ("import torch\n", "import torch as t, torch.nn as torch\n", None),
    ],
)
def test_a_patch_fits_the_file_as_it_is_written_or_is_none(old, new, said, checked, tmp_path):
    text = MODEL + KINDS["a tuple"]
    args, text = checked(text), text.replace(old, new, 1)
    assert new in text
    patched, placed = patch.edit(text, [COMPILE], args.model(), args.blocks, args)
    assert bool(placed) is (said is not None)
    compile(patched, "net.py", "exec")
    (tmp_path / "net.py").write_text(text)
    (tmp_path / "net.patch").write_text(changed := patch.difference("net.py", text, patched))
    assert (said or "") in patched + changed
    if placed:
        subprocess.run(["git", "apply", "net.patch"], cwd=tmp_path, check=True)
    assert (tmp_path / "net.py").read_text() == patched


COMMANDS = [each for each in (["git", "apply"], ["patch", "-p1", "-i"]) if shutil.which(each[0])]


def test_a_patch_of_a_file_with_spaces_in_its_name_applies(tmp_path):
    name, before, after = "my net-2.py", "a = 1\nb = 2\n", "a = 1\nb = 3\n"
    (tmp_path / "the.patch").write_text(made := patch.difference(name, before, after))
    assert made.startswith("--- a/my net-2.py\t\n+++ b/my net-2.py\t\n")
    for command in COMMANDS:
        (tmp_path / name).write_text(before)
        subprocess.run([*command, "the.patch"], cwd=tmp_path, check=True)
        assert (tmp_path / name).read_text() == after


@pytest.mark.parametrize(
    "content", [b"a = 1\r\n", b"a = 1\x0c\n", b"\xef\xbb\xbfa = 1\n", b"a = '\xe9'\n", b"("]
)
def test_a_file_that_a_patch_cannot_carry_is_left_alone(content, tmp_path):
    (tmp_path / "net.py").write_bytes(content)
    with pytest.raises(Skip, match="cannot be patched"):
        patch.read(tmp_path / "net.py")


def test_the_name_of_a_patch_leads_to_no_other_folder():
    run = goldens.patched()
    run.workload.model = "../../etc/net.py"
    assert applied.patch_name(run) == "net.patch"
    assert {name for name in render(Path("f"), run)[1] if "/" in name} == set()


def test_a_patch_is_offered_only_with_the_time_and_the_work_of_its_row():
    run = goldens.patched()
    row = run.rows[-1]
    assert applied.patch_to_offer(derive(run)) == row.code
    for change, said in (
        ({"step_ms": [120.0] * 3}, "it is slower (120.0 ms)"),
        ({"proof": None}, "its work is not proven"),
        ({"proof": Proof("0_fp32", False, 0.1)}, "its work is not proven"),
        ({"proof": Proof("0_fp32", False, 1.0, 0.1, "w", limit=0.9)}, "its work differs"),
        ({"changes": ["AMP"]}, "it makes other changes"),
        ({"recompiled": 1}, "the compiler worked while it was timed"),
        ({"status": "skipped", "reason": "no place"}, "No patch is offered: no place."),
    ):
        run.rows[-1] = replace(row, **change)
        assert not applied.patch_to_offer(derive(run)) and said in applied.patch_note(derive(run)), said


def larger(run, times=4, **fields):
    """The trial of a larger batch, in a run whose recommended row needs less memory than the first."""
    run.rows[0].peak_bytes, run.rows[3].peak_bytes = 40 << 30, 21 << 30
    run.environment.gpu_memory_bytes = 80 << 30
    row = replace(run.rows[3], **{"step": "larger-batch", "step_ms": [390.0] * 8, "proof": None} | fields)
    work = replace(run.workload, tokens_per_step=times * run.workload.tokens_per_step)
    run.larger = runs.run(row, work=work)
    return run


def test_a_larger_batch_is_told_with_its_memory_and_speed():
    run = larger(goldens.model())
    told = applied.larger_batch(derive(run))
    assert "3_compile needs 21.0 of 80 GiB, 0_fp32 40.0. 4 of its batches in one need" in told
    assert "need 21.0 GiB: " in told and ", 1.03 x those of one." in told
    run.larger.environment.variables = {"PYTORCH_CUDA_ALLOC_CONF": "x:True"}
    assert "GiB with PYTORCH_CUDA_ALLOC_CONF=x:True: " in applied.larger_batch(derive(run))
    run.larger.rows[0].recompiled = 1
    assert "1.03? x" in applied.larger_batch(derive(run))
    run.larger.environment.gpu_uuid = "another"
    assert applied.larger_batch(derive(run)) == "", "its speed is that of another card"


def test_a_larger_batch_that_does_not_fit_or_is_of_other_changes_is_told_or_not():
    for fields in ({"environment": None}, {"workload": None}, {"rows": []}):
        odd = larger(goldens.model())
        odd.larger = replace(odd.larger, **fields)
        assert applied.larger_batch(derive(odd)) == "", fields
    less = larger(goldens.model(), times=1)
    assert applied.larger_batch(derive(less)) == "", "one batch is no larger one"
    assert "tried: ok" in applied.larger_batch(derive(larger(goldens.model(), peak_bytes=None)))
    failed = larger(goldens.model(), status="oom", reason="too little memory", step_ms=[])
    assert applied.larger_batch(derive(failed)).endswith("was tried: oom (too little memory).")
    for fields in ({"status": "skipped", "step_ms": []}, {"changes": ["AMP"]}):
        assert applied.larger_batch(derive(larger(goldens.model(), **fields))) == ""
    assert applied.larger_batch(derive(goldens.model())) == ""


@pytest.mark.parametrize(
    ("answer", "code", "left", "ran"),
    [
        ("3_compile\n", 0, {}, ["6_patched.json", "larger-batch.json"]),
        ("3_compile\n", 0, {"larger-batch": "oom", "6_patched": "ok"}, []),
        ("3_compile\n", 0, {"larger-batch": "interrupted", "6_patched": "ok"}, ["larger-batch.json"]),
        ("", 0, {"larger-batch": "ok", "6_patched": "ok"}, []),
        ("", 1, {"larger-batch": "ok", "6_patched": "ok"}, []),
    ],
)
def test_what_is_recommended_is_applied_once(answer, code, left, ran, tmp_path, monkeypatch):
    row = rows.Planned(rows.MODEL_SCRIPT, ["0_fp32", "net.py"], "0_fp32.json")
    patched = rows.Planned(rows.MODEL_SCRIPT, ["6_patched", "3_compile", "net.py"], "6_patched.json")
    plan = {"rows": [row._asdict(), patched._asdict()]}
    for name, status in left.items():
        write_json(tmp_path / f"{name}.json", runs.run(runs.row(name, status=status)))
    job = SimpleNamespace(rows=[row], plan={"kind": "ladder"}, facts={})
    stop = SimpleNamespace(requests=0)
    under_way = running.Running(tmp_path, job, stop)
    started = []
    monkeypatch.setattr(under_way, "run_row", lambda row, place: started.append(row.output))
    ended = SimpleNamespace(returncode=code, stdout=answer)
    monkeypatch.setattr(running.subprocess, "run", lambda *_, **__: ended)
    running.apply_recommended(under_way, job, plan)
    assert started == ran
    kept = {path.stem for path in tmp_path.glob("*.json")} - {"plan"}
    assert kept == (set() if answer == "" and code == 0 else {*left}), "an answer that failed removes nothing"


@pytest.mark.parametrize(
    ("own", "output", "expected"),
    [
        (None, "larger-batch.json", "expandable_segments:True"),
        ("backend:native", "larger-batch.json", "backend:native"),
        (None, "3_compile.json", None),
    ],
)
def test_the_memory_of_a_larger_batch_is_not_in_pieces_unless_a_user_says_how(
    own, output, expected, tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if own:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", own)
    job = SimpleNamespace(plan={"limit_s": 9}, facts={"device_type": "cuda"})
    under_way = running.Running(tmp_path, job, None)
    row, seen = rows.Planned(rows.MODEL_SCRIPT, ["x"], output), []
    monkeypatch.setattr(process, "run", lambda *words: seen.append(words[-1]))
    under_way.run_script(row, tmp_path / output, "x")
    assert seen[0].get("PYTORCH_CUDA_ALLOC_CONF") == expected


def test_batches_fit_by_the_peak_of_one_less_what_no_batch_changes(checked):
    args, gib = checked(MODEL + KINDS["a tuple"]), 2**30
    weights = sum(weight.numel() for weight in args.model().parameters())
    assert model_row.batches_that_fit(12 * weights + gib, 10 * gib, args) == 9, "0.92 of 10, and no more"
    assert model_row.batches_that_fit(2 * gib, 3 * gib, args) == 1
    assert model_row.batches_that_fit(12 * weights + 1, 10**15, args) == model_row.MOST_BATCHES
    args.file.optimizer = None
    more = 8 * weights + 1000
    assert model_row.batches_that_fit(12 * weights + 1000, 4 * weights + 3 * more, args) == 2, (
        "whose states nobody knows"
    )


def test_batches_are_joined_in_their_own_form(checked):
    tensor = torch.arange(4).reshape(2, 2)
    batch = {"x": tensor, "pair": (tensor, 7), "array": tensor.numpy()}
    joined = model_batch.joined([batch, batch])
    assert (
        type(joined["pair"]) is tuple
        and joined["x"].shape == (4, 2)
        and joined["array"].shape == (4, 2)
        and joined["pair"][1] == 7
    )
    point = namedtuple("Point", "x y")
    assert model_batch.joined([point(tensor, tensor)] * 3).y.shape == (6, 2)
    args = checked(MODEL + KINDS["a tuple"])
    before = args.planned
    args.join_batches(2)
    assert args.planned.tokens_per_step == 2 * before.tokens_per_step and len(args.drawn) == 3
    train_step, *_ = model_row.build([], {}, args)
    assert train_step(*args.batches()[0]).isfinite()


@pytest.mark.parametrize("loss", ["x.cumsum(0).square().mean()", "F.mse_loss(model(x), y, reduction='sum')"])
def test_batches_whose_first_dimension_is_not_examples_are_not_joined(loss, checked):
    own = f"def loss(model, batch):\n    x, y = batch\n    return model(x).mean() + {loss}\n"
    args = checked(MODEL + own + BATCHES + "torch.randn(4, 16), torch.ones(4, 16)\n")
    with pytest.raises(Skip, match="cannot be joined"):
        args.join_batches(2)
    for odd in ((torch.ones(4, 2), torch.ones(3)), (torch.ones(4, 2), torch.tensor(4))):
        args.drawn = [odd]
        with pytest.raises(Skip, match="cannot be joined: their tensors do not share a first dimension"):
            args.join_batches(2)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("x.requires_grad_(); return torch.autograd.grad(model(x).sum(), x)[0].square().mean()", ""),
        ("return model(x + torch.randn_like(x)).mean()", "draws random numbers"),
        ("return model(x).sum()", "the loss of two as one is not their mean"),
    ],
)
def test_why_batches_are_not_joined_is_said(loss, why, checked):
    args = checked(MODEL + KINDS["a tuple"])
    args.drawn, args.file.model = [torch.randn(4, 16)], lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    exec(f"def loss(model, x):\n    {loss}\n", vars(args.file))
    told = args.why_not_joined()
    assert why in told and bool(told) is bool(why)


TIME_FIRST = """
def model():
    return Net()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.attn = nn.Embedding(64, 16), nn.MultiheadAttention(16, 2)
        self.head = nn.Linear(16, 64)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)
    def forward(self, tokens):
        x = self.table(tokens)
        logits = self.head(x + self.attn(x, x, x)[0])
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 0).flatten())
def batches():
    while True:
        yield torch.randint(64, (8, 4))
"""


def test_batches_that_begin_with_time_are_not_joined(checked):
    """Initial weights give nearly the same loss whatever a model sees."""
    args = checked(MODEL.partition("def model")[0] + TIME_FIRST)
    with pytest.raises(Skip, match="cannot be joined"):
        args.join_batches(2)


def test_a_vocabulary_that_does_not_divide_is_a_comment_on_a_gpu(checked):
    args = checked(MODEL + KINDS["a tuple"])
    model = nn.ModuleDict({"wte": nn.Embedding(50257, 4), "other": nn.Linear(4, 999)})
    model["head"] = nn.Linear(4, 50257)
    (line,) = lines.padding_lines(model)
    assert line.startswith("# not measured: a vocabulary of 50257 ")
    assert line.endswith("pad model['head'] and the embedding to 50304")
    model.resize_token_embeddings = None
    assert lines.padding_lines(model)[0].endswith("model.resize_token_embeddings(pad_to_multiple_of=64)")
    assert lines.padding_lines(nn.Linear(4, 999)) == [], "no vocabulary"
    assert "50257" not in changed([AMP], args, model).text(), "a CPU has no tensor cores"


def test_what_has_no_place_in_a_file_is_no_patch(checked):
    args = checked(MODEL + KINDS["a dict"])
    text = args.path.read_text()
    for other in (
        text.replace("import torch\n", "import torch as t\n", 1),
        text.replace("def model", "def make"),
    ):
        assert patch.edit(other, [AMP, COMPILE], args.model(), args.blocks, args) == (other, [])
    with pytest.raises(Skip, match="none of the changes can be placed"):
        model_row.patch_file([AMP], args)


def test_a_patch_of_attention_alone_leaves_what_model_returns(checked):
    args = checked(MODEL + KINDS["a dict"])
    text = args.path.read_text()
    assert patch.edit(text, [AMP, SDPA], args.model(), args.blocks, args) == (text, [])


DROPOUT = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
def model():
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    return GPT2LMHeadModel(config)
def batches():
    for _ in range(2):
        tokens = torch.randint(64, (2, 16))
        yield {"input_ids": tokens, "labels": tokens}
"""


@pytest.mark.slow
def test_a_model_of_hugging_face_runs_from_the_file_to_the_patch(tmp_path, monkeypatch):
    """It has dropout. On a CPU nothing is recommended, so the report is told to."""
    pytest.importorskip("transformers")
    (tmp_path / "net.py").write_text(DROPOUT)
    (tmp_path / "sitecustomize.py").write_text(RECOMMENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--model", tmp_path / "net.py", "--only", "0,3", "--steps", "2", "--output", tmp_path / "run"]
    ran = run_python("-m", "ladder", *words, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, compiled, patched = load(tmp_path / "run").rows
    assert (first.step, compiled.step, patched.step) == ("0_fp32", "3_compile", "6_patched"), ran.stdout
    assert compiled.proof.repeated > 0.999, "without dropout, for this one step"
    assert {proof.verdict(row.proof) for row in (compiled, patched)} == {"agrees"}
    assert compiled.settings.compiled and patched.settings.compiled
    assert "for block in model.transformer.h:\n    block.compile()" in compiled.code
    assert patched.code.startswith("--- a/net.py\n+++ b/net.py\n")
    larger = load(tmp_path / "run").larger
    assert larger.rows[0].status == "ok" and larger.rows[0].settings.compiled, larger.rows[0].reason
    count, rest = divmod(larger.workload.tokens_per_step, 2 * 16)
    assert 2 <= count <= model_row.MOST_BATCHES and rest == 0 and larger.workload.steps == 2
