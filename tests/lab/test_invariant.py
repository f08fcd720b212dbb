"""The page The invariant: it runs as a script, its code gives its numbers, and a diverged training is a sentence."""

import numpy as np
import pytest
import xarray as xr

from joma.drawing import png
from joma.lab import invariant as page
from lab_pages import run_as_script, run_code, run_page

INPUTS = {"attention": "softmax", "activation": "linear", "breaker": "none", "rate": 0.5, "kappa": 1.0, "step": 300}


def test_the_page_runs_as_a_script_without_a_network(tmp_path):
    run_as_script("invariant", tmp_path)


@pytest.mark.parametrize("changes", [{}, {"attention": "exp", "activation": "gelu", "breaker": "decay", "step": 45}])
def test_the_code_to_copy_gives_the_numbers_of_the_page(changes):
    inputs = INPUTS | changes
    names = run_page(page.app, inputs=inputs)
    copied = run_code(names["code"])
    xr.testing.assert_allclose(copied.account, names["account"], rtol=1e-9, atol=1e-12)
    xr.testing.assert_allclose(copied.at_step, names["account"].sel(step=inputs["step"]), rtol=1e-9, atol=1e-12)


def test_the_sentence_says_what_the_ledger_cannot_explain():
    account = run_page(page.app, inputs=INPUTS)["account"]
    assert page.describe(account, 300).endswith("the ledger leaves nothing but rounding unexplained.")
    broken = run_page(page.app, inputs=INPUTS | {"breaker": "norm"})
    rest = 100 * float(broken["account"]["size"].sel(term="unexplained", step=300).mean())
    assert rest > 1
    assert broken["sentence"].endswith(f"the ledger leaves {rest:.3g} % unexplained.")
    assert "move the step" in page.describe(account, 0)


def test_a_training_that_diverges_is_a_sentence_and_the_page_goes_on():
    names = run_page(page.app, inputs=INPUTS | {"attention": "exp", "rate": 2.0, "kappa": 4.0})
    assert names["account"] is None
    assert "training diverged: lower it" in names["sentence"]


def test_the_picture_stacks_the_sizes_of_the_terms():
    account = run_page(page.app, inputs=INPUTS)["account"]
    figure = page.draw(account, 300)
    layers = figure.axes[1].collections
    assert [layer.get_label() for layer in layers] == list(page.SHOWN_TERMS.values())
    top = max(path.vertices[:, 1].max() for layer in layers for path in layer.get_paths())
    assert top == pytest.approx(float(account["size"].mean("seed").sum("term").max()))
    assert np.isfinite(top)
    assert png(figure).startswith(b"\x89PNG")
