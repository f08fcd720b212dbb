"""The tables of `docs/value-path.md`, and the sentences about them, have the numbers of the stored run."""

import pytest

from test_deviations import Stored
from test_docs import ROOT

PAGE = " ".join((ROOT / "docs" / "value-path.md").read_text(encoding="utf-8").split()).replace("−", "-")
ROUNDING = 1e-12  # what is smaller differs between processors


@pytest.fixture(scope="module")
def stored():
    return Stored("value-invariant")


def error(values):
    """Return mean and range over seeds as the page writes them, or that only rounding is left."""
    if float(values.max()) <= ROUNDING:
        return "≤ 1e-12"
    mean, low, high = (
        f"{value:.0f}" if value >= 10 else f"{value:#.2g}"
        for value in (float(values.mean()), float(values.min()), float(values.max()))
    )
    return f"{mean} ({low} to {high})"


def correlation(values):
    mean, low, high = (f"{float(value):.2f}" for value in (values.mean(), values.min(), values.max()))
    return f"{mean} ({low} to {high})"


def assert_row(label, cells):
    assert f"| {label} | {' | '.join(cells)} |" in PAGE


LAWS = {
    "exp": "exp | free | `Σ_m z/η_z - ½‖p‖²/η_V`",
    "linear": "linear | free | `½Σ_m z²/η_z - ½‖p‖²/η_V`",
    "softmax": "softmax | free | with the ledger",
    "keys linear": "linear | q·k | `‖k‖²/η_K - ‖p‖²/η_V`",
    "keys exp": "exp | q·k | the key ledger",
    "keys softmax": "softmax | q·k | the key ledger",
}


def test_the_laws(stored):
    run = stored.run
    assert run.law.values.tolist() == list(LAWS)
    for law, label in LAWS.items():
        of_law = run.sel(law=law)
        alone = of_law.sgd.isel(step=-1).sel(rates="equal", correction="none")
        assert_row(label, [error(of_law.flow_violation), error(of_law.sgd_residual), error(alone)])
    change = run.flow_change.isel(time=-1)
    assert f"changes by {float(change.min()):.2f} to {float(run.flow_change.max()):.1f} along these flows" in PAGE
    assert f"the bound of rounding is {float(run.rounding):.0e}" in PAGE


def test_what_the_error_of_plain_sgd_depends_on(stored):
    run = stored.run.sel(rates="equal", law=["exp", "linear"])
    falls = (run.loss.diff("step") <= 0).all("step")
    errors = run.sgd.isel(step=-1).sel(correction="none")
    predicted = errors < 0.02
    assert bool(falls.where(predicted, other=True).all())
    words = {3: "three", 6: "six", 10: "ten"}
    numbers = " and ".join(words[int(count)] for count in predicted.sum("seed"))
    largest = (
        f"it ends at {float(errors.where(predicted).max()):.4f} or less in {numbers} of {words[run.sizes['seed']]}"
    )
    assert f"{largest} seeds, whose loss falls from record to record, and above 0.02 in the others" in PAGE
    assert not (falls & ~predicted).any()
    assert "in each of these a record shows the loss rise" in PAGE


ABOVE = {
    "units": "hidden units",
    "norm": "LayerNorm",
    "head": "MLP and head",
    "skip": "residual around the MLP",
    "all": "all of them",
}


def test_what_stands_above_attention(stored):
    above = stored.run.above.isel(step=-1)
    assert above.network.values.tolist() == list(ABOVE)
    for network, label in ABOVE.items():
        assert_row(label, [error(above.sel(network=network, weights=name)) for name in ("value", "mlp", "joma")])


def test_one_premise_broken(stored):
    broken = stored.run.broken.isel(step=-1)
    first, *cells = (error(broken.sel(breaker=name)) for name in ("none", "learned", "overlap", "adam", "decay"))
    assert broken.sizes["breaker"] == 5
    assert_row(first, cells)


