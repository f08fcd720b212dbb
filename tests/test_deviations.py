"""What `docs/deviations.md` says of stored runs is what these say: each sentence is made from a run and looked up."""

import pytest

from joma.runs import open_run, read_claims
from joma.studies.hierarchy import layer_entropy
from joma.studies.symmetry import addition_measures
from joma.studies.theorems.ladder_measures import arrived, arrived_cases, came_back, fall
from joma.study import mean_interval
from test_docs import ROOT, RUNS

DEVIATIONS = " ".join((ROOT / "docs" / "deviations.md").read_text(encoding="utf-8").split()).replace("−", "-")


class Stored:
    """A stored run, and the measured values of its claims as text."""

    def __init__(self, study):
        (path,) = (path for path in RUNS if path.parent.name == study)
        self.run = open_run(path)
        self.measured = {claim["name"]: claim["measured"] for claim in read_claims(path).claims}

    def mean(self, claim, digits=2):
        return f"{self.measured[claim]['mean']:.{digits}f}"

    def interval(self, claim, digits=2):
        low, high = self.measured[claim]["interval"]
        return f"{low:.{digits}f} to {high:.{digits}f}"

    def range(self, claim, digits=2):
        return f"{self.measured[claim]['min']:.{digits}f} to {self.measured[claim]['max']:.{digits}f}"


def span(values, digits=2):
    """Return the smallest and the largest value as text."""
    return f"{float(values.min()):.{digits}f} to {float(values.max()):.{digits}f}"


def listed(values, digits=2):
    *first, last = (f"{value:.{digits}f}" for value in values)
    return f"{', '.join(first)} and {last}"


def said_of_alignment():
    stored = Stored("alignment")
    chance, start = stored.run.chance, stored.run.alignment.sel(arm="trained").isel(step=0)
    low, high = stored.measured["learned-s0"]["interval"]
    yield f"Gaussian numbers in place of hidden units reach {span(chance.mean('seed'))}"
    before = [span(start.isel(latent_layer=layer, layer=layer).mean("seed")) for layer in (0, 1)]
    yield f"the untrained network {before[0]} for s = 0 and {before[1]} for s = 1"
    lowered = f"by {-stored.measured['learned-s0']['mean']:.3f} (95 % interval {-high:.3f} to {-low:.3f})"
    yield f"*lowers* the alignment of s = 0 {lowered}"
    yield f"raises that of s = 1 by {stored.mean('learned-s1', 3)} ({stored.interval('learned-s1', 3)})"
    yield f"adds {stored.mean('frozen-s1', 3)} over frozen and {stored.mean('uniform-s1', 3)} over uniform attention"
    yield f"({stored.interval('linear-s0', 3)} for s = 0, {stored.interval('linear-s1', 3)} for s = 1)"
    cells = [f"table-{classes}-{children}" for classes in (20, 30) for children in (2, 3)]
    means = {sizes: [stored.measured[f"{cell}-{sizes}-s0"]["mean"] for cell in cells] for sizes in ("10-20", "20-30")}
    yield f"the published range ({min(means['10-20']):.2f} to {max(means['10-20']):.2f})"
    yield f"their means are {listed(means['20-30'])}, and each interval contains"


def said_of_hierarchy_order():
    stored = Stored("hierarchy-order")
    run, height = stored.run, stored.run.height.sel(tree="deep")
    gains = [gain.where(height == 3).mean(("pair", "seed")) for gain in (run.gain_single, run.gain.sel(tree="deep"))]
    lost = [f"{-float(gain.min()):.2f} nats at step {int(gain.idxmin())}" for gain in gains]
    yield f"being early is {stored.mean('order-1')} with one layer and {stored.mean('order-3')} with three"
    yield f"single seeds reach {stored.measured['order-3']['max']:.2f}"
    yield f"by {lost[0]} with one layer and by {lost[1]} with three"
    yield f"{stored.mean('high-1')} nats with one layer (95 % interval {stored.interval('high-1')})"
    yield f"and {stored.mean('high-3')} with three ({stored.interval('high-3')})"
    yield f"by {stored.mean('above-siblings')} layers above siblings ({stored.interval('above-siblings')})"
    yield f"by {stored.mean('higher')} above the same tokens"
    yield f"the latents between them ({stored.interval('higher')}), and by {stored.mean('higher-matched')} where"
    yield f"the same co-occurrence ({stored.interval('higher-matched')})"
    low, high = stored.measured["higher"]["min"], stored.measured["higher"]["max"]
    yield f"range from {low:.2f} to {high:.2f} in the second"
    entropy = run.entropy_single.mean("seed")
    first, least, last = (float(value) for value in (entropy[0], entropy.min(), entropy[-1]))
    yield f"falls from {first:.2f} to {least:.2f} nats and comes back to {last:.2f} (means over seeds)"
    bounce = layer_entropy.layer_bounce(run, 3)
    single, *layers = (int((values > 0).sum()) for values in (layer_entropy.layer_bounce(run, 1), *bounce.T))
    yield f"beyond noise in {single} of 24 seeds"
    yield f"comes back in {layers[0]}, {layers[1]} and {layers[2]} of 24 seeds in layers 1 to 3"
    low, high = mean_interval(bounce.sel(layer=1).values)
    yield f"holds for layer 1 of three ({low:.3f} to {high:.3f} of the start), although {24 - layers[0]} of 24 seeds"


