"""--sweep: shapes that break and stay cells, limits, what a page says of where a step pays."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs
from conftest import FAST, ROOT

from common import benchmark
from common.record import Row, write_run
from ladder import __main__ as ladder
from ladder import cells, largest_batch, predict, process, sweep
from ladder.__main__ import build_parser
from report import sweep as pages
from report import sweep_page
from report.charts import heat_map, heat_maps_png, ratio_color
from report.load import RecordError, read_plan

SCRIPT = f"""
import os, signal, sys, torch
sys.path.insert(0, {str(ROOT)!r})
from common.record import Row, Timing
print("process", os.getpid(), file=sys.stderr)
def main(args):
    if args.batch_size == 2: raise torch.OutOfMemoryError("CUDA out of memory")
    if args.batch_size == 3: os.kill(os.getpid(), signal.SIGKILL)
    ms = float(args.batch_size)
    row = Row(args.step, "", "ok", timing=Timing(1.0, [ms], ms, ms, ms), tokens_per_s=1.0, loss=[1.0])
    row.model_flops_per_s, row.peak_rss_bytes = 1.0, 1
    return row
"""
CELL = pages.Cell("3_c", 2, 2, 256, 512, 8192, 8, "ok", median_ms=10.0, predicted_ms=9.0, step_ms=[10.0, 10.1],
                  predicted_category_ms={"matrix products": 5.0, "copies and casts": 4.0}, captured=True)  # fmt: skip
PARTS = {"matrix products": 3.0, "copies and casts": 7.5}


def four(width, ms, **fields):
    """The cells of steps 3 and 4 at a width."""
    fp8 = replace(CELL, step="4_d", median_ms=ms, step_ms=[ms], predicted_ms=10.5, predicted_category_ms=PARTS)
    return [replace(CELL, n_embd=width), replace(fp8, n_embd=width, **fields)]


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A sweep of stand-in steps that writes below a folder of the test: what main needs, and the folder."""
    for name in ("0_a", "2_b"):
        (tmp_path / f"{name}.py").write_text(SCRIPT)
    shapes = [sweep.Shape(32, 2, 32, batch, 1, 256) for batch in (1, 2, 3, 5)]
    facts = {"device_type": "cpu", "device": "a processor", "free_bytes": 2**40, "pinned": []}
    one = predict.Prediction("0_a", {"matrix products": 1.0}, 5, 0.0)
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.setattr(sweep, "shapes_of", lambda _: shapes)
    monkeypatch.setattr(sweep, "measure_roofs", lambda *_: None)
    monkeypatch.setattr(predict, "read_roofs", lambda _: None)
    monkeypatch.setattr(predict, "predict", lambda *_: {"0_a": one})
    monkeypatch.setattr(process.Stop, "listen", lambda _: None)

    def start(*words, **changed):
        parser = build_parser()
        given, rest = parser.parse_known_args(["--sweep", *words])
        return sweep.main(given, ["--device", "cpu", *rest][2 * bool(given.resume) :], list(words), parser,
                          lambda *_: facts | changed)  # fmt: skip

    return SimpleNamespace(start=start, folder=tmp_path, facts=facts)


def test_shapes_that_break_are_cells_and_the_others_run(home, capfd, monkeypatch):
    assert home.start("--only", "0") == 0
    (folder,) = (home.folder / "results").iterdir()
    found = json.loads((folder / "sweep.json").read_text())
    assert [cell["status"] for cell in found] == ["ok", "oom", "oom", "ok"]
    assert "signal 9" in found[2]["reason"] and found[3]["median_ms"] == 5.0
    assert found[0]["predicted_ms"] == 1.0 and found[0]["step"] == "0_a" and found[0]["batch_size"] == 1
    processes = {line for line in (folder / "0_a.log").read_text().splitlines() if line.startswith("process ")}
    assert len(processes) == 2, "a new one after the one that was killed, and no other"
    assert "4 of 4 shapes, about" in capfd.readouterr().out and "<svg" in (folder / "sweep.html").read_text()
    with pytest.raises(RecordError, match="is a sweep, of many shapes"):
        read_plan(folder)
    record = folder / "c32-t32-b5" / "0_a.json"
    run = json.loads(record.read_text())
    assert run["workload"]["batch_size"] == 5 and "--quick" in run["command"]
    run["steps"][0]["status"] = "failed"
    record.write_text(json.dumps(run))
    again = []
    monkeypatch.setattr(sweep, "run_cells", lambda script, todo, *_: again.extend(cell["name"] for cell in todo))
    assert home.start("--resume", str(folder)) == 0 and again == ["c32-t32-b5"], "only what failed is tried again"