RUNGS = {
    "block": "one query, all data in each step",
    "positions": "every position a query",
    "minibatch": "minibatches",
    "product": "logits q·k",
    "learned": "learned embeddings",
    "adam": "Adam",
}


def test_the_ladder(stored):
    last = stored.run.isel(ladder_step=-1)
    assert last.rung.values.tolist() == list(RUNGS)
    for rung, label in RUNGS.items():
        alone, full = (error(last.ladder_error.sel(rung=rung, correction=name)) for name in ("none", "full"))
        assert_row(label, [alone, correlation(last.ladder_correlation.sel(rung=rung)), full])


def test_what_the_ladder_decides(stored):
    """Correlations up to logits q·k are above zero, later intervals contain it; one error barely is below 1."""
    for rung in RUNGS:
        low, high = stored.measured[f"correlated-{rung}"]["interval"]
        assert (low > 0) == (rung not in ("learned", "adam")), rung
        assert high > 0, rung
        assert stored.measured[f"informative-{rung}"]["interval"][1] > 1, rung
    end = stored.measured["informative-block"]["interval"][1]
    assert f"there the 95 % interval of the error ends at {end:.4f} in this run, which does not decide" in PAGE


ARMS = {
    "sgd": "SGD",
    "sgd half": "SGD, half the learning rate",
    "decay": "SGD, weight decay 0.01",
    "adam": "Adam",
    "adamw": "AdamW, weight decay 0.01",
}


def test_the_laws_of_a_head(stored):
    end = stored.run.isel(ladder_step=-1)
    assert end.head_arm.values.tolist() == list(ARMS)
    assert end.head_law.values.tolist() == ["query_key", "value_output"]
    for arm, label in ARMS.items():
        of_arm = end.sel(head_arm=arm)
        drifts = [
            of_arm[name].sel(head_law=law) for name in ("head_drift", "head_drift_decayed") for law in of_arm.head_law
        ]
        left_over = stored.run.head_residual.sel(head_arm=arm).max(("head_law", "ladder_step"))
        assert_row(label, [*map(error, drifts), error(left_over)])
    assert f"the bound of rounding is {float(end.head_rounding):.0e}" in PAGE


def sentences_on_heads(stored):
    end, measured = stored.run.isel(ladder_step=-1), stored.measured
    assert {stored.verdicts[f"head-{name}"] for name in ("squares", "half-rate", "decay", "adam", "adam-kept")} == {
        "holds"
    }
    yield f"is 1 to within {measured['head-half-rate']['max']:.2f} in every seed"
    decayed = end.sel(head_arm="decay")
    assert float(abs(decayed.head_size / decayed.head_factor - 1).max()) < 0.01
    yield f"falls to {float(decayed.head_size.mean()):.2f} of that at the start, where `e^{{-2λt}}` is"
    yield f"`e^{{-2λt}}` is {float(decayed.head_factor):.2f}"
    yield f"from the law with decay, the drift is at most {float(decayed.head_drift_decayed.max()):.3f}"
    for name, words in {"head_drift": "leaves the laws** by", "head_drift_shifted": "shifted by one, drift by"}.items():
        drift = 100 * end[name].sel(head_arm="adam")
        yield f"{words} {float(drift.min()):.0f} to {float(drift.max()):.0f} %"
    ratio = measured["head-adam-kept"]
    yield f"{ratio['mean']:.2f} times theirs (95 % interval {stored.interval('head-adam-kept')})"
    assert ratio["max"] > 1
    adam, sgd = (float(end.head_loss.sel(head_arm=arm).mean()) for arm in ("adam", "sgd"))
    yield f"its loss ends at {adam:.2f} nats, that of SGD at {sgd:.2f}"


def test_the_sentences_on_the_laws_of_a_head(stored):
    assert [sentence for sentence in sentences_on_heads(stored) if sentence not in PAGE] == []
