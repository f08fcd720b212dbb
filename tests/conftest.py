"""Shapes and types are checked at run time in the tests: jaxtyping's import hook with beartype.

They are not checked where there is CUDA: `torch.compile` would trace the checks as part of the code, and fail.
"""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JOMA_CACHE", os.path.join(tempfile.gettempdir(), f"joma-tests-{os.getuid()}"))

import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

if not torch.cuda.is_available():
    install_import_hook("joma", "typechecker.check")

# The same examples in every run, everywhere: a test judges the code, not the luck of the draw. Fresh examples are drawn
# with `--hypothesis-profile=fresh`.
options = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("joma", derandomize=True, **options)
settings.register_profile("fresh", derandomize=False, print_blob=True, **options)
settings.load_profile("joma")
