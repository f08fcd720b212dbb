"""The block's velocity against autograd, its flow against closed forms, Theorem 1 along it, blow-ups and kinks."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import erf, ndtri
from torch.nn import functional

from joma.arguments import InputError
from joma.theory.block_flow import Architecture, BlockSolution, Training, block
from joma.theory.integration import IntegrationError, Solver
from joma.theory.invariants import ATTENTIONS, conserved, folded_gain, predict, relative_error
from joma.theory.losses import constant, cross_entropy, squared_error

ACTIVATIONS = {
    "linear": lambda y: y,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
LOSSES = {
    "cross entropy": (
        lambda target: cross_entropy(target.argmax(1)),
        lambda h, target: functional.cross_entropy(h, target.argmax(1), reduction="none"),
    ),
    "squared error": (squared_error, lambda h, target: 0.5 * ((h - target) ** 2).sum(1)),
    "constant": (constant, lambda h, target: -(h * target).sum(1)),
}
NO_RESIDUAL = Architecture(residual=False)
SAMPLES, TOKENS, QUERIES, HIDDEN, DIM = 8, 5, 3, 4, 10
seeds = st.integers(0, 2**32 - 1)
problems = st.fixed_dictionaries(
    {
        "seed": seeds,
        "activation": st.sampled_from(list(ACTIVATIONS)),
        "loss": st.sampled_from(list(LOSSES)),
        "rates": st.tuples(st.floats(0.2, 3), st.floats(0.2, 3), st.floats(0, 2)),
        "temperature": st.floats(0.4, 2),
        "residual": st.booleans(),
    }
)
# With exp attention one logit blows up at t = 1.2106, and hidden units at SiLU's minimum relax to it ever faster.
STIFF = {
    "seed": 11234,
    "activation": "silu",
    "loss": "constant",
    "rates": (2.0913993011607004, 2.8642148660760838, 0.8515888284237871),
    "temperature": 0.9729793013430243,
    "residual": True,
}
# With exp attention a preactivation of 1e9 crosses zero just before the pole, within 1e-14: too fast for the clock.
UNRESOLVED = {
    "seed": 1180551611,
    "activation": "silu",
    "loss": "constant",
    "rates": (2.7899852638958906, 1.8878352516729147, 0.15121980681387415),
    "temperature": 0.6476246798292622,
    "residual": False,
}
BREAKERS = {
    "layer norm": lambda _: {"layer_norm": True},
    "skip": lambda rng: {"skip": rng.normal(size=(DIM, HIDDEN))},
    "embedding": lambda rng: {"embedding": rng.normal(size=(DIM, TOKENS + QUERIES)) / np.sqrt(DIM)},
    "weight decay": lambda _: {"weight_decay": 0.2},
}


def draw(attention, *, seed, activation="gelu", loss="cross entropy", rates=(0.7, 1.9, 0.5), breaker=None, **options):
    """Return a random block flow with unequal weights, a start, and the targets of its loss."""
    rng = np.random.default_rng(seed)
    x = rng.random((SAMPLES, TOKENS)) + 1e-3
    target = rng.normal(size=(SAMPLES, HIDDEN))
    switches = {"embedding": np.linalg.qr(rng.normal(size=(DIM, DIM)))[0][:, : TOKENS + QUERIES]}
    switches |= (BREAKERS[breaker](rng) if breaker else {}) | options
    decay = switches.pop("weight_decay", 0.0)
    flow = block(
        attention,
        activation,
        LOSSES[loss][0](target),
        x / x.sum(axis=1, keepdims=True),
        query=np.arange(SAMPLES) % QUERIES,
        weight=rng.dirichlet(np.full(SAMPLES, 3.0)),
        training=Training(*rates, weight_decay=decay),
        architecture=Architecture(**switches),
    )
    start = {
        "w0": 0.5 * rng.normal(size=(DIM, HIDDEN)),
        "z0": 0.5 * rng.normal(size=(QUERIES, TOKENS)),
        "bias0": 0.1 * rng.normal(size=HIDDEN),
    }
    return flow, start, target


def law(flow, path: BlockSolution):
    """Return Σ_m z_m^power along the flow, and what Theorem 1 with the ledger says it is."""
    options = {"kappa": flow.training.kappa, "temperature": flow.temperature, "b_ref": flow.b_ref}
    predicted = predict(flow.attention.name, path.v, path.v[0], path.z[0], **options) - path.ledger.total
    return (path.z**flow.attention.power).sum(axis=1), predicted


def law_error(flow, path):
    """Return the largest error of the law, relative to the largest of its terms."""
    total, predicted = law(flow, path)
    terms = np.abs(path.v**2).sum(axis=2).max(), np.abs(total).max(), np.abs(path.ledger.total).max()
    return np.abs(total - predicted).max() / max(terms)


def solve_up_to_a_pole(flow, start, times):
    """Integrate with at most 5,000 evaluations, more than flows usually need; end before a pole that needs more."""
    try:
        return flow.solve(times, **start, solver=Solver(max_evaluations=5000))
    except IntegrationError as stall:
        end = 0.999 * stall.time
        path = flow.solve([*times[times < end], end], **start, solver=Solver(max_evaluations=5000))
        speed = np.abs(flow.velocity(path.w[-1], path.z[-1], path.bias[-1]).z)
        assert ((1 + np.abs(path.z[-1])) / speed).min() < 0.05 * end, "the integrator stalled far from a pole"
        return path


# The block


@pytest.mark.parametrize("attention", list(ATTENTIONS))
@given(problem=problems, breakers=st.sets(st.sampled_from(list(BREAKERS))))
@settings(max_examples=40)
def test_velocity_is_the_descent_direction_of_autograd(attention, problem, breakers):
    rng = np.random.default_rng(1)
    activation, loss = ACTIVATIONS[problem["activation"]], LOSSES[problem["loss"]][1]
    switches = {name: value for breaker in sorted(breakers) for name, value in BREAKERS[breaker](rng).items()}
    switches.pop("embedding", None)
    breaker = "embedding" if "embedding" in breakers else None
    flow, start, target = draw(attention, breaker=breaker, **switches, **problem)
    velocity = flow.velocity(start["w0"], start["z0"], start["bias0"])

    w, z, bias = leaves = [torch.tensor(value, requires_grad=True) for value in start.values()]
    x, u, u_q = torch.tensor(flow.x), torch.tensor(flow.context), torch.tensor(flow.query_embedding)
    scores = z[torch.tensor(flow.query)]
    b = {"linear": x * scores, "exp": x * scores.exp()}.get(attention)
    b = functional.softmax(x.log() + scores / flow.temperature, 1) if b is None else b
    f = b @ u.T + (u_q.T[torch.tensor(flow.query)] if flow.residual else 0)
    seen = functional.layer_norm(f, [DIM]) if flow.layer_norm else f
    h = activation(seen @ w + bias) + (0 if flow.skip is None else f @ torch.tensor(flow.skip))
    risk = (torch.tensor(flow.weight) * loss(h, torch.tensor(target))).sum()
    *down, y = (-grad for grad in torch.autograd.grad(risk, [*leaves, b]))
    expected = [
        rate * (grad - flow.training.weight_decay * leaf)
        for rate, grad, leaf in zip(problem["rates"], down, leaves, strict=True)
    ]
    expected += [torch.tensor(flow.weight) @ b, (b * (b * y).sum(1, keepdim=True)).sum(0)]
    for ours, tensor in zip(velocity, expected, strict=True):
        theirs = tensor.detach().numpy()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13 * (1 + np.abs(theirs).max()))


@pytest.mark.parametrize("attention", list(ATTENTIONS))
@given(problem=problems)
@example(problem=STIFF)
@example(problem=UNRESOLVED)
@settings(max_examples=12)
def test_theorem_1_along_the_flow(attention, problem):
    """Three queries, unequal rates, biases, any smooth activation: 1e-8, with the ledger for softmax."""
    flow, start, _ = draw(attention, **problem)
    path = solve_up_to_a_pole(flow, start, np.linspace(0, 2, 9))
    assert law_error(flow, path) <= 1e-8
    invariant = conserved(attention, path.v, path.z, rate_w=flow.training.rate_w, rate_z=flow.training.rate_z)
    if attention == "softmax":
        assert np.abs(invariant - invariant[0]).max() <= 1e-8 * (1 + np.abs(path.z).max())
    else:
        terms = np.abs(invariant).max() + (path.v**2).sum(2).max() / flow.training.rate_w
        assert np.abs(invariant - invariant[0]).max() <= 1e-8 * terms


def test_softmax_prediction_alone_is_not_the_law():
    flow, start, _ = draw("softmax", seed=0)
    path = flow.solve([0.0, 2.0], **start)
    total, predicted = law(flow, path)
    assert relative_error(total, predicted, total[0])[-1] < 1e-9
    for left_out in (path.ledger.drift, path.ledger.gap):
        assert relative_error(total, predicted + left_out, total[0])[-1] > 0.05
    assert not path.ledger.step.any()


@pytest.mark.parametrize("attention", list(ATTENTIONS))
@pytest.mark.parametrize("breaker", list(BREAKERS))
def test_what_breaks_the_law(attention, breaker):
    errors = []
    for seed in range(4):
        flow, start, _ = draw(attention, seed=seed, breaker=breaker)
        total, predicted = law(flow, flow.solve([0.0, 2.0], **start))
        errors.append(relative_error(total, predicted, total[0])[-1])
        whole, begin, _ = draw(attention, seed=seed)
        total, predicted = law(whole, whole.solve([0.0, 2.0], **begin))
        assert relative_error(total, predicted, total[0])[-1] < 1e-8  # what the switch broke
    assert min(errors) > 0.1


def test_folded_flow_is_the_block_with_one_query():
    rng = np.random.default_rng(3)
    x = rng.dirichlet(np.ones(5), size=6)
    flow = block("exp", "gelu", squared_error(rng.normal(size=(6, 3))), x, training=Training(0.8, 1.7, 0.3))
    start = {"w0": rng.normal(size=(6, 3)), "z0": rng.normal(size=(1, 5)), "bias0": rng.normal(size=3)}
    times = np.linspace(0, 3, 7)
    full, folded = flow.solve(times, **start), flow.solve_folded(times, **start)
    for name in ("w", "v", "z", "bias"):
        np.testing.assert_allclose(getattr(folded, name), getattr(full, name), rtol=1e-9, atol=1e-9)
    assert np.abs(full.z - full.z[0]).max() > 0.1
    gain = folded_gain(full.v, full.v[0], full.z[0], kappa=1.7 / 0.8)
    np.testing.assert_allclose(gain, np.exp(full.z[:, 0]), rtol=1e-8)
    # v̇ = η_w E[g h' x] ∘ gain, with E[g h' x] from a block whose attention is x itself
    still = block("linear", "gelu", flow.gradient, gain[-1] * x, training=Training(rate_w=0.8))
    v_dot = flow.velocity(full.w[-1], full.z[-1], full.bias[-1]).w[:5]
    np.testing.assert_allclose(still.velocity(full.w[-1], np.ones((1, 5)), full.bias[-1]).w[:5], v_dot, rtol=1e-7)


def winner(delta, *, seed, kappa, rate):
    """Return Theorem 2's block, one token a sample, a start, and its poles and clock by the closed form."""
    rng, delta, root = np.random.default_rng(seed), np.array(delta), np.sqrt(kappa / 2)
    v0, z0 = 0.5 * rng.normal(size=(2, len(delta)))
    gradient = constant(delta[:, None] * len(delta))
    training = Training(rate_w=rate, rate_z=kappa * rate)
    flow = block("exp", "linear", gradient, np.eye(len(delta)), training=training, architecture=NO_RESIDUAL)
    scale = np.sqrt(np.pi / 2 / kappa) / (rate * delta * np.exp(z0 - kappa * v0**2 / 2))  # of D = η Δ exp(z0 − κ v0²/2)

    def clock(v):
        return scale * (erf(root * v) - erf(root * v0))

    return flow, {"w0": np.append(v0, 0.0)[:, None], "z0": z0[None]}, clock(np.sign(delta) * np.inf), clock