def test_what_is_slower_is_profiled_with_the_step_before_it(home, monkeypatch, capsys):
    ms, profiled = {"0_a": 5.0, "2_b": 8.0}, []

    def run_cells(script, todo, *_):
        for cell in todo:
            shown = runs.profile(ms[script.stem], gpu_idle_ms=1.0) if "--profile" in cell["words"] else None
            profiled.extend([(script.stem, cell["name"])] * bool(shown))
            Path(cell["output"]).parent.mkdir(exist_ok=True)
            row = runs.step(script.stem, ms[script.stem] if cell["name"] != "c32-t32-b5" else 4.0, profile=shown)
            write_run(Path(cell["output"]), runs.run(row))

    monkeypatch.setattr(sweep, "run_cells", run_cells)
    monkeypatch.setattr(
        predict, "predict", lambda *_: {name: predict.Prediction(name, {"attention": 1.0}, 5, 0.0) for name in ms}
    )
    with monkeypatch.context() as busy:
        busy.setattr(sweep.Sweep, "again_s", lambda self, cell: 1e6)
        assert home.start() == 0 and not profiled, "a pair that does not fit the time is not begun"
    (folder,) = (home.folder / "results").iterdir()
    assert (
        f"slower steps not profiled: 3; ./run_all.sh --sweep --resume results/{folder.name}" in capsys.readouterr().out
    )
    assert home.start("--resume", str(folder)) == 0
    found = pages.read_cells(folder / "sweep.json")
    slower = [cell for cell in found if cell.category_ms]
    assert {(cell.step, cell.batch_size) for cell in slower} == {(name, batch) for name in ms for batch in (1, 2, 3)}
    assert len(profiled) == len(slower) and slower[0].category_ms["gaps"] == 1.0
    assert [cell.again_ms for cell in slower] == [ms[cell.step] for cell in slower]
    assert (
        "0.62 times 0_a; timed +3 ms, again +3 ms, profiled +3 ms: matrix products +1.5 ms, attention +1.5 ms"
        in (folder / "sweep.md").read_text()
    )


def test_a_process_that_cannot_go_on_is_followed_by_a_new_one_and_one_that_does_nothing_by_none(tmp_path, monkeypatch):
    codes, started = [cells.RENEW, cells.RENEW, 0], []

    def run(command, *_, **__):
        todo = json.loads(Path(command[-2]).read_text())
        started.append([cell["name"] for cell in todo])
        if todo[0]["name"] != "b":  # which ends without a record
            Path(todo[0]["output"]).write_text("{}")
        return process.Ended(codes[len(started) - 1], 0.0)

    monkeypatch.setattr(process, "run", run)
    todo = [{"name": name, "words": [], "output": str(tmp_path / f"{name}.json"), "seconds": 0} for name in "abc"]
    sweep.run_cells(Path("0_x.py"), todo, tmp_path / "log", 60, process.Stop(), {})
    assert started == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert json.loads((tmp_path / "b.json").read_text())["steps"][0]["status"] == "failed"


