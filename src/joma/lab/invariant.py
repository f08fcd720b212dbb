# A cell shows its last expression, which is therefore not unused.
# pyright: reportUnusedExpression=false
"""Page *The invariant*: a block is trained, and its attention logits are predicted from its MLP's weights."""

import marimo

app = marimo.App(width="medium", app_title="The invariant")

with app.setup(hide_code=True):
    from functools import lru_cache

    import marimo as mo

    from joma import drawing
    from joma.arguments import InputError
    from joma.lab import presenting
    from joma.models import ACTIVATIONS
    from joma.studies.theorems import watched_block
    from joma.studies.theorems.invariance_training import BREAKERS

    RATES, KAPPAS, STEPS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0), (0.25, 0.5, 1.0, 2.0, 4.0), 300
    SHOWN_TERMS = {
        "drift": "drift of mean attention",
        "gap": "gap: attention and gradient vary together",
        "finite_steps": "finite steps of SGD",
        "unexplained": "unexplained: the law is broken",
    }
    CODE = """\
from joma.studies.theorems import watched_block

setting = watched_block.WatchedBlock(
    attention={attention!r}, activation={activation!r}, breaker={breaker!r}, rates=({rate!r},), kappas=({kappa!r},),
    steps={steps},
)
trained = watched_block.train(setting)
account = watched_block.account(trained, {attention!r}, rate={rate!r}, kappa={kappa!r})
at_step = account.sel(step={step})  # law, predicted, drift, gap, finite_steps, unexplained
"""


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # The invariant

    Attention and the MLP above it are trained by the same gradients. So the attention logits $z$ need not be looked at:
    they follow from the weights $v_k$ of the hidden units (Theorem 1). With the ratio of learning rates
    $\kappa = \eta_z/\eta_w$,

    $$\textrm{exp:}\;\; \sum_m z_m = \sum_m z_m(0) + \frac{\kappa}{2} \sum_k \left[v_k^2 - v_k(0)^2\right]
    \qquad \textrm{softmax: the same, less } b_{\textrm{ref}} \textrm{ times its sum over tokens}$$

    For exp and linear attention this is exact but for the finite steps of SGD (with linear attention for $z_m^2/2$ in
    place of $z_m$). For softmax it is an approximation; the *ledger* lists what lies between it and the truth, term by
    term. A small block is trained here, at all learning rates of the sliders at once. Break the law and see what the
    ledger cannot explain.
    """)
    return


@app.cell(hide_code=True)
def _():
    attention = mo.ui.dropdown(["softmax", "exp", "linear"], value="softmax", label="Attention")
    activation = mo.ui.dropdown([*ACTIVATIONS], value="linear", label="Activation")
    breaker = mo.ui.dropdown(
        {"nothing": "none", **{text: name for name, text in BREAKERS.items()}}, value="nothing", label="Break it by"
    )
    mo.hstack([attention, activation, breaker], justify="start", wrap=True, gap=1.5)
    return activation, attention, breaker


@app.cell(hide_code=True)
def _():
    rate = mo.ui.slider(steps=RATES, value=0.5, label=r"learning rate $\eta_w$", show_value=True)
    kappa = mo.ui.slider(steps=KAPPAS, value=1.0, label=r"ratio $\kappa = \eta_z/\eta_w$", show_value=True)
    step = mo.ui.slider(0, STEPS, 5, value=STEPS, label="step", show_value=True)
    mo.hstack([rate, kappa, step], justify="start", wrap=True, gap=2)
    return kappa, rate, step


@app.cell(hide_code=True)
def _(activation, attention, breaker, kappa, rate, step):
    inputs = {
        "attention": attention.value,
        "activation": activation.value,
        "breaker": breaker.value,
        "rate": float(rate.value),
        "kappa": float(kappa.value),
        "step": int(step.value),
    }
    return (inputs,)


@app.function(hide_code=True)
@lru_cache(maxsize=8)
def trained(attention, activation, breaker):
    """Train the block at all learning rates of the sliders, once for each choice."""
    setting = watched_block.WatchedBlock(attention, activation, breaker, rates=RATES, kappas=KAPPAS, steps=STEPS)
    return watched_block.train(setting)


@app.cell(hide_code=True)
def _(inputs):
    try:
        account = watched_block.account(
            trained(inputs["attention"], inputs["activation"], inputs["breaker"]),
            inputs["attention"],
            rate=inputs["rate"],
            kappa=inputs["kappa"],
        )
        trouble = None
    except InputError as error:  # the rate is too large
        account, trouble = None, error
    code = CODE.format(**inputs, steps=STEPS)
    return account, code, trouble


@app.function(hide_code=True)
@drawing.style()
def draw(account, step):
    """Draw logits over training, the sizes of the ledger's terms, and prediction against truth at one step."""
    figure, axes = drawing.fixed_canvas(1, 3, width=3.75, height=3.2)
    left, middle, right = axes[0]
    for index, token in enumerate(drawing.evenly_spaced(account.sizes["token"], 4)):
        drawing.theory(left, account.step, account.predicted[:, 0, token], index)
        drawing.measured(left, account.step[::25], account.law[::25, 0, token], index)
    left.axvline(step, color="0.3", linewidth=0.8, linestyle=":")
    left.set(title="Lines: predicted. Points: trained", xlabel="step", ylabel="sum of logits, four tokens")
    sizes = account["size"].mean("seed").transpose("term", "step")
    colours = [drawing.COLOURS[index] for index in (5, 1, 3, 2)]
    middle.stackplot(account.step, sizes, colors=colours, labels=[SHOWN_TERMS[term] for term in sizes.term.values])
    middle.axvline(step, color="0.3", linewidth=0.8, linestyle=":")
    middle.set(title="What the prediction leaves out", xlabel="step", ylabel="share of the change of z")
    middle.set(xlim=(0, STEPS), ylim=(0, 1.6 * max(float(sizes.sum("term").max()), 1e-3)))
    middle.legend(loc="upper left", fontsize=7.5)
    draw_agreement(right, account.sel(step=step))
    return figure