@given(
    delta=st.lists(st.floats(0.2, 1.5) | st.floats(-1.5, -0.2), min_size=1, max_size=4),
    seed=seeds,
    kappa=st.floats(0.3, 3),
    rate=st.floats(0.3, 3),
)
@settings(max_examples=15)
def test_block_with_constant_gradient_is_theorem_2(delta, seed, kappa, rate):
    flow, start, poles, clock = winner(delta, seed=seed, kappa=kappa, rate=rate)
    path = flow.solve(np.array([0.3, 0.9]) * poles.min(), **start)
    passed = clock(path.v[:, :, 0])
    np.testing.assert_allclose(passed, np.broadcast_to(path.times[:, None], passed.shape), rtol=1e-8)


def test_block_blows_up_when_theorem_2_says():
    flow, start, poles, _ = winner([0.9, 0.7, -1.2], seed=0, kappa=1.5, rate=0.6)
    path = flow.solve(np.array([0.5, 1.5]) * poles.min(), **start)
    assert path.blow_up == pytest.approx(poles.min(), rel=1e-8)
    assert len(path.times) == len(path.z) == 1


def test_linear_attention_grows_as_cosh_and_sinh():
    delta, v0, z0, rate_w, rate_z = 0.7, 0.3, -0.4, 0.6, 1.5
    training = Training(rate_w=rate_w, rate_z=rate_z)
    flow = block("linear", "linear", constant(delta), [[1.0]], training=training, architecture=NO_RESIDUAL)
    path = flow.solve([1.0, 3.0, 20.0], w0=[[v0], [0.0]], z0=[[z0]])
    phase = np.sqrt(rate_w * rate_z) * delta * path.times
    expected = v0 * np.cosh(phase) + np.sqrt(rate_w / rate_z) * z0 * np.sinh(phase)
    np.testing.assert_allclose(path.v[:, 0, 0], expected, rtol=1e-9)
    assert path.blow_up == np.inf