def test_what_does_not_fit_or_has_no_time_is_a_cell_with_its_reason(home, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "run_cells", lambda *_: None)
    needed = [shape.peak_bytes("0_") for shape in sweep.shapes_of("cpu")]
    assert home.start("--sweep-minutes", "2", free_bytes=needed[2]) == 0
    (folder,) = (home.folder / "results").iterdir()
    found = {(cell.step, cell.batch_size): cell for cell in pages.read_cells(folder / "sweep.json")}
    assert found["0_a", 5].status == "oom" and "not tried" in found["0_a", 5].reason
    assert {cell.status for (_, batch), cell in found.items() if batch < 5} == {"not run"}
    assert "--sweep-minutes 2" in found["2_b", 3].reason and "--sweep --resume" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "changed", "said"),
    [
        (["--no-roofs"], {}, "leave out --no-roofs"),
        (["--no-profile"], {}, "leave out --no-profile"),
        (["--n-embd", "64"], {}, "leave out --n-embd"),
        (["--only", "7"], {}, "names a step that is not there: give some of 0,2"),
        (["--sweep-minutes", "1"], {"device_type": "cuda"}, "--sweep-minutes 1 is too short"),
        ([], {"free_bytes": 1000}, "no shape of the sweep fits the 0.0 GiB"),
        (["--resume", "absent"], {}, "holds no sweep"),
    ],
)
def test_bad_input_is_one_line(home, words, changed, said, refused):
    assert said in refused(home.start, *words, **changed)
    assert not (home.folder / "results").exists()


@pytest.fixture
def begun(home, monkeypatch):
    """The folder of a sweep in which no cell was run, and one record that failed."""
    monkeypatch.setattr(sweep, "run_cells", lambda *_: None)
    assert home.start("--only", "0") == 0
    (folder,) = (home.folder / "results").iterdir()
    (folder / "c32-t32-b1").mkdir()
    (folder / "c32-t32-b1" / "0_a.json").write_text('{"steps": [{"status": "failed", "reason": "why"}]}')
    return folder


@pytest.mark.parametrize("changed", [{"device": "another"}, {"device_type": "cuda"}])
def test_a_sweep_goes_on_only_on_its_own_device(home, begun, changed, refused):
    assert "was measured on a processor" in refused(home.start, "--resume", str(begun), **changed)
    assert (begun / "c32-t32-b1" / "0_a.json").exists()


def test_a_sweep_at_work_is_not_resumed_beside_itself(home, begun, refused):
    with process.lock(begun / sweep.PLAN, build_parser()):
        assert "another run_all.sh is at work" in refused(home.start, "--resume", str(begun))
    assert (begun / "c32-t32-b1" / "0_a.json").exists()


def test_every_cell_has_the_tokens_that_the_plan_pins(home, monkeypatch):
    todo = []
    monkeypatch.setattr(sweep, "run_cells", lambda script, cells, *_: todo.extend(cells))
    home.start(pinned=["--data-tokens", "99"])
    assert todo and all("--data-tokens 99" in " ".join(cell["words"]) for cell in todo)


@pytest.mark.parametrize(("words", "module"), [(["--sweep"], sweep), (["--batch-size", "max"], largest_batch)])
def test_a_text_is_found_from_any_folder_and_a_full_disk_is_one_line(words, module, monkeypatch, refused):
    asked = []

    def main(given, arguments, *_):
        asked.extend(arguments)
        full_disk()

    monkeypatch.setattr(module, "main", main)
    assert "No space left" in refused(ladder.main, [*words, "--data", "book.txt"], code=1)
    assert asked[-1] == os.path.abspath("book.txt")


def test_a_full_disk_ends_a_sweep_with_its_pages(home, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "run_cells", full_disk)
    assert home.start("--only", "0") == 1
    (folder,) = (home.folder / "results").iterdir()
    out = capsys.readouterr().out
    assert (folder / "sweep.json").exists() and "No space left" in out and "--resume" in out


def test_a_gpu_tries_what_only_the_estimate_of_a_plain_step_forbids(begun):
    plan = sweep.Plan(**json.loads((begun / sweep.PLAN).read_text()))
    on_gpu = sweep.Sweep(begun, replace(plan, device_type="cuda", free_bytes=1), 1, 0.0, process.Stop(), {})
    assert on_gpu.fits(plan.shapes[0], "2_b") and not on_gpu.fits(plan.shapes[0], "1_a")


