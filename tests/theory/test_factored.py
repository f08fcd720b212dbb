"""The key ledger, and the laws of the value path, along SGD by autograd with steps of any size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.arguments import InputError
from joma.theory.factored import key_ledger
from joma.theory.invariants import finite_steps, ledger, predict, relative_error
from value_problems import ACTIVATIONS, draw, sgd

seeds = st.integers(0, 2**32 - 1)
STEPS = 30
problems = st.fixed_dictionaries(
    {
        "seed": seeds,
        "activation": st.sampled_from(list(ACTIVATIONS)),
        "norm": st.booleans(),
        "skip": st.booleans(),
        "rates": st.tuples(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.01, 0.3)),
    }
)
batches = st.none() | st.integers(1, 6)


@pytest.mark.parametrize("attention", ["exp", "softmax"])
@given(problem=problems, batch=batches, temperature=st.floats(0.5, 2))
@settings(max_examples=25)
def test_key_ledger_is_exact_along_sgd_of_any_step_size(attention, problem, batch, temperature):
    options = {"temperature": temperature} if attention == "softmax" else {}
    flow, start, label = draw(attention, factored=True, **problem, **options)
    run = sgd(flow, start, label, steps=STEPS, batch=batch)
    rates = problem["rates"][:2]
    book = key_ledger(
        attention,
        run["k"],
        run["p"],
        run["zeta"],
        run["z"][:-1],
        pull=run["pull"],
        rates=rates,
        temperature=temperature,
    )
    growth = 0.5 * ((run["k"] ** 2).sum(-1) - (run["k"][0] ** 2).sum(-1))
    scale = np.abs([growth, book.level, book.spread, book.normalisation, book.step]).max()
    np.testing.assert_allclose(book.total, growth, rtol=0, atol=1e-11 * scale)
    assert np.abs(book.step).max() > 0
    assert (np.abs(book.normalisation).max() > 0) == (attention == "softmax")


@pytest.mark.parametrize("attention", ["exp", "linear"])
@given(problem=problems, batch=batches)
@settings(max_examples=20)
def test_free_logits_depart_from_the_law_by_the_squares_of_steps(attention, problem, batch):
    flow, start, label = draw(attention, **problem)
    run = sgd(flow, start, label, steps=STEPS, batch=batch)
    kappa = problem["rates"][0] / problem["rates"][1]
    power = flow.attention.power
    total = (run["z"] ** power).sum(axis=-2)
    predicted = predict(attention, run["p"], run["p"][0], run["z"][0], kappa=kappa)
    steps = finite_steps(attention, run["p"], run["z"], kappa=kappa)
    scale = np.abs([total - total[0], predicted - total[0], steps]).max()
    np.testing.assert_allclose(predicted - steps, total, rtol=0, atol=1e-11 * scale)


@given(problem=problems, batch=batches, temperature=st.floats(0.5, 2))
@settings(max_examples=20)
def test_softmax_ledger_holds_with_values_in_the_place_of_weights(problem, batch, temperature):
    flow, start, label = draw("softmax", temperature=temperature, **problem)
    run = sgd(flow, start, label, steps=STEPS, batch=batch)
    rate_z, rate_v, _ = problem["rates"]
    options = {"temperature": temperature, "b_ref": flow.b_ref}
    book = ledger(run["p"], run["b_bar"], run["pull"], rate_w=rate_v, rate_z=rate_z, **options)
    predicted = predict("softmax", run["p"], run["p"][0], run["z"][0], kappa=rate_z / rate_v, **options)
    total = run["z"].sum(axis=-2)
    scale = np.abs([predicted - total[0], book.drift, book.gap, book.step]).max()
    np.testing.assert_allclose(predicted - book.total, total, rtol=0, atol=1e-10 * scale)


@given(problem=problems, batch=batches)
@settings(max_examples=20)
def test_keys_take_the_place_of_queries_in_the_law_of_linear_attention(problem, batch):
    flow, start, label = draw("linear", factored=True, **problem)
    run = sgd(flow, start, label, steps=STEPS, batch=batch)
    kappa, keys = problem["rates"][0] / problem["rates"][1], np.swapaxes(run["k"], -1, -2)
    predicted = predict("linear", run["p"], run["p"][0], keys[0], kappa=kappa)
    steps = finite_steps("linear", run["p"], keys, kappa=kappa)
    squares = (run["k"] ** 2).sum(axis=-1)
    scale = np.abs([squares - squares[0], steps]).max()
    np.testing.assert_allclose(predicted - steps, squares, rtol=0, atol=1e-11 * scale)


def test_each_term_of_the_key_ledger_is_needed():
    flow, start, label = draw("softmax", seed=3, factored=True, rates=(0.5, 0.5, 0.2))
    run = sgd(flow, start, label, steps=STEPS)
    book = key_ledger("softmax", run["k"], run["p"], run["zeta"], run["z"][:-1], pull=run["pull"], rates=(0.5, 0.5))
    squares = 0.5 * (run["k"] ** 2).sum(-1)
    whole = squares[0] + book.total
    for left_out in (book.level, book.spread, book.normalisation, book.step):
        assert relative_error(squares, whole - left_out, squares[0])[-1] > 1e-2


K, P, Z = np.ones((3, 5, 2)), np.ones((3, 5, 4)), np.ones((2, 3, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: key_ledger("linear", K, P, Z, Z), "`attention` must be one of exp, softmax"),
        (lambda: key_ledger("exp", K[0], P, Z, Z), "`k` must be of axes .step . 1"),
        (lambda: key_ledger("exp", K, P[:, :4], Z, Z), "`p` must be of axes"),
        (lambda: key_ledger("exp", K, P, Z[:1], Z), "`zeta` must be of axes .step, ..., query, token. with 2 steps"),
        (lambda: key_ledger("exp", K, P, Z, Z[:, :2]), "`z` must be of the shape of `zeta`"),
        (lambda: key_ledger("softmax", K, P, Z, Z), "`pull` must be given"),
        (lambda: key_ledger("softmax", K, P, Z, Z, pull=np.ones((3, 5))), "`pull` must be of shape .2, 5."),
        (lambda: key_ledger("exp", K, P, Z, Z, rates=(0.0, 1.0)), "`rates` must be"),
        (lambda: key_ledger("exp", K, P, Z, Z, rates=(1.0, 1.0, 1.0)), "`rates` must be two numbers"),
        (lambda: key_ledger("softmax", K, P, Z, Z, pull=np.ones((2, 5)), temperature=0.0), "`temperature`"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
