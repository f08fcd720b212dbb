"""Page *Sparse, then dense*: Theorem 4's flow beside Theorem 2's, on the same axes."""

import marimo

app = marimo.App(width="medium", app_title="Sparse, then dense")

with app.setup(hide_code=True):
    from types import SimpleNamespace

    import marimo as mo
    import numpy as np
    from scipy.special import softmax

    from joma import drawing
    from joma.lab import presenting
    from joma.theory import bounce, growth

    PRESETS = {
        "five targets": (1.0, 1.5, 2.0, 2.5, 3.0),
        "two groups": (0.8, 0.9, 1.0, 2.8, 3.0),
        "small targets, no visible bounce": (0.2, 0.3, 0.4, 0.5, 0.6),
        "one target far ahead": (1.0, 1.1, 1.2, 1.3, 3.5),
        "random": (),
    }
    POINTS, HIGHEST = 241, 5.0
    CODE = """\
import numpy as np
from joma.theory import bounce, growth

mu, v0, temperature = {mu}, {v0!r}, {temperature!r}
times = np.linspace(0, {end!r}, {points})
v = growth.nonlinear(mu, times, v0, temperature=temperature)  # Theorem 4
entropy = growth.attention_entropy(v, temperature)
dip = bounce.entropy_bounce(mu, v0, temperature=temperature, normalised=False)
kappa = 2 / temperature
linear = growth.linear(mu, times, v0, kappa=kappa)  # Theorem 2, with the same numbers as saliences
blow_up = growth.blow_up_time(mu, v0, kappa=kappa)
limit = growth.linear_limit(mu, v0, kappa=kappa)
"""


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Sparse, then dense

    Attention that is folded into the MLP multiplies the growth of each weight by $e^{v^2/T}$. With a **nonlinear**
    activation every weight converges to a target $\mu_l$ (Theorem 4), the largest first; with a **linear** one it grows
    without bound (Theorem 2):

    $$\dot v_l = (\mu_l - v_l)\, e^{v_l^2/T} \qquad\qquad \dot v_l = \mu_l\, e^{v_l^2/T}$$

    So attention, $\mathrm{softmax}(v^2/T)$, turns sparse while the largest weight is ahead. Then the others arrive, and
    it turns dense again: its entropy *bounces*. In the linear flow the winner blows up at a finite time $t^*$, and all
    attention stays with it.
    """)
    return


@app.cell(hide_code=True)
def _():
    preset = mo.ui.dropdown(PRESETS, value="five targets", label="Targets")
    draw_again = mo.ui.button(value=0, on_click=lambda count: count + 1, label="Draw random targets")
    mo.hstack([preset, draw_again], justify="start", wrap=True, gap=1.5)
    return draw_again, preset


@app.cell(hide_code=True)
def _(draw_again, preset):
    _drawn = np.random.default_rng(draw_again.value).uniform(0.3, 3.8, 5).round(2).tolist()
    _start = _drawn if draw_again.value or not preset.value else preset.value
    targets = mo.ui.array(
        [
            mo.ui.slider(0.1, 3.9, 0.01, value=value, label=rf"$\mu_{index}$", show_value=True, include_input=False)
            for index, value in enumerate(_start, start=1)
        ]
    )
    start = mo.ui.slider(0.01, 1.0, 0.01, value=0.05, label="start $v_0$", show_value=True)
    temperature = mo.ui.slider(1.0, 4.0, 0.1, value=2.0, label="temperature $T$", show_value=True)
    moment = mo.ui.slider(0.0, 1.0, 0.01, value=0.25, label="time, as a share of the axis", show_value=True)
    mo.hstack(
        [mo.vstack(list(targets.elements)), mo.vstack([start, temperature, moment])], justify="start", wrap=True, gap=3
    )
    return moment, start, targets, temperature


@app.cell(hide_code=True)
def _(moment, start, targets, temperature):
    inputs = SimpleNamespace(
        mu=[float(value) for value in targets.value],
        v0=float(start.value),
        temperature=float(temperature.value),
        share=float(moment.value),
    )
    return (inputs,)


@app.function(hide_code=True)
def solve(mu, v0, temperature):
    """Solve both flows on one grid of times, which ends when the slowest weight has nearly arrived."""
    end = float(np.round(4 * np.exp(-(min(mu) ** 2) / temperature), 4))
    times, kappa = np.linspace(0, end, POINTS), 2 / temperature
    v = growth.nonlinear(mu, times, v0, temperature=temperature)
    return SimpleNamespace(
        end=end,
        times=times,
        v=v,
        entropy=growth.attention_entropy(v, temperature),
        dip=bounce.entropy_bounce(mu, v0, temperature=temperature, normalised=False),
        linear=growth.linear(mu, times, v0, kappa=kappa),
        blow_up=growth.blow_up_time(mu, v0, kappa=kappa),
        limit=growth.linear_limit(mu, v0, kappa=kappa),
    )


@app.function(hide_code=True)
def until_blow_up(solution):
    """Return the linear flow's weights; from the first blow-up on, where they are then: the flow ends there."""
    over = solution.times >= solution.blow_up.min()
    return np.where(over[:, None], solution.limit, solution.linear)