def test_a_cell_that_was_not_tried_is_tried_again(begun):
    plan = sweep.Plan(**json.loads((begun / sweep.PLAN).read_text()))
    record = begun / "c32-t32-b1" / "0_a.json"
    for reason, tried in (("out of memory", False), ("needs about 9 GiB of 8 free: not tried", True)):
        record.write_text(json.dumps({"steps": [{"status": "oom", "reason": reason}]}))
        sweep.try_again(begun, plan)
        assert record.exists() != tried


@pytest.mark.parametrize("words", [["--sweep"], ["--batch-size", "max"]])
def test_without_msgspec_it_is_one_line_and_help_names_both(words):
    hide = "import runpy, sys; sys.modules['msgspec'] = None; sys.argv[:] = sys.argv[1:]; "
    command = [sys.executable, "-c", hide + "runpy.run_path(sys.argv[0], run_name='__main__')", "ladder/__main__.py"]
    ran = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "needs msgspec" in ran.stderr
    assert " ".join(words) in build_parser().format_help()


def test_roofs_that_lack_a_part_and_a_first_shape_that_takes_too_long_are_refused(home, monkeypatch, refused):
    def lacking(*_):
        raise ValueError("these roofs lack the grid")

    slow = {"0_a": predict.Prediction("0_a", {"matrix products": 1e8}, 5, 0.0)}
    for predicted, said in ((lambda *_: slow, "is too short"), (lacking, "these roofs lack the grid")):
        monkeypatch.setattr(predict, "predict", predicted)
        assert said in refused(home.start)


def test_plans_hold_the_shapes_that_are_promised():
    gpu, cpu = sweep.shapes_of("cuda"), sweep.shapes_of("cpu")
    assert len(cpu) >= 6 and len({shape.name for shape in gpu}) == len(gpu) >= 12
    tokens = {shape.batch_size * shape.seq_len for shape in gpu}
    assert {256, 8192} <= {shape.n_embd for shape in gpu} and {4096, 65536} <= tokens
    assert {512, 8192} <= {shape.seq_len for shape in gpu} and all(shape.n_embd % shape.n_head == 0 for shape in gpu)


def test_a_script_runs_quickly_at_two_shapes_in_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    script = ROOT / "2_sdpa.py"
    main = cells.load_script(script).main
    for batch in (1, 2):
        words, output = [*FAST, "--batch-size", str(batch), "--quick"], tmp_path / f"{batch}.json"
        row = cells.run_cell(main, script, {"words": words, "output": str(output)})
        run = json.loads(output.read_text())
        assert row["status"] == "ok" and run["workload"]["batch_size"] == batch and len(row["timing"]["step_ms"]) == 2
        assert row["heldout_loss"] is None and row["settings"]["unobserved"] == "--quick" and row["reference_ms"]
        assert run["command"].startswith("python 2_sdpa.py --device cpu") and cells.works()


def test_memory_beyond_what_the_first_cell_left_asks_for_a_new_process(tmp_path, monkeypatch):
    held, began = iter([200 << 20, 230 << 20, 280 << 20, 0]), []

    def run_cell(_, script, cell):
        began.append(cell["name"])
        return {"status": "oom", "reason": "none left"}

    listed = tmp_path / "todo.json"
    listed.write_text(json.dumps([{"name": name, "seconds": 0} for name in "abcd"]))
    monkeypatch.setattr(sys, "argv", ["", "0_x.py", str(listed), "60"])
    monkeypatch.setattr(cells, "load_script", lambda _: SimpleNamespace(main=None))
    monkeypatch.setattr(cells, "run_cell", run_cell)
    monkeypatch.setattr(cells.torch.cuda, "memory_allocated", lambda: next(held))
    assert cells.main() == cells.RENEW and began == ["a", "b", "c"]


