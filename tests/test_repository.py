"""What a public repository is expected to have: citation, forms, a workflow, and a security page that is true."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from joma.verdicts import KINDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "joma"
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/*.md")])
LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s#]+)[^)]*\)")

# Of the schema of the Citation File Format, version 1.2.0: the keys that we use, of a file and of a reference.
CITATION_KEYS = {"abstract", "authors", "cff-version", "keywords", "license", "message", "references", "title", "type"}
REFERENCE_KEYS = {"type", "title", "authors", "year", "conference", "status", "doi", "identifiers"}
DOI = re.compile(r"10\.\d{4,9}(\.\d+)?/[A-Za-z0-9:/_;\-.()\[\]\\]+")

PICKLES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
LOADERS = {"torch.load", "torch.save", "torch.jit.load", "np.load", "numpy.load", "eval", "exec", "os.system"}
MUST_BE = {"trust_remote_code": False, "allow_pickle": False, "weights_only": True, "shell": False}


def read_yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def pythons() -> list[str]:
    """Return the versions of Python that the package says it supports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [mark.rpartition(" ")[2] for mark in project["classifiers"] if ":: Python :: 3." in mark]


def unsafe(source: str) -> list[str]:
    """Return what a module imports, calls or passes that could run code from a file."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            problems += [alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom):
            problems += [node.module] if (node.module or "").partition(".")[0] in PICKLES else []
        elif isinstance(node, ast.Call):
            problems += [ast.unparse(node.func)] if ast.unparse(node.func) in LOADERS else []
            problems += [word.arg for word in node.keywords if word.arg and not is_safe(word.arg, word.value)]
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            problems += [key for key, value in zip(keys, node.values, strict=True) if not is_safe(key, value)]
    return problems


def is_safe(name: object, value: ast.expr) -> bool:
    return name not in MUST_BE or (isinstance(value, ast.Constant) and value.value is MUST_BE[name])


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        ("import pickle", ["pickle"]),
        ("from joblib.hashing import hash", ["joblib.hashing"]),
        ("torch.load(file)", ["torch.load"]),
        ("exec(text)", ["exec"]),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", ["trust_remote_code"]),
        ("options = {'trust_remote_code': trusted}", ["trust_remote_code"]),
        ("subprocess.run(line, shell=True)", ["shell"]),
        ("import pickletools\nmodel.eval()\nf(trust_remote_code=False)", []),
    ],
)
def test_what_could_run_code_from_a_file_is_seen(source, problems):
    assert unsafe(source) == problems


def test_no_module_unpickles_or_runs_code_from_a_file():
    files = sorted(SOURCE.rglob("*.py"))
    assert not {str(path.relative_to(SOURCE)): bad for path in files if (bad := unsafe(path.read_text("utf-8")))}


def test_no_page_has_a_script():
    templates = sorted(SOURCE.rglob("*.html"))
    assert templates
    assert not [path.name for path in templates if re.search(r"<script|\son\w+=|javascript:", path.read_text("utf-8"))]


def test_the_citation_is_valid_and_names_both_papers():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert {"authors", "cff-version", "message", "title"} <= set(citation) <= CITATION_KEYS
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "The joma developers"}]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    fields = ("title", "abstract", "license", "keywords")
    described = ("name", "description", "license", "keywords")
    assert [citation[field] for field in fields] == [project[field] for field in described]
    for paper in citation["references"]:
        assert {"type", "title", "authors"} <= set(paper) <= REFERENCE_KEYS
        assert all(set(author) == {"family-names", "given-names"} for author in paper["authors"])
        assert isinstance(paper["year"], int)
        assert DOI.fullmatch(paper["doi"])
        (identifier,) = paper["identifiers"]
        assert identifier == {"type": "other", "value": paper["doi"].replace("10.48550/arXiv.", "arXiv:")}
    papers = {paper["identifiers"][0]["value"] for paper in citation["references"]}
    assert papers == {"arXiv:2310.00535", "arXiv:2402.05969"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_the_site_shows(path):
    form = read_yaml(path)
    assert set(form) == {"name", "description", "labels", "body"}
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert questions
    assert len({part["id"] for part in questions}) == len(questions)
    for part in form["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown")
        assert set(part) <= {"type", "id", "attributes", "validations"}
        assert part["attributes"]["value" if part["type"] == "markdown" else "label"]
        assert ("options" in part["attributes"]) == (part["type"] == "dropdown")


def test_there_is_a_form_for_a_bug_a_wrong_number_and_a_study_of_every_kind():
    assert [path.stem for path in FORMS] == ["bug", "new-study", "wrong-number"]
    parts = {part.get("id"): part for part in read_yaml(FORMS[1])["body"]}
    assert parts["kind"]["attributes"]["options"] == [f"{kind}: {meaning}" for kind, meaning in KINDS.items()]


def test_public_ci_runs_make_check_on_every_supported_python():
    path = ROOT / ".github" / "workflows" / "check.yml"
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"] == {"python": pythons()}
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make check"]
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in actions)
    assert "://" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_to_files(path):
    links = [link for link in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in link]
    targets = [(path.parent / link).resolve() for link in links]
    # The pages of these folders are written when the site is built, which checks the links to them.
    written = {ROOT / "docs" / "api", ROOT / "docs" / "findings"}
    assert not [target for target in targets if not written & {*target.parents} and not target.exists()]
