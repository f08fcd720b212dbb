"""The documentation site: `make docs` builds it from this folder, the docstrings and the stored runs."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import joma

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "extensions"), str(DOCS)]  # and the scripts that make pages

project = "joma"
author = copyright = "The joma developers"
version = release = joma.__version__

extensions = [
    "myst_nb",  # Markdown, and cells that are run when the site is built
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "docstrings",
    "findings",
    "mathml",
    "reference",
]
# The one page of all runs stands in the site as one page a study.
exclude_patterns = ["runs", "extensions", "gallery", "slurm"]
nitpicky = True
highlight_language = "none"  # indented blocks are formulas and tables of files; Python says so
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"joma {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # it fetches pages, which browsers refuse for files

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
myst_update_mathjax = False

nb_execution_mode = "force"  # Sphinx reads only pages that have changed
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_merge_streams = True
nb_ipywidgets_js = {}  # from another host, and no page has widgets
copybutton_selector = "div.highlight-python pre, div.highlight-console pre, div.cell_input pre"

autodoc_typehints = "signature"
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_param = False
napoleon_attr_annotations = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False

# Cells run without network, on one core, with this Python's programs, and draw into the page.
os.environ["HF_HUB_OFFLINE"] = os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
os.environ["COLUMNS"] = "100"
os.environ.pop("MPLBACKEND", None)
logging.getLogger("traitlets").setLevel(logging.WARNING)
# The kernel keeps its history beside the site, not in the home folder, and does not warn of its loopback connection.
os.environ["IPYTHONDIR"] = str(DOCS.parent / "build" / "ipython")
profile = DOCS.parent / "build" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text("c = get_config()\nc.IPKernelApp.log_level = 40\n")
