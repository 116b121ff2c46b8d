"""The lines that a run recommends are a program: what they train is what the row trained."""

import json
import subprocess

import pytest
import torch
from conftest import ROOT, run_python
from torch import nn

from common.record import AS_IT_IS, Row
from common.text import Skip
from ladder.rows import AMP, COMPILE, FP8, GRAPH
from mine import batch as model_batch
from mine import file as model_file
from mine import lines, patch
from mine import row as model_row
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
import sys
if "--recommended" in sys.orig_argv:
    print("3_compile")
    raise SystemExit(0)
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
        args.planned = model_file.check(args)
        args.amp_dtype = torch.bfloat16
        return args

    return check


def split(program):
    """The lines of once, and those of each step."""
    once, _, each = program.rpartition("# in each training step")
    return once, each


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
    model = args.model()
    program = lines.program([AMP, COMPILE, GRAPH, FP8], model, args.blocks, args)
    assert "for block in model.blocks:\n    block.compile()\n" in program
    assert "net.loss = torch.compile(net.loss)" in program and "capturable=True" in program
    assert 'with torch.autocast("cpu", torch.bfloat16):' in program
    assert not any(name in program for name in ("mine", "ladder", "common.", "changes."))
    compile(program, "program", "exec")
    whole = lines.program([COMPILE], model, [], args)
    assert "model.compile()" in whole and "torch.compiler.disable" not in whole


def test_what_the_file_does_itself_is_no_line(checked):
    text = MODEL + KINDS["a loss of its own"].replace(
        "return F", "with torch.autocast('cpu', torch.bfloat16):\n        return F"
    )
    args = checked(text)
    assert args.given == [AMP] and args.first == AS_IT_IS
    assert "autocast" not in lines.program([COMPILE], args.model(), args.blocks, args)


def test_parts_of_pytorch_s_own_classes_compile_by_their_forward():
    model = nn.Module()
    model.layers = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Sequential(nn.Linear(2, 2))})
    texts = lines.compile_lines(model, ["layers"])
    assert texts[:2] == [
        "for block in model.layers.values():",
        "    block.forward = torch.compile(block.forward)",
    ]
    assert model_batch.call_text({"a": 1}) == "model(**batch)" and json.dumps(Row("x").code) == "null"
    assert (ROOT / "mine" / "lines.py").read_text().count("import torch\n") == 0


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
    args.code, row = None, {"changes": ["AMP", "compile"]}
    rest = model_row.patch_file(row, args)
    added, placed = PATCHES[kind]
    assert rest == [name for name in (AMP, COMPILE) if name not in placed]
    assert set(added) <= set(args.code.splitlines()) and "+    for block in" in args.code
    train_step, *_ = model_row.build(rest, {}, args)
    assert [train_step(*batch).item() for batch in args.batches()[:3]] == expected
    (tmp_path / "net.patch").write_text(args.code)
    for command in (["git", "apply", "--check", "net.patch"], ["git", "apply", "net.patch"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    patched, _ = patch.patched(MODEL + KINDS[kind], [AMP, COMPILE], args.model(), args.blocks, args)
    assert (tmp_path / "net.py").read_text() == patched


def test_what_has_no_place_in_a_file_is_no_patch(checked):
    args = checked(MODEL + KINDS["a dict"])
    text = args.path.read_text()
    for other in (
        text.replace("import torch\n", "import torch as t\n", 1),
        text.replace("def model", "def make"),
    ):
        assert patch.patched(other, [AMP, COMPILE], args.model(), args.blocks, args) == (other, [])
    with pytest.raises(Skip, match="none of the changes can be placed"):
        model_row.patch_file({"changes": ["AMP"]}, args)


@pytest.mark.slow
def test_a_run_that_recommends_changes_runs_its_patched_file(tmp_path, monkeypatch):
    """On a CPU nothing is recommended, so the report is told to."""
    (tmp_path / "net.py").write_text(MODEL + KINDS["a loss of its own"])
    (tmp_path / "sitecustomize.py").write_text(RECOMMENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["--model", tmp_path / "net.py", "--only", "0,3", "--steps", "2", "--output", tmp_path / "run"]
    ran = run_python("-m", "ladder", *words, timeout=300)
    assert (
        "6_patched: " in ran.stdout and "ms a step" in ran.stdout.partition("6_patched: ")[2].splitlines()[0]
    )
    row = load(tmp_path / "run").rows[-1]
    assert row.step == "6_patched" and row.code.startswith("--- a/net.py") and row.proof.cosine > 0.999
