"""What the tests share: the step scripts as modules, their arguments, and a training step ready to run."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

# The compiler traces, but generates no kernels, which takes most of its time: here and in what tests start.
# The fixture `inductor` is for what needs them.
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TORCH_COMPILE_OVERRIDE_BACKENDS"] = ">=0:eager"
    # As run_all.sh sets it: without it a script starts itself again.
    os.environ["OMP_WAIT_POLICY"] = "passive"

import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import clock, data  # noqa: E402
from common.model import GPTConfig  # noqa: E402
from common.options import Arguments  # noqa: E402
from mine.program import Program  # noqa: E402

# A shell starts what runs in the background without these, and what tests start would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(1)  # tests run two at a time, and threads that wait for a busy core slow everything
STEPS = sorted(path.stem for path in ROOT.glob("[0-4]_*.py"))  # the lesson
# What trains on a CPU and does the same work: also a step that somebody added.
CPU_STEPS = sorted(path.stem for path in ROOT.glob("[0-9]*_*.py") if path.stem != STEPS[4])
SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, seq_len=32, vocab_size=256)
# The words of one small run. Tests that compile share this shape, and with it what the compiler keeps on
# disk.
FAST = ["--device", "cpu", "--n-layer", "2", "--n-head", "2", "--n-embd", "32"]
FAST += ["--seq-len", "32", "--steps", "4"]


def pytest_collection_modifyitems(items):
    """Slow tests first: each of two workers begins with a half, and short ones even out the end."""
    is_slow = [item.get_closest_marker("slow") is not None for item in items]
    slow, fast = (
        [item for item, own in zip(items, is_slow, strict=True) if own is kind] for kind in (True, False)
    )
    items[:] = [*slow[::2], *fast[::2], *slow[1::2], *fast[1::2]]


def program_of(model, optimizer=None, loss="model({batch})") -> Program:
    """The program of a model without a file."""
    args = SimpleNamespace(path=Path("net.py"), module_name="net", file=None, loss_text=loss, is_masked=True)
    args.attention = None
    program = Program(model, args)
    program.scope["optimizer"] = optimizer
    return program


def load_script(path: Path) -> ModuleType:
    """A script as a module: its file name is not an identifier."""
    spec = importlib.util.spec_from_file_location(f"step_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def load_step(name: str) -> ModuleType:
    return load_script(ROOT / f"{name}.py")


def arguments(step: str, config=SMALL, device="cpu", amp_dtype=torch.float32, **overrides) -> Arguments:
    fields = {
        "name": step,
        "source": (ROOT / f"{step}.py").read_text(),
        "output": ROOT / "tests" / "no such folder" / "record.json",
        "preset": "tiny",
        "config": config,
        "batch_size": 2,
        "text": data.standard_library_text(),
        "seed": 1337,
        "lr": 4e-3,
        "device": torch.device(device),
        "amp_dtype": amp_dtype,
        "warmup": 2,
        "steps": 6,
    }
    return Arguments(**(fields | overrides))


def built(step: str, module: ModuleType | None = None, **overrides) -> SimpleNamespace:
    """What a script's `main` returns, or that of a variant of it, by name, with its arguments and staged
    batches."""
    module, args = module or load_step(step), arguments(step, **overrides)
    train_step, model, optimizer, *capture = module.main(args)
    parts = {
        "train_step": train_step,
        "model": model,
        "optimizer": optimizer,
        "capture": capture[0] if capture else None,
    }
    return SimpleNamespace(module=module, args=args, batches=args.batches(), **parts)


@pytest.fixture
def inductor(monkeypatch):
    """torch.compile generates kernels, here and in what a test starts."""
    monkeypatch.delenv("TORCH_COMPILE_OVERRIDE_BACKENDS", raising=False)
    own = {} if HAS_GPU else {"debug_backend_override": ""}
    with torch._dynamo.config.patch(**own):
        yield


@pytest.fixture(autouse=True)
def leave_nothing(monkeypatch):
    monkeypatch.setattr(clock, "REFERENCE_S", 0.005)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.compiler.reset()


@pytest.fixture
def refused(capsys):
    """What a call prints that ends with exit code 2 and one line: refused(main, words)."""

    def call(work, *words):
        with pytest.raises(SystemExit) as ended:
            work(*words)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.count("\n") == 1, said
        return said

    return call


@pytest.fixture
def text_file(tmp_path):
    """A file of 4000 printable bytes."""
    path = tmp_path / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(32, 127, 4000, dtype=np.uint8).tobytes())
    return path


def run_python(*words, **options) -> subprocess.CompletedProcess:
    """A command of this Python in the project, with its output as text."""
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, **options
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that has ended, and whose parent has not looked, does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