def said_of_addition():
    stored = Stored("addition")
    run, parts = stored.run, ("attention", "mlp", "both")
    loss = {part: f"{stored.mean(f'{part}-residuals')}" for part in parts}
    between = {part: stored.interval(f"{part}-residuals") for part in parts}
    yield f"by {loss['attention']} without those around attention (95 % interval {between['attention']})"
    yield f"by {loss['mlp']} without those around the MLPs ({between['mlp']})"
    yield f"by {loss['both']} without both ({between['both']})"
    most = [100 * float(addition_measures.final_accuracy(run, f"{part} all").max()) for part in parts]
    yield f"at most {most[0]:.1f} %, {most[1]:.1f} % and {most[2]:.1f} % of the sums right"
    steps = run.steps_to_99.sel(arm="none causal")
    yield f"99 % are right after {int(steps.min()):,} to {int(steps.max()):,} steps"
    share = {
        (arm, kind): addition_measures.own_share(run, arm, kind).mean("seed")[[0, -1]].values
        for arm in ("none causal", "mlp all")
        for kind in ("correlation", "cka")
    }
    yield f"the share is {share['none causal', 'correlation'][1]:.2f} by correlation, larger than without by "
    yield f"{stored.mean('slices-without')} ({stored.interval('slices-without')})"
    yield f"and {share['none causal', 'cka'][1]:.2f} by CKA, larger than without by {stored.mean('slices-without-cka')}"
    yield f"({stored.interval('slices-without-cka')}). So `slices-without-cka` holds"
    yield "falls from {:.2f} to {:.2f} in training".format(*share["none causal", "cka"])
    yield "stays at {:.2f} and {:.2f} without those around the MLPs".format(*share["mlp all", "cka"])
    yield f"the least of its seeds has {stored.measured['slices-without-cka']['min']:.2f}"


def said_of_position_emergence():
    stored = Stored("position-emergence")
    random = stored.run.random_adjacency.sel(init="small").isel(level=-1).mean("seed")
    text, sums = (listed(random.sel(task=task).values) for task in ("text", "addition"))
    yield f"is {text} on text and {sums} on sums"
    highest = stored.run.adjacency.mean("seed").max("level")
    rises = ["from {:.2f} to {:.2f}".format(*highest.sel(task=task)[[0, -1]].values) for task in ("text", "addition")]
    yield f"rises {rises[0]} on text and {rises[1]} on sums"
    beyond = [stored.mean(f"adjacency-trained-{task}") for task in ("text", "addition")]
    yield f"beyond that of random orders by {beyond[0]} and {beyond[1]}"


def said_of_activation_control():
    stored = Stored("activation-control")
    run = stored.run
    yield f"entropy falls by {span(run.fall.sel(activation='linear'))} nats with a linear MLP"
    recovery = {name: span(run.recovery.sel(activation=name)) for name in ("linear", "relu", "gelu", "silu")}
    yield f"and recovers by {recovery['linear']} (p ≤ {float(run.p_value.sel(activation='linear').max()):g}"
    yield f"by {recovery['relu']} with ReLU, {recovery['gelu']} with GELU and {recovery['silu']} with SiLU"
    yield f"by {stored.mean('apart', 3)} of the start more than the linear one"
    yield f"with an interval of {stored.interval('apart')} over seeds"


