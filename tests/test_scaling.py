"""Several GPUs: the places of a run and which rows they need, its figures from its records, and several machines."""

import json
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import runs
from conftest import FAST, ROOT
from test_documents import tables_of
from test_ladder import FACTS, OK, project  # noqa: F401  project is a fixture

from common import arguments as command_line
from common import flops
from common import record as r
from common.model import GPTConfig
from ladder import scaling as places
from report import documents, scaling, symptom_examples, table
from report.records import Records

MEET = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from common import benchmark, errors, parallel
def main(args):
    raise errors.Skip(f"mean rank {{parallel.mean([args.world.rank], args)}}")
benchmark.launch(main)
"""
AGENTS = """
import json, os, sys
from torch.distributed.run import main  # torchrun: imported once, then a process for each agent
agents = []
for words in json.loads(sys.argv[1]):
    if (agent := os.fork()) == 0:
        main(words)
        os._exit(0)
    agents.append(agent)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]) for agent in agents))
"""
CATEGORIES = ("matrix products", "optimizer", "communication")


def profiled(ms, times, captured=True, communication_ms=None, status="ok", mhz=1500.0, gpus=1, **fields):
    """A row of 3_x that takes `ms`, of which `times` by category; the rest are gaps."""
    gaps = ms - sum(times)
    shown = runs.profile(ms, CATEGORIES, CATEGORIES, times, gpu_idle_ms=gaps, communication_ms=communication_ms)
    row = runs.step("3_x", ms, status, profile=shown, clock_mhz=mhz, settings=r.Settings(captured=captured), **fields)
    row.tokens_per_s = gpus * 2048 / ms * 1e3
    return row


def placed(folder, **rows):
    """A run with --scaling whose places hold one row each: placed(folder, **{"1": row, "2-ddp": row})."""
    for place, row in rows.items():
        gpus, _, how = place.partition("-")
        work = replace(runs.WORKLOAD, gpus=int(gpus), parallel=how if how in places.PARALLEL else None)
        runs.write(runs.run(row, workload=work, link="NVLink" if work.gpus > 1 else None), folder / place)
    return scaling.load_places(folder)


def test_efficiency_and_where_the_rest_goes(tmp_path):
    two = profiled(125.0, (90.0, 10.0, 10.0), communication_ms=30.0, mhz=1400.0, gpus=2)
    sharded = profiled(200.0, (80.0, 5.0, 50.0), captured=False, communication_ms=60.0, gpus=2)
    launched = profiled(160.0, (80.0, 10.0, 0.0), captured=False)
    rows = {"1": profiled(100.0, (80.0, 10.0, 0.0)), "1-launched": launched, "2-ddp": two, "2-fsdp": sharded}
    alone, alone_launched, ddp, fsdp = scaling.scaled_rows(made := placed(tmp_path, **rows))
    assert (alone.efficiency, alone_launched.efficiency, ddp.alike, fsdp.alike) == (1.0, 1.0, True, True)
    assert ddp.efficiency == pytest.approx(0.8) and fsdp.efficiency == pytest.approx(0.8), "launched against launched"
    assert (ddp.exposed_communication_ms, ddp.overlapped_communication_ms, ddp.link) == (10.0, 20.0, "NVLink")
    lost = {name: share for name, share in ddp.lost.items() if abs(share) > 1e-9}
    assert lost == pytest.approx({"matrix products": 10 / 125, "communication": 10 / 125, "gaps": 5 / 125})
    assert fsdp.lost["optimizer"] == pytest.approx(-5 / 200) and sum(fsdp.lost.values()) == pytest.approx(0.2)
    said = scaling.sentence(ddp)
    assert (
        "efficiency is 80.0 %. More of the step than on one GPU goes to" in said and "1400 MHz, on one GPU 1500" in said
    )
    assert "exposed communication (8.0 %)" in said and "gaps" not in said
    assert "The optimizer takes 2.5 % less" in scaling.sentence(fsdp) and "optimizer" not in said
    main, losses = tables_of(scaling.render_markdown(made))
    assert main["3_x"]["efficiency"] == "80.0 %" and losses["3_x"]["missing"] == "20.0 %"
    assert scaling.render_text(made).count("80.0 %") >= 4 and scaling.write(tmp_path, made) == []
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_that_no_row_alone_is_like_is_marked_and_one_without_a_time_keeps_its_reason(tmp_path):
    two = profiled(125.0, (90.0, 10.0, 10.0), captured=False, gpus=2)
    failed = runs.step("3_x", status="oom", reason="out of memory")
    made = placed(tmp_path, **{"1": profiled(100.0, (80.0, 10.0, 0.0)), "2-ddp": two, "4-ddp": failed})
    text, (_, ddp, four) = scaling.render_text(made), scaling.scaled_rows(made)
    assert not ddp.alike and "80.0 %*" in text and scaling.UNLIKE_LEGEND in text
    assert four.efficiency is None and "3_x, 4 by ddp: oom: out of memory" in text
    far = runs.profile(400.0)  # far off the timed step
    made = placed(tmp_path / "far", **{"1": runs.step("3_x"), "2-ddp": runs.step("3_x", profile=far)})
    assert scaling.scaled_rows(made)[1].lost is None and "No profile that fits" in scaling.render_text(made)


def test_half_of_the_batch_has_half_of_the_time_for_its_own(tmp_path):
    half = profiled(60.0, (45.0, 5.0, 5.0), gpus=1)  # 2048 tokens by two GPUs
    made = placed(tmp_path, **{"1": profiled(100.0, (80.0, 10.0, 0.0)), "2-ddp": half})
    made["2-ddp"].workload.tokens_per_step = 1024
    _, two = scaling.scaled_rows(made)
    assert two.efficiency == pytest.approx(50 / 60) and two.lost["matrix products"] == pytest.approx(5 / 60)
    assert sum(two.lost.values()) == pytest.approx(1 - two.efficiency)


def test_the_page_shows_what_is_recorded_and_says_where_there_is_nothing(tmp_path):
    assert documents.scaling_tables(tmp_path) == scaling.NOT_RECORDED
    rows = {"1": profiled(100.0, (80.0, 10.0, 0.0)), "2-ddp": profiled(125.0, (90.0, 10.0, 10.0), gpus=2)}
    folder = tmp_path / "machine" / "slice-scaling"
    scaling.write(folder, placed(folder, **rows))
    text = documents.scaling_tables(tmp_path)
    assert "## machine/slice-scaling" in text and "(results/machine/slice-scaling/scaling.png)" in text
    summary, *tables = tables_of(text)
    summary = summary["machine/slice-scaling"]
    assert (summary["step"], summary["DDP, ms"], summary["FSDP2, ms"]) == ("3_x", "125.0 (80.0 %)", "-")
    assert [table["3_x"].get("efficiency") for table in tables] == ["80.0 %", None]


def test_kernels_that_several_gpus_add_are_named_and_no_picture_is_drawn_without_an_efficiency(tmp_path):
    alone, two = profiled(100.0, (80.0, 10.0, 0.0)), profiled(125.0, (90.0, 10.0, 10.0), gpus=2)
    copies = [("chunk_cat_kernel", 2.0, 7), ("triton_poi_fused_add_0", 3.0, 5), ("bfloat16_copy", 0.1, 1)]
    two.profile.kernels += [r.Kernel(name, "copies and casts", ms, launches) for name, ms, launches in copies]
    _, ddp = scaling.scaled_rows(placed(tmp_path, **{"1": alone, "2-ddp": two}))
    assert "take longer: collecting the gradients to exchange, 2.0 ms. The clock" in scaling.sentence(ddp)
    made = placed(tmp_path / "large", **{"1": runs.step("3_x", status="oom", reason="out of memory"), "2-fsdp": two})
    assert scaling.write(tmp_path / "large", made) == [] and not (tmp_path / "large" / "scaling.png").exists()
    assert "scaling.png" not in scaling.render_markdown(made)


def test_the_page_names_the_memory_that_the_formulas_give():
    config = GPTConfig(n_layer=40, n_head=40, n_embd=5120, seq_len=2048, vocab_size=50304)
    parameters, text = flops.parameters(config), (ROOT / "docs" / "scaling.md").read_text()
    gib = [bytes_each * parameters / 2**30 for bytes_each in (16, 8, 2, 4)]
    for checkpoint in (True, False):
        whole = flops.unfused_peak_bytes(config, 8, checkpoint=checkpoint, scores=False)
        gib.append((whole - 12 * parameters) / 2**30)
    assert f"{parameters / 1e9:.2f} billion" in text and all(f"{one:.1f} GiB" in text for one in gib)


def test_places_are_powers_of_two_and_fsdp_runs_for_its_steps_or_those_asked_for():
    plan = r.Plan("", ["--steps", "2"], ["2_x", "3_x", "4_x"], ["4_x"])
    planned = places.divide(plan, FACTS | {"gpus": 6}, None, None, places.SHARDED, lambda *_: FACTS)
    assert list(planned) == ["1", "2-ddp", "2-fsdp", "4-ddp", "4-fsdp", "6-ddp", "6-fsdp", "1-launched"]
    assert planned["1"][0].rows == ["2_x", "3_x"] and planned["4-fsdp"][0].rows == ["3_x"]
    assert planned["4-fsdp"][0].arguments[-1] == "fsdp" and planned["1-launched"][0].arguments[-1] == "--no-capture"
    planned = places.divide(plan, FACTS | {"gpus": 0}, None, "fsdp", None, lambda *_: FACTS)
    assert list(planned) == ["1", "2-fsdp", "1-launched"] and planned["2-fsdp"][0].rows == ["2_x", "3_x"]
    with pytest.raises(ValueError, match="needs two GPUs"):
        places.divide(plan, FACTS | {"gpus": 1}, None, None, None, lambda *_: FACTS)


def test_a_captured_row_runs_launched_too_only_where_several_gpus_launched_it(tmp_path):
    launched, row = tmp_path / "1-launched", "3_x.json"
    for captured, needed in (({"1": True, "2-ddp": True}, False), ({"2-fsdp": False}, True), ({"1": False}, False)):
        for place, value in captured.items():
            runs.write_rows(tmp_path / place, runs.step("3_x", settings=r.Settings(captured=value)))
        assert places.is_needed(launched / row, launched) == needed, captured
    assert places.is_needed(tmp_path / "1" / row, tmp_path / "1")


def test_a_step_is_measured_in_all_places_before_the_next_and_a_row_that_fails_is_one_line(project):  # noqa: F811
    fails_alone = "import os, sys\nif 'RANK' not in os.environ:\n    sys.exit(3)\n"
    made = project({"0_x": "ok", "3_x": "ok"})
    (made.folder / "0_x.py").write_text(fails_alone + OK)
    ran = made.run("--scaling", "--only", "0,3", "--parallel", "ddp", roofs=(), gpus=2)
    (folder,) = made.folders()
    order = [line for line in ran.stdout.splitlines() if line.rpartition(" in ")[2] in ("1", "2-ddp")]
    assert ran.returncode == 1 and order == [f"{k}_x in {place}" for k in "03" for place in ("1", "2-ddp")], ran.stderr
    assert "0_x, alone: failed: ended with exit code 3" in ran.stdout
    assert [row["status"] for row in json.loads((folder / "scaling.json").read_text())] == ["failed", "ok", "ok", "ok"]
    assert (made.results / "latest").resolve() == folder.resolve()
    (made.folder / "0_x.py").write_text(OK)
    again = made.run("--resume", str(folder), roofs=())
    assert again.returncode == 0 and again.stdout.count("said by") == 1, again.stdout + again.stderr
    assert made.run("--scaling", "--peers").returncode == made.run("--scaling", gpus=1, roofs=()).returncode == 2


def test_a_run_on_a_cpu_writes_the_figures_of_its_records(project):  # noqa: F811
    made = project({})
    made.folder.joinpath("2_sdpa.py").write_text((ROOT / "2_sdpa.py").read_text())
    words = ["--scaling", "--only", "2", "--parallel", "ddp", "--no-profile", "--global-batch-size", "2"]
    ran = made.run(command=[sys.executable, "ladder/__main__.py", *words, *FAST])
    (folder,) = made.folders()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("ms/step (p25") == 2, "of two processes the first one alone prints"
    alone, two = json.loads((folder / "scaling.json").read_text())
    records = [json.loads((folder / place / "2_sdpa.json").read_text()) for place in ("1", "2-ddp")]
    for row, record in zip((alone, two), records, strict=True):
        (recorded,), work = record["steps"], record["workload"]
        assert (row["gpus"], row["parallel"], row["captured"]) == (work["gpus"], work["parallel"], False)
        assert row["median_ms"] == recorded["timing"]["median_ms"] and work["batch_size"] == 2 // work["gpus"]
        tokens_per_s = work["gpus"] * work["tokens_per_step"] / row["median_ms"] * 1e3
        assert recorded["tokens_per_s"] == pytest.approx(tokens_per_s)
        assert row["tokens_per_s_per_gpu"] == recorded["tokens_per_s"] / row["gpus"]
        assert row["peak_allocated_bytes"] is None and row["status"] == "ok"
    assert alone["efficiency"] == 1 and two["alike"]
    assert two["efficiency"] == pytest.approx(alone["median_ms"] / two["median_ms"] / 2), "half of the batch each"
    assert table.ON_A_CPU in ran.stdout and all((folder / f"scaling.{kind}").exists() for kind in ("md", "png"))


def test_two_agents_of_torchrun_are_two_nodes(tmp_path):
    (tmp_path / "meet.py").write_text(MEET)
    agents, records = [], {how: tmp_path / f"{how}.json" for how in ("static", "c10d")}
    for how, path in records.items():
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        words = [str(tmp_path / "meet.py"), *FAST, "--preset", "tiny", "--batch-size", "1", "--output", str(path)]
        for node in "01":
            meet = ["--node-rank", node, "--master-addr", "localhost", "--master-port", port]
            if how == "c10d":
                meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost"]
            agents.append(["--nnodes", "2", "--nproc-per-node", "1", *meet, *words])
    ran = subprocess.run(
        [sys.executable, "-c", AGENTS, json.dumps(agents)], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for path in records.values():
        record = json.loads(path.read_text())
        assert (record["environment"]["nodes"], record["workload"]["gpus"]) == (2, 2)
        assert record["steps"][0]["reason"] == "mean rank [0.5]"


def test_of_several_processes_the_first_one_says_what_is_wrong(monkeypatch, refused):
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        refused(command_line.parse_args, ROOT / "x.py", None, ["--steps", "no"])
    assert waited == [command_line.FIRST_SAYS_S]


def test_an_example_names_its_recording_and_keeps_the_marks_of_its_efficiency(tmp_path):
    alone, two = profiled(100.0, (80.0, 10.0, 0.0)), profiled(125.0, (90.0, 10.0, 10.0), gpus=2)
    launched = profiled(160.0, (90.0, 10.0, 10.0), captured=False, gpus=2)
    launched.timing.step_ms = [160.0] * 10 + [200.0] * 10
    for name, row in (("first", two), ("second", launched)):
        placed(tmp_path / name, **{"1": alone, "2-ddp": row})
        (tmp_path / name / scaling.ROWS).write_text("[]")
    figure, _ = symptom_examples.parallel("ddp")(Records.read(tmp_path))
    assert figure == "efficiency by DDP: first: 3_x on 2 GPUs 80.0 %; second: 3_x on 2 GPUs 62.5 %?*"
    with pytest.raises(KeyError):
        symptom_examples.parallel("fsdp")(Records.read(tmp_path))
