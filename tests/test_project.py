"""README, docs, Dockerfile and the names used of Transformer Engine: promises that text makes."""

import itertools
import json
import re

import pytest
from conftest import ROOT, STEPS
from te_signatures import SCRIPTS, te_calls

from anatomy.__main__ import experiments
from report import documents, glossary, page, predictions, table, tree
from report.load import read_run

README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "docs" / "results"


def test_readme_is_short_and_generated_tables_are_fresh(tmp_path):
    assert len(README.splitlines()) <= 150
    for document, text in documents.documents(ROOT, RESULTS).items():
        assert document.read_text() == text, f"stale: python -m report.documents ({document.name})"
    stale = tmp_path / "README.md"
    stale.write_text(README.replace("| 0_baseline ", "| 0_changed ", 1))
    assert documents.between_markers(stale, documents.readme_table(RESULTS)) != stale.read_text()


@pytest.mark.parametrize("record", sorted(RESULTS.glob("*/*/results.json")), ids=lambda path: path.parent.name)
def test_recorded_reports_say_what_the_records_hold(record):
    markdown, html = ((record.parent / f"report.{kind}").read_text() for kind in ("md", "html"))
    run = predictions.add_later(read_run(record), record.parent)
    assert table.render_markdown(run) == markdown, "stale: python -m report.documents"
    assert glossary.with_terms(page.render(run)) == html


def test_readme_shows_every_diff_and_every_room():
    for before, after in itertools.pairwise(STEPS):
        assert f"diff {before}.py {after}.py" in README
    files = [path.name for pattern in ("*.sh", "Dockerfile", "[0-9]_*.py") for path in ROOT.glob(pattern)]
    rooms = [f"{path.parent.name}/" for path in ROOT.glob("*/*.py") if not path.parent.name.startswith((".", "exp"))]
    assert all(name in README for name in [*files, *rooms])
    assert "file without a docstring" not in tree.tree(ROOT) and "| `parallel.py`" in tree.tree(ROOT)


@pytest.mark.parametrize("document", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_experiment_is_on_its_page():
    anatomy = (ROOT / "docs" / "anatomy.md").read_text()
    for name in experiments():
        recorded = (RESULTS / "h200" / "anatomy" / f"{name}.md").exists()
        assert f"**`{name}`:" in anatomy and (f"h200/anatomy/{name}.md" in anatomy) == recorded


def test_requirements_are_pinned_and_the_container_gets_the_same_releases():
    for path in (ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt"):
        for line in path.read_text().splitlines():
            assert re.match(r"[a-z0-9-]+==[\d.]+(;|$)", line), line
    dockerfile = (ROOT / "Dockerfile").read_text()
    for package in re.findall(r"(?:tabulate|msgspec|nvidia-ml-py|jinja2|matplotlib)==[\d.]+", dockerfile):
        assert package in (ROOT / "requirements.txt").read_text()


@pytest.mark.parametrize("version", ["2.9.0", "2.20.2"])
@pytest.mark.parametrize(("script", "fewest"), [*zip(SCRIPTS, (6, 3), strict=True)])
def test_transformer_engine_has_what_the_scripts_call(script, fewest, version):
    signatures = json.loads((ROOT / "tests" / "data" / f"te-{version}.json").read_text())
    for name, call in te_calls(script):
        signature = signatures[name]
        assert len(call.args) <= len(signature["parameters"]), name
        accepted = {*signature["parameters"], *signature["keyword_only"]}
        assert {keyword.arg for keyword in call.keywords} <= accepted, name
    assert len({name for name, _ in te_calls(script)}) >= fewest