@app.function(hide_code=True)
def draw_agreement(panel, moment):
    """Draw the predicted against the trained logits of all tokens and seeds, before and after the ledger."""
    ledger = moment.drift + moment.gap + moment.finite_steps
    ends = [float(moment.law.min()), float(moment.law.max())]
    drawing.theory(panel, ends, ends, 0, "agreement")
    panel.plot(moment.law.values.ravel(), moment.predicted.values.ravel(), label="predicted", **drawing.marker(1))
    corrected = (moment.predicted - ledger).values.ravel()
    panel.plot(moment.law.values.ravel(), corrected, label="less the ledger", **drawing.marker(2))
    panel.set(title=f"All tokens and seeds at step {int(moment.step)}", xlabel="trained", ylabel="predicted")
    panel.legend(loc="upper left")


@app.function(hide_code=True)
def describe(account, step):
    """Say in one sentence how good the prediction is at a step."""
    moment = account.sel(step=step)
    if step == 0:
        return "Nothing is trained yet: move the step."
    error, rest = float(moment.error.mean()), float(moment["size"].sel(term="unexplained").mean())
    left = "nothing but rounding" if rest < 1e-9 else f"{100 * rest:.3g} %"
    return (
        f"At step {step} the prediction from the weights is off by {100 * error:.3g} % of the change of the logits, in "
        f"the mean over {account.sizes['seed']} seeds; the ledger leaves {left} unexplained."
    )


@app.cell(hide_code=True)
def _(account, inputs, trouble):
    if trouble is not None:
        sentence = str(trouble)
        _view = presenting.problem(trouble)
    else:
        sentence = describe(account, inputs["step"])
        _view = mo.vstack([presenting.picture(draw(account, inputs["step"]), sentence), mo.md(sentence)])
    _view
    return (sentence,)


@app.cell(hide_code=True)
def _(code):
    presenting.copy_as_python(code)
    return


@app.cell(hide_code=True)
def _():
    presenting.read_on(
        functions="joma.studies.theorems.watched_block.train joma.theory.invariants.predict "
        "joma.theory.invariants.ledger",
        documents="docs/notation.md docs/deviations.md",
        study="invariance",
    )
    return


if __name__ == "__main__":
    app.run()
