"""Shapes and types are checked at run time in the tests: jaxtyping's import hook with beartype."""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JOMA_CACHE", os.path.join(tempfile.gettempdir(), f"joma-tests-{os.getuid()}"))

from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

install_import_hook("joma", "typechecker.check")

# Examples are drawn anew in every run, but for CI, where a change is judged and not the luck of the draw.
fixed = bool(os.environ.get("CI"))
settings.register_profile("joma", deadline=None, derandomize=fixed, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("joma")