def said_of_bounce_cause():
    stored = Stored("bounce-cause")
    run = stored.run
    recovery = {arm: f"{float(run.recovery.sel(arm=arm).mean()):.2f}" for arm in run.arm.values}
    yield f"Entropy recovers by {recovery['free']} nats with nothing changed, by {recovery['linear']} with a linear MLP"
    yield f"and by {float(run.chance.sel(arm='free').mean()):.2f} from noise alone"
    yield f"a nonlinear one adds a little: {stored.interval('nonlinear-more')} nats"
    yield f"With the MLP frozen at its start entropy recovers by {recovery['mlp']} nats"
    yield f"start entropy recovers by {listed(run.recovery.sel(arm='value-path').values)} nats in the three seeds"
    assert float(run.recovery.sel(arm="value-path").mean()) < float(run.recovery.sel(arm="free").mean()) / 3
    yield f"less than half remains is not decided (interval {stored.interval('less-value-path')})"
    yield f"alone suffices: {recovery['value']} nats with W_V frozen, {recovery['projection']} with W_O frozen"
    noise = float(run.chance.sel(arm="value-path-embedding").mean())
    yield f"nothing returns ({recovery['value-path-embedding']} nats; noise alone {noise:.2f})"
    valid = [f"{float(run.valid_loss.isel(step=-1).sel(arm=arm).mean()):.2f}" for arm in ("sgd", "free")]
    yield f"{recovery['sgd']} nats in every seed, at a validation loss of {valid[0]} against {valid[1]}"
    yield f"recovers by {recovery['depth-5']} nats, with two layers by {recovery['depth-2']}"
    yield f"With the MLP and the embeddings frozen it recovers by {recovery['mlp-embedding']} nats"
    best = [
        f"{float(run.best_entropy.isel(attention_step=-1).sel(start=start).mean()):.2f}" for start in ("end", "fresh")
    ]
    yield f"ends at {best[0]} nats from its final W_Q and W_K and at {best[1]} from fresh ones"
    entropy = run.entropy.sel(arm="free").mean(("layer", "head"))
    least, last = entropy.min("step").mean(), entropy.isel(step=-1).mean()
    yield f"had come from {float(least):.2f} to {float(last):.2f}"
    assert stored.measured["memorises"]["max"] < 0.001
    yield f"it returns by {100 * stored.measured['memorised']['mean']:.0f} % of the start"
    yield f"with an interval of {stored.interval('memorised')} over three seeds"
    yield f"with W_V and W_O frozen (interval {stored.interval('late-less-value-path')})"
    yield f"memorised text (interval {stored.interval('late-memorised')} of the start)"


def said_of_ladder():
    stored = Stored("ladder")
    run, measured = stored.run, stored.measured
    depth = fall(run.entropy.sel(activation="linear", world="overlap"))
    low, high = (f"{100 * float(bound):.0f}" for bound in (depth.min(), depth.max()))
    yield f"in {run.sizes['seed']} of {run.sizes['seed']} seeds entropy falls, by {low} to {high} % of ln M"
    yield f"regains {100 * measured['full-bounce']['min']:.1f} % or more of its fall"
    yield f"under a constant gradient by at most {100 * measured['constant']['max']:.1f} % of the fall"
    cases = arrived_cases(run, "random")
    settled, distance = int(cases.case_end.notnull().sum()), float(abs(cases.case_end - cases.case_optimum).mean())
    yield f"In {settled} random worlds with linear units entropy ends on average {distance:.3f} ln M"
    returned = int((came_back(run) & arrived(run)).isel(case=run.family == "random").sum())
    yield f"attention comes back in {returned} of them"


def said_of_invariant_text():
    stored = Stored("invariant-text")
    run, end = stored.run, stored.run.isel(step=-1)
    softmax, exp = (run.correlation.isel(sum=0).sel(law=law) for law in ("softmax", "exp"))
    yield f"ends at correlations of {span(softmax[:, -1])}, which is {stored.range('correlation-softmax')} beyond"
    yield f"nothing is left beyond chance ({stored.range('beyond-frequency-softmax')})"
    yield f"correlates {span(exp.sel(step=10_000))} after 10,000 steps, and {span(exp[:, -1])} at the end"
    yield f"where chance ends at {float(end.null.sel(law='exp', side='high').mean()):.2f}"
    yield f"relative errors are {span(end.error)}"
    yield f"{stored.mean('orthogonal-embedding', 0)} times those of random directions for embeddings"
    yield f"at {stored.mean('orthogonal-value', 0)} times for the value path"
    yield f"({stored.mean('scale-softmax', 3)}, interval {stored.interval('scale-softmax', 3)})"
    yield f"for exp it is undecided ({stored.interval('scale-exp', 3)})"
    yield f"{stored.mean('scale-ratio-softmax', 1)} and {stored.mean('scale-ratio-exp', 1)})"


SENTENCES = (
    said_of_alignment,
    said_of_hierarchy_order,
    said_of_addition,
    said_of_position_emergence,
    said_of_activation_control,
    said_of_bounce_cause,
    said_of_ladder,
    said_of_invariant_text,
)


@pytest.mark.parametrize("sentences", SENTENCES, ids=lambda function: function.__name__)
def test_the_numbers_of_stored_runs_are_those_of_the_deviations(sentences):
    missing = [sentence for sentence in sentences() if sentence not in DEVIATIONS]
    assert missing == []