def test_rates_of_zero_freeze():
    flow, start, _ = draw("softmax", seed=1, rates=(1.0, 0.0, 0.0))
    path = flow.solve([0.0, 1.0], **start)
    np.testing.assert_array_equal(path.z[1], start["z0"])
    np.testing.assert_array_equal(path.bias[1], start["bias0"])
    assert np.abs(path.v[1] - path.v[0]).max() > 1e-2


def test_softmax_ignores_tokens_that_do_not_occur():
    """The largest logit belongs to a token that is absent: nothing overflows, nothing is 0/0."""
    flow = block("softmax", "linear", constant(1.0), [[0.5, 0.5, 0.0]])
    rate = flow.velocity(np.ones((4, 1)), np.array([[0.0, 0.0, 5000.0]]), np.zeros(1))
    np.testing.assert_array_equal(rate.b_bar, [0.5, 0.5, 0.0])


def test_a_stiff_block_is_followed_to_its_pole():
    flow, start, _ = draw("exp", **STIFF)
    path = flow.solve([0.0, 1.0, 1.21063, 2.0], **start, solver=Solver(rtol=1e-9, atol=1e-11, switch_after=1500))
    assert path.blow_up == pytest.approx(1.2106333621430445, rel=1e-10)  # by Radau from the start, with rtol=1e-11
    np.testing.assert_array_equal(path.times, [0.0, 1.0, 1.21063])
    assert path.evaluations < 20_000
    assert law_error(flow, path) <= 1e-9


