"""The page Sparse, then dense: it runs as a script, its code gives its numbers, and its sentences are true."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from joma.drawing import png
from joma.lab import sparse_then_dense as page
from lab_pages import run_as_script, run_code, run_page, widget


def settings(mu, v0=0.05, temperature=2.0, share=0.25):
    return SimpleNamespace(mu=mu, v0=v0, temperature=temperature, share=share)


def test_the_page_runs_as_a_script_without_a_network(tmp_path):
    run_as_script("sparse-then-dense", tmp_path)


@pytest.mark.parametrize("inputs", [settings([1.0, 1.5, 2.0, 2.5, 3.0]), settings([0.3, 3.1], 0.2, 3.3)])
def test_the_code_to_copy_gives_the_numbers_of_the_page(inputs):
    names = run_page(page.app, inputs=inputs)
    copied, solution = run_code(names["code"]), names["solution"]
    for name in ("times", "v", "entropy", "linear", "blow_up", "limit"):
        np.testing.assert_array_equal(getattr(copied, name), getattr(solution, name))
    assert copied.dip == solution.dip


def test_both_flows_are_those_of_the_formulas():
    mu, v0, temperature = np.array([0.7, 1.9]), 0.1, 3.0
    solution = page.solve(mu.tolist(), v0, temperature)
    before = solution.times < 0.9 * solution.blow_up.min()
    drives = {"v": lambda v: mu - v, "linear": lambda _: mu}
    for name, drive in drives.items():
        times = solution.times if name == "v" else solution.times[before]
        flow = solve_ivp(
            lambda _, v, drive=drive: drive(v) * np.exp(v**2 / temperature),
            (0, times[-1]),
            [v0, v0],
            t_eval=times,
            rtol=1e-10,
            atol=1e-12,
        )
        np.testing.assert_allclose(getattr(solution, name)[: len(times)], flow.y.T, rtol=1e-7)


def test_after_the_blow_up_the_winner_has_all_attention_and_the_others_stand_still():
    solution = page.solve([1.0, 2.0, 3.0], 0.05, 2.0)
    weights = page.until_blow_up(solution)
    over = solution.times >= solution.blow_up.min()
    assert over.any()
    assert np.isinf(weights[over, 2]).all()
    assert (weights[over, :2] == solution.limit[:2]).all()
    assert np.isfinite(weights[~over]).all()


def test_the_sentence_states_the_bounce():
    assert page.describe(page.solve([1.0, 1.5, 2.0, 2.5, 3.0], 0.05, 2.0)) == (
        "Entropy falls from 1.61 to 0.43 nats at t = 0.661 and comes back to 0.86 (0.43 nats); in the linear flow "
        "token 5 blows up at t = 0.401."
    )
    assert page.describe(page.solve([2.0, 2.0], 0.05, 2.0)).startswith("Entropy does not bounce")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_picture_shows_the_chosen_time(share):
    solution = page.solve([0.2, 3.9], 1.0, 1.0)
    figure = page.draw(solution, 1.0, share)
    assert f"t = {share * solution.end:.3g}" in figure.axes[3].get_title()
    assert png(figure).startswith(b"\x89PNG")


def test_presets_and_random_targets_become_sliders():
    for name, preset in page.PRESETS.items():
        targets = run_page(page.app, preset=widget(preset), draw_again=widget(0))["targets"].value
        assert len(targets) == 5, name
        assert tuple(targets) == preset or name == "random"
    first, second = (
        run_page(page.app, preset=widget((1.0,)), draw_again=widget(count))["targets"].value for count in (1, 2)
    )
    assert first != second
