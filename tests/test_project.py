"""README, docs, Dockerfile and the names used of Transformer Engine: promises that text makes."""

import itertools
import json
import re

import pytest
from conftest import ROOT, STEPS
from te_signatures import SCRIPTS, te_calls

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_shows_every_diff_and_every_page():
    readme = (ROOT / "README.md").read_text()
    assert all(f"diff {before}.py {after}.py" in readme for before, after in itertools.pairwise(STEPS))
    assert all(f"docs/{path.name}" in readme for path in DOCUMENTS[1:])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", document.read_text()):
        path = document.parent / target if target else document
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in slugs, (target, anchor)


def test_requirements_are_pinned_and_the_container_gets_the_same_releases():
    both = (ROOT / "requirements.txt").read_text() + (ROOT / "tests" / "requirements.txt").read_text()
    assert not [line for line in both.splitlines() if not re.match(r"[a-z0-9-]+==[\d.]+(;|$)", line)]
    pins = re.findall(r"(?:tabulate|msgspec|nvidia-ml-py|jinja2|matplotlib)==[\d.]+", (ROOT / "Dockerfile").read_text())
    assert pins and all(pin in (ROOT / "requirements.txt").read_text() for pin in pins)


@pytest.mark.parametrize("version", ["2.9.0", "2.20.2"])
@pytest.mark.parametrize(("script", "fewest"), [*zip(SCRIPTS, (4, 1, 2), strict=True)])
def test_transformer_engine_has_what_the_scripts_call(script, fewest, version):
    signatures = json.loads((ROOT / "tests" / "data" / f"te-{version}.json").read_text())
    calls = te_calls((ROOT / script).read_text())
    for name, call in calls:
        signature = signatures[name]
        assert len(call.args) <= len(signature["parameters"]), name
        accepted = {*signature["parameters"], *signature["keyword_only"]}
        assert {keyword.arg for keyword in call.keywords} <= accepted, name
    assert len({name for name, _ in calls}) >= fewest