def test_the_switch_changes_no_flow_that_ends_before_it():
    flow, start, _ = draw("softmax", seed=0)
    times = [0.5, 2.0]
    usual, tight = flow.solve(times, **start), flow.solve(times, **start, solver=Solver(switch_after=10**6))
    np.testing.assert_array_equal(usual.w, tight.w)
    assert usual.evaluations == tight.evaluations < 20_000


# Kinks


def sliding(attention="linear", *, rate_z, width):
    """One token; h = relu(b v − 1) for x = 1 and 2. At b v = 1 the first pushes down, the second up: v slides."""
    gradient = constant([[-1.0], [0.15]])
    training, architecture = Training(rate_z=rate_z), Architecture(residual=False, kink_width=width)
    return block(attention, "relu", gradient, [[1.0], [2.0]], training=training, architecture=architecture)


def test_sliding_is_filippovs_with_an_error_of_the_width():
    """v falls at 0.35 to the kink, and stays; rounded, it stays at 1 + width Φ⁻¹(0.3), where the slope balances."""
    times = np.array([1.0, 2.0, 4.0, 8.0])
    filippov = np.maximum(2 - 0.35 * times, 1.0)
    for width in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7):
        path = sliding(rate_z=0.0, width=width).solve(times, [[2.0], [0.0]], [[1.0]], bias0=-1.0)
        away = path.v[:, 0, 0] - filippov
        np.testing.assert_allclose(away, [0, 0, *2 * [width * ndtri(0.3)]], atol=1e-9)
        assert path.evaluations < 1500  # an explicit method needs some 0.8 / width