def test_a_record_that_cannot_be_written_ends_the_process_and_the_log_says_why(tmp_path, monkeypatch, capfd):
    cell = {"words": [*FAST, "--quick"], "output": str(tmp_path / "1.json")}
    row = Row("2_sdpa", status="skipped", reason="not here")
    monkeypatch.setattr(benchmark, "write_run", full_disk)
    with pytest.raises(SystemExit) as ended:
        cells.run_cell(lambda _: row, ROOT / "2_sdpa.py", cell)
    assert ended.value.code == 1 and "failed: cannot write" in capfd.readouterr().err


def test_a_page_says_where_fp8_begins_to_pay_and_why_it_does_not():
    made = four(256, 12.0) + four(1024, 9.0) + four(2048, 20.0, status="skipped", reason="why", median_ms=None)
    shapes, pair = pages.by_shape(made), ("3_c", "4_d")
    assert pages.boundaries(shapes, *pair) == [
        "4,096 tokens a step, T 512: 4_d pays from 1024 channels (1.11) on, and not yet at 256 channels (0.83)"
    ]
    assert "pays at every width" in pages.boundaries(pages.by_shape(four(256, 9.0)), *pair)[0]
    assert "pays not even at 256 channels" in pages.boundaries(pages.by_shape(four(256, 12.0)), *pair)[0]
    (line,) = pages.explanations(shapes, [pair])
    assert "256 channels" in line and "predict 0.86 times as well: copies and casts +3.5 ms, matrix products -2" in line
    assert "at 1 of 2 shapes, slower at 1: from 0.83 times" in pages.describe_rung(shapes, *pair)
    text = sweep_page.render_markdown(made)
    assert "4_d: skipped: why" in text and "5 rows: the median error is" in text


@pytest.mark.parametrize(
    ("cell", "before", "said"),
    [
        (
            {"host_bound": True, "launches": 50, "captured": None},
            {"launches": 40},
            "launches 50 kernels, and not 40, longer",
        ),
        ({"predicted_ms": 4.5}, {}, "not explained: the roofs predict 2.00 times"),
        ({"predicted_ms": 20.0, "predicted_host_ms": 20.0, "launches": 7}, {}, "the host launches 7 kernels in 20 ms"),
        ({"predicted_ms": None}, {}, "nothing is predicted"),
    ],
)
def test_a_slower_cell_is_explained_by_what_was_measured_or_predicted(cell, before, said):
    slower = replace(CELL, median_ms=12.0, **({"step_ms": [12.0, 12.1]} | cell))
    assert said in pages.why_slower(slower, replace(CELL, **before))


@pytest.mark.parametrize(
    ("profiled", "said"),
    [
        ({"casts": 9.0, "products": 3.0}, "timed +2 ms, profiled +2 ms: casts +4 ms, products -2 ms"),
        ({"casts": 5.0, "products": 2.0}, "not explained: timed +2 ms, profiled -3 ms"),
    ],
)
def test_a_slower_cell_is_explained_by_its_profile_unless_the_profile_denies_it(profiled, said):
    before = replace(CELL, median_ms=10.0, category_ms={"casts": 5.0, "products": 5.0})
    slower = replace(before, median_ms=12.0, category_ms=profiled)
    assert said in pages.why_slower(slower, before)
    assert ("the host launches" in pages.why_slower(replace(slower, host_bound=True, captured=None), before)) == (
        "not" in said
    )


@pytest.mark.parametrize(
    ("again_ms", "said"),
    [
        (10.1, "trained again, it is 0.99 times: the step is not the cause"),
        (12.5, "not explained: timed +2 ms, again +2.5 ms, profiled +30 ms"),
        (30.0, "in the second training: timed +2 ms, again +20 ms, profiled +30 ms: casts +30 ms"),
    ],
)
def test_a_profile_is_of_the_second_training_and_what_that_does_not_show_is_no_loss(again_ms, said):
    before = replace(CELL, median_ms=10.0, again_ms=10.0, category_ms={"casts": 10.0})
    slower = replace(before, median_ms=12.0, again_ms=again_ms, category_ms={"casts": 40.0})
    assert pages.why_slower(slower, before) == said