@app.cell(hide_code=True)
def _(inputs):
    solution = solve(inputs.mu, inputs.v0, inputs.temperature)
    code = CODE.format(mu=inputs.mu, v0=inputs.v0, temperature=inputs.temperature, end=solution.end, points=POINTS)
    return code, solution


@app.function(hide_code=True)
@drawing.style()
def draw(solution, temperature, share):
    """Draw the weights of both flows, the entropy of their attention, and attention at the chosen time."""
    figure, axes = drawing.fixed_canvas(2, 2, width=5.2, height=2.45)
    index, winner = round(share * (POINTS - 1)), solution.blow_up.min()
    linear = until_blow_up(solution)
    tokens = range(solution.v.shape[1])
    for token in tokens:
        drawing.theory(axes[0, 0], solution.times, solution.v[:, token], token, str(token + 1))
        drawing.theory(axes[0, 1], solution.times, np.clip(linear[:, token], None, 2 * HIGHEST), token)
    axes[0, 0].set(title="Nonlinear: every weight arrives at its target", ylabel="weight v")
    axes[0, 1].set(title="Linear: the winner takes all")
    axes[0, 1].axvline(winner, color="0.5", linewidth=0.9)
    side = "left" if winner < 0.7 * solution.end else "right"
    axes[0, 1].text(
        min(winner, solution.end),
        0.96 * HIGHEST,
        f" blow-up at t* = {winner:.3g} ",
        va="top",
        ha=side,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes[0, 0].legend(loc="upper left", ncols=len(tokens), title="token", handlelength=1.4, columnspacing=1)
    for panel in axes[0]:
        panel.set(xlim=(0, solution.end), ylim=(0, HIGHEST), yticks=range(6))
    axes[0, 1].tick_params(labelleft=False)
    draw_entropy(axes[1, 0], solution, growth.attention_entropy(linear, temperature))
    shown = np.clip(np.stack([solution.v[index], linear[index]]), None, 100)  # infinite: all attention is there
    for flow, attention in enumerate(softmax(shown**2 / temperature, axis=-1)):
        axes[1, 1].bar(np.arange(len(tokens)) + 0.4 * flow - 0.2, attention, 0.36, color=drawing.COLOURS[1 + flow],
                       hatch=("", "///")[flow], edgecolor="white", label=("nonlinear", "linear")[flow])  # fmt: skip
    axes[1, 1].set(title=f"Attention at t = {solution.times[index]:.3g}", ylim=(0, 1.2), xlabel="token")
    axes[1, 1].set_xticks(list(tokens), [str(token + 1) for token in tokens])
    axes[1, 1].set_axisbelow(True)
    axes[1, 1].legend(loc="upper left", ncols=2)
    for panel in (axes[0, 0], axes[0, 1], axes[1, 0]):
        panel.axvline(solution.times[index], color="0.3", linewidth=0.8, linestyle=":")
    return figure


@app.function(hide_code=True)
def draw_entropy(panel, solution, linear_entropy):
    """Draw the entropy of both flows, and the bounce."""
    drawing.theory(panel, solution.times, solution.entropy, 1, "nonlinear")
    drawing.theory(panel, solution.times, linear_entropy, 2, "linear")
    if np.isfinite(solution.dip.time) and solution.dip.time <= solution.end:
        panel.plot(solution.dip.time, solution.dip.least, **drawing.marker(1))
    panel.axhline(solution.dip.limit, color=drawing.COLOURS[1], linewidth=0.7)
    top = 1.2 * np.log(solution.v.shape[1])
    panel.set(title="Entropy of attention", xlabel="time", ylabel="nats", xlim=(0, solution.end), ylim=(-0.03, top))
    panel.legend(loc="upper right", ncols=2)


@app.function(hide_code=True)
def describe(solution):
    """Say in one sentence what the picture shows."""
    dip, winner = solution.dip, float(solution.blow_up.min())
    if dip.depth <= 0 or dip.least >= dip.start:
        course = f"Entropy does not bounce: it goes from {dip.start:.2f} to {dip.limit:.2f} nats"
    else:
        back = f"and comes back to {dip.limit:.2f} ({dip.depth:.2g} nats)"
        course = f"Entropy falls from {dip.start:.2f} to {dip.least:.2f} nats at t = {dip.time:.3g} {back}"
    return f"{course}; in the linear flow token {int(solution.blow_up.argmin()) + 1} blows up at t = {winner:.3g}."


@app.cell(hide_code=True)
def _(inputs, solution):
    sentence = describe(solution)
    mo.vstack(
        [
            presenting.picture(draw(solution, inputs.temperature, inputs.share), sentence),
            mo.md(sentence),
        ]
    )
    return (sentence,)


@app.cell(hide_code=True)
def _(code):
    presenting.copy_as_python(code)
    return


@app.cell(hide_code=True)
def _():
    presenting.read_on(
        functions="joma.theory.growth.nonlinear joma.theory.growth.linear joma.theory.bounce.entropy_bounce",
        documents="docs/notation.md docs/deviations.md",
        study="sparse-dense",
    )
    return


if __name__ == "__main__":
    app.run()