def test_sliding_along_a_kink_that_moves():
    """Two tokens. On relu's kink x1·v = 1 Filippov's velocity is a (x2 − x1 (x1·x2)/‖x1‖²), a what x2 sends."""
    x = np.array([[1.0, 0.5], [1.0, 1.0]])
    v0, times, width = np.array([0.8, 0.4]), np.array([1.0, 3.0]), 1e-6
    training, architecture = Training(rate_z=0.0), Architecture(residual=False, kink_width=width)
    flow = block("linear", "relu", constant([[-1.0], [0.3]]), x, training=training, architecture=architecture)
    path = flow.solve(times, np.append(v0, 0.0)[:, None], np.ones((1, 2)), bias0=-1.0)
    velocity = 0.15 * (x[1] - x[0] * (x[0] @ x[1]) / (x[0] @ x[0]))
    np.testing.assert_allclose(path.v[:, :, 0], v0 + times[:, None] * velocity, atol=5 * width)
    assert path.evaluations < 1500


@pytest.mark.parametrize("width", [1e-3, 1e-6])
@pytest.mark.parametrize("attention", ["linear", "exp"])
def test_theorem_1_holds_where_the_flow_slides(attention, width):
    """The coupled flow ends on the kink, b v = 1, at the point that Theorem 1 leaves it."""
    flow = sliding(attention, rate_z=1.0, width=width)
    z0 = 1.0 if attention == "linear" else 0.0
    path = flow.solve([0.0, 1.0, 10.0], [[2.0], [0.0]], [[z0]], bias0=-1.0)
    invariant = conserved(attention, path.v, path.z)
    assert np.abs(invariant - invariant[0]).max() <= 1e-8
    v, z = path.v[-1, 0, 0], path.z[-1, 0, 0]
    if attention == "linear":  # z² − v² = −3 and v z = 1
        expected = np.sqrt((np.sqrt(13) - 3) / 2)
    else:  # z − v²/2 = −2 and v e^z = 1
        expected = float(mp.findroot(lambda s: s - mp.exp(-2 * s) / 2 + 2, -0.5))
    assert z == pytest.approx(expected, abs=width)
    assert abs(v - (1 / z if attention == "linear" else np.exp(-z))) < 3 * width
    assert path.evaluations < 2000


