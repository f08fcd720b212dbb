"""What `docs/ladder.md` says of the stored run is what the run says: the argument about the speed of logits."""

from joma.studies.theorems.ladder_training import optimal_entropy, settled_entropy, share_regained
from test_deviations import Stored
from test_docs import ROOT

PAGE = " ".join((ROOT / "docs" / "ladder.md").read_text(encoding="utf-8").split())


def sentences(stored):
    run, measured = stored.run, stored.measured
    steps = "same-optimum", "early-weights", "product-speed", "overshoot", "no-overshoot", "speed-free", "speed-product"
    assert {stored.verdicts[name] for name in steps} == {"holds"}
    yield "Each step of the argument is a claim, and each holds"

    assert float(run.trained_optimum_gradient.max()) < 1e-6
    yield "in the stored run it is below 1e-6"
    yield f"differ by at most {measured['same-optimum']['max']:.3f} ln M"
    optima = run.trained_optimum_entropy
    yield f"The optimum's entropy is {float(optima.min()):.2f} to {float(optima.max()):.2f} ln M in the eight seeds"

    slow = {arm: share_regained(settled_entropy(run, arm)) for arm in ("all-free", "all-product-slow")}
    assert float(slow["all-free"].max()) == 0
    assert float(slow["all-product-slow"].max()) <= 1e-3
    yield "product logits with a tenth of the learning rate at most 0.1 %"
    for claim, words in {
        "speed-free": "ten times the learning rate {0:.0f} % (95 % interval {1:.0f} to {2:.0f} %)",
        "speed-product": "product logits {0:.0f} % ({1:.0f} to {2:.0f} %)",
    }.items():
        yield words.format(*(100 * value for value in (measured[claim]["mean"], *measured[claim]["interval"])))

    low, high = measured["early-weights"]["interval"]
    yield f"by {measured['early-weights']['mean']:.2f} ln M ({low:.2f} to {high:.2f}; `early-weights`)"
    yield f"Product logits grow {measured['product-speed']['mean']:.0f} times as fast as free ones"
    low, high = measured["overshoot"]["interval"]
    yield f"by {measured['overshoot']['mean']:.3f} ln M ({low:.3f} to {high:.3f}; `overshoot`)"
    high, low = measured["no-overshoot"]["interval"]
    yield f"by {-measured['no-overshoot']['mean']:.3f} ln M ({-low:.3f} to {-high:.3f}; `no-overshoot`)"

    last = {"free": settled_entropy(run, "all-free-fast"), "product": settled_entropy(run, "all-product")}
    left = {logits: entropy.isel(trained_step=-1) - optimal_entropy(run, logits) for logits, entropy in last.items()}
    free, product = abs(left["free"]).max(), left["product"]
    yield f"free ones within {float(free):.3f} ln M of it"
    yield f"product logits {float(product.min()):.3f} to {float(product.max()):.3f} above"

    low, high = measured["gelu-to-the-optimum"]["min"], measured["gelu-to-the-optimum"]["max"]
    yield f"in each of the first eight seeds by {low:.2f} to {high:.2f}"


def test_the_page_has_the_numbers_of_the_stored_run():
    assert [sentence for sentence in sentences(Stored("ladder")) if sentence not in PAGE] == []
