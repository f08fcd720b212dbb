"""The public surface: one helper for every package, what `dir` shows, and the reference page."""

import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import joma

DOCS = Path(__file__).parents[1] / "docs"
spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
assert spec is not None
assert spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


@pytest.mark.parametrize("name", reference.PACKAGES)
def test_a_package_shows_its_names_and_each_can_be_reached(name):
    package = importlib.import_module(name)
    assert set(dir(package)) == set(package.__all__)
    for member in package.__all__:
        assert getattr(package, member) is not None
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'qqqqqq'; it has"):
        package.qqqqqq  # noqa: B018


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'stable_rank'"):
        joma.stabel_rank  # noqa: B018


@pytest.mark.parametrize("name", reference.PACKAGES)
def test_no_module_has_the_name_of_a_public_function(name):
    package = importlib.import_module(name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    functions = {member for member in package.__all__ if not isinstance(getattr(package, member), ModuleType)}
    assert not modules & functions


def test_importing_joma_and_its_packages_imports_no_torch():
    imports = "\n".join(f"import {name}" for name in reference.PACKAGES)
    script = f"import sys\n{imports}\nassert not {{'torch', 'matplotlib', 'xarray'}} & {{*sys.modules}}, 'loaded'"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_schedule_and_noise_are_where_messages_send_users():
    assert joma.schedule.every(5, 10) == (0, 5, 10)
    assert callable(joma.noise.key)


def test_the_reference_page_is_up_to_date():
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == reference.page(), "run `make reference`"


def test_the_reference_lists_every_public_name_once_with_a_summary():
    listed = [(module, name) for module, values in reference.entries() for name, _ in values]
    assert len(listed) == len(set(listed))
    values = [value for _, members in reference.entries() for _, value in members]
    assert len({id(value) for value in values}) == len(values)
    for value in values:
        if inspect.isclass(value) or inspect.isroutine(value):
            first = (inspect.getdoc(value) or "").splitlines()[:1]
            assert first, value
            assert first[0].rstrip().endswith((".", ":", ",")) or len(first[0]) > 60, (value, first)