@pytest.mark.parametrize("attention", list(ATTENTIONS))
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_theorem_1_with_kinks(attention, activation):
    flow, start, _ = draw(attention, seed=4, activation=activation, loss="squared error", kink_width=1e-3)
    path = flow.solve([0.0, 0.5, 1.0], **start)
    assert flow.method == "LSODA"
    assert law_error(flow, path) <= 1e-8


# Bad input

X, W, Z = np.full((2, 3), 1 / 3), np.zeros((4, 2)), np.zeros((1, 3))


def small(attention="exp", activation="gelu", gradient=None, *, query=0, weight=None, training=None, **architecture):
    options = {"training": training or Training(), "architecture": Architecture(**architecture)}
    return block(attention, activation, gradient or constant(1.0), X, query=query, weight=weight, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: small(attention="soft"), "`attention` must be one of linear, exp, softmax"),
        (lambda: small(activation="rleu"), "`activation` must be one of .*did you mean 'relu'"),
        (lambda: small(activation="relu", kink_width=0.0), "`width` must be above 0"),
        (lambda: small(weight=[0.5, 0.6]), "`weight` must sum to 1"),
        (lambda: small(weight=[1.0]), "`weight` must be one for each of 2 samples"),
        (lambda: small(query=[0, -1]), "`query` must be at least 0"),
        (lambda: small(query=[0, 0.5]), "`query` must be one whole number, or one for each of 2 samples"),
        (lambda: small(query=[0, 1, 0]), "`query` must be one whole number, or one for each of 2 samples"),
        (lambda: small(embedding=np.eye(3)), "`embedding` must be of at least 4 columns"),
        (lambda: Training(rate_w=0.0), "`rate_w` must be above 0"),
        (lambda: Training(rate_z=-1.0), "`rate_z` must be at least 0"),
        (lambda: small(temperature=0.0), "`temperature` must be above 0"),
        (lambda: small().solve([1.0], W, Z, b_ref=[0.5, 0.5]), "`b_ref` must be of 3 tokens"),
        (lambda: block("softmax", "gelu", constant(1.0), [[0.0, 0.0]]), "`x` must be positive somewhere in every"),
        (lambda: block("exp", "gelu", constant(1.0), [[-1.0]]), "`x` must be at least 0"),
        (lambda: small().solve([0.0, 1.0], W[1:], Z), "`w0` must be of axes .4 dimensions"),
        (lambda: small().solve([0.0, 1.0], W, Z.T), "`z0` must be .query, token. of shape .1, 3."),
        (
            lambda: small().solve([0.0, 1.0], W, Z, bias0=[1.0]),
            "`bias0` must be one number, or one for each of 2 hidden units",
        ),
        (lambda: small(skip=np.ones((4, 1))).solve([1.0], W, Z), "`w0` must be of the shape of `skip`"),
        (lambda: small().solve([-1.0], W, Z), "`times` must be at least 0"),
        (lambda: small().solve([1.0, 0.5], W, Z), "`times` must be one increasing row"),
        (lambda: small().solve([], W, Z), "`times` must be non-empty"),
        (lambda: small().solve([1.0], W * np.nan, Z), "`w0` must be free of NaN"),
        (lambda: small(attention="linear").solve_folded([1.0], W, Z), "`attention` must be 'exp' for the folded flow"),
        (
            lambda: small(query=[0, 1]).solve_folded([1.0], np.zeros((5, 2)), np.zeros((2, 3))),
            "`z0` must be the logits",
        ),
        (lambda: small(gradient=lambda h: h[0]).solve([1.0], W, Z), "`gradient` must be .sample, hidden"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
