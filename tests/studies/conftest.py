"""What the tests of all studies share."""

import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def _no_shape_checks_where_fields_are_changed(request, monkeypatch):
    """Skip the checks of shapes in the many small runs of `test_config_fields.py`: other tests make them."""
    if request.path.name == "test_config_fields.py":
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
