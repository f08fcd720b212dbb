"""The page Latent tree: it runs as a script, and its code gives its numbers, those of an enumeration too."""

from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from joma.drawing import png
from joma.lab import latent_tree as page
from lab_pages import run_as_script, run_code, run_page

INPUTS = SimpleNamespace(branching=(2, 2, 4), p_child=[[0.5, -0.2], [-0.3, -0.2]], rho=0.7, layers=1)
SHORT = {**page.TRAINING, "steps": 6, "pool": 6, "moments": 3}


def test_the_page_runs_as_a_script_without_a_network(tmp_path):
    run_as_script("latent-tree", tmp_path)


def test_the_code_to_copy_gives_the_numbers_of_the_page(monkeypatch):
    monkeypatch.setattr(page, "TRAINING", SHORT)
    solution, run = page.solve(INPUTS), page.train(INPUTS)
    code = page.CODE + page.TRAINING_CODE
    copied = run_code(code.format(**vars(INPUTS), training=SHORT, seeds=page.SEEDS))
    np.testing.assert_array_equal(copied.cooccurrence, solution.cooccurrence)
    np.testing.assert_array_equal(copied.height, solution.height)
    xr.testing.assert_equal(copied.run, run)
    names = run_page(page.app, inputs=INPUTS)
    assert names["code"] == code.format(**vars(INPUTS), training={**page.app.run()[1]["TRAINING"]}, seeds=page.SEEDS)


def test_co_occurrence_is_what_sampling_gives():
    import torch

    solution = page.solve(INPUTS)
    token = solution.tree.sample(40_000, generator=torch.Generator().manual_seed(0)).token.double()
    counts = (token.T @ token).numpy()
    np.testing.assert_allclose(counts / np.diagonal(counts), solution.cooccurrence, atol=0.03)


def test_the_sentence_says_whether_co_occurrence_falls():
    alike = SimpleNamespace(branching=(2, 2, 2, 2), p_child=[[0.8, -0.2]] * 2, rho=0.85, layers=1)
    assert page.describe(page.solve(alike)).endswith("It falls with the height for 16 of 16 given tokens.")
    unlike = SimpleNamespace(branching=(2, 8), p_child=[[0.9, 0.9], [-0.9, -0.9]], rho=0.3, layers=1)
    solution = page.solve(unlike)
    matrix = solution.cooccurrence  # a token of the rare branch meets the common branch more often than its siblings
    assert matrix[1, 0] < matrix[8, 0]
    assert matrix[9, 8] > matrix[0, 8]
    assert page.describe(solution).endswith("It falls with the height for 8 of 16 given tokens.")


@pytest.mark.parametrize("branching", page.SHAPES.values())
def test_every_shape_is_drawn_and_can_be_trained_on(branching, monkeypatch):
    monkeypatch.setattr(page, "TRAINING", SHORT)
    inputs = SimpleNamespace(branching=branching, p_child=[[0.8, -0.2]] * branching[0], rho=0.85, layers=2)
    figure = page.draw(page.solve(inputs))
    tree = page.solve(inputs).tree
    edges = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    assert len(edges) >= len(tree.parents) - 1
    assert png(figure).startswith(b"\x89PNG")
    assert png(page.draw_training(page.train(inputs))).startswith(b"\x89PNG")