def test_a_trend_is_one_at_every_shape_and_needs_three_lines():
    def said(*times, batches=(1, 2, 4)):
        """Of steps 3 and 4 at three widths, by step 4's times, at several batches."""
        made = [replace(cell, batch_size=batch) for batch in batches
                for width, ms in zip((256, 512, 1024), times, strict=True) for cell in four(width, ms)]  # fmt: skip
        return pages.describe_trends(pages.by_shape(made), "3_c", "4_d")

    assert said(9.0, 8.0, 7.0) == ["At each number of tokens and length it gains more, the wider the model is."]
    assert "the narrower" in said(7.0, 8.0, 9.0)[0]
    assert said(7.0, 9.0, 8.0) == said(9.0, 8.0, 7.0, batches=(1, 2)) == []


@pytest.mark.parametrize("ms", [9.99, 10.01])
def test_times_that_overlap_are_neither_a_gain_nor_a_loss(ms):
    spread = [9.0, 9.5, 10.0, 10.5, 11.0]
    before, step = four(256, ms)
    cells = [replace(before, step_ms=spread), replace(step, step_ms=spread)]
    shapes, pair = pages.by_shape(cells), ("3_c", "4_d")
    said = pages.describe_rung(shapes, *pair)
    assert said.startswith("4_d and 3_c have times at one shape alone: the ratio is 1.00 times")
    assert said.endswith(", with no difference shown.")
    shapes |= pages.by_shape([replace(cell, n_embd=512) for cell in cells])
    said = pages.describe_rung(shapes, *pair)
    assert "4_d is faster than 3_c at 0 of 2 shapes, with no difference shown at 2: " in said
    shapes = pages.by_shape(cells)
    assert "4_d pays not even at 256 channels (1.00)" in pages.boundaries(shapes, *pair)[0]
    assert pages.explanations(shapes, [pair]) == []
    assert sweep_page.time_rows(shapes, [pair])[0]["fastest"] == "3_c or 4_d"
    assert sweep_page.heat_maps(cells)[-1].cells[0, 0] == (0, "3 or 4")


def test_what_launches_cost_stands_beside_what_was_predicted_for_all():
    waited = {"host_bound": True, "captured": False, "launches": 100, "predicted_host_ms": 2.5}
    made = [replace(CELL, median_ms=ms, n_embd=width, **waited) for width, ms in ((256, 2.0), (512, 3.0))]
    replayed = replace(CELL, n_embd=64, **(waited | {"captured": True}))
    (said,) = sweep_page.launch_costs([*made, replayed])
    assert "2 cells waited for the host: 20 to 30 µs a launch. Predictions take 25 µs" in said
    assert sweep_page.launch_costs([replayed]) == []


def test_a_rung_without_a_time_says_why_and_heat_maps_draw_it():
    made = four(256, 9.0, status="skipped", reason="needs a GPU", median_ms=None)
    assert "4_d has no time beside 3_c at any shape: needs a GPU." in pages.describe_rung(
        pages.by_shape(made), "3_c", "4_d"
    )
    late = [replace(cell, n_embd=n_embd, status="not run", reason="late") for n_embd in (512, 1024) for cell in made]
    assert "needs a GPU" in pages.describe_rung(pages.by_shape([*made, *late]), "3_c", "4_d"), "it was tried once"
    maps = sweep_page.heat_maps(made)
    assert [one.title for one in maps] == ["4_d over 3_c", "the fastest step"]
    assert "skipped" in heat_map(maps[0]) and heat_maps_png(maps).startswith(b"\x89PNG")
    faster, slower = ratio_color(3.0), ratio_color(1 / 3)
    assert ratio_color(1.0) == (1, 1, 1) and faster[2] > faster[0] and slower[0] > slower[2]


def test_a_folder_without_a_sweep_is_one_line(tmp_path):
    command = [sys.executable, "-m", "report.sweep_page", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "sweep.json" in ran.stderr
