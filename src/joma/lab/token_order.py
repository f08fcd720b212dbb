# A cell shows its last expression, which is therefore not unused.
# pyright: reportUnusedExpression=false
"""Page *Token order*: rearrange a word by hand and see which predictions of a decoder move."""

import marimo

app = marimo.App(width="medium", app_title="Token order")

with app.setup(hide_code=True):
    from functools import lru_cache
    from types import SimpleNamespace

    import marimo as mo
    import numpy as np
    import torch

    import joma
    from joma import drawing
    from joma.arguments import InputError
    from joma.lab import presenting
    from joma.models import Decoder, DecoderConfig
    from joma.probes import moved_predictions

    ENCODINGS, MASKS, LAYERS = ("none", "sinusoidal", "learned", "rotary"), ("full", "causal"), (1, 2, 3, 4)
    LONGEST, SEEDS, FLOOR = 6, 3, 1e-17
    CODE = """\
import joma
import torch
from joma.models import Decoder, DecoderConfig
from joma.probes import moved_predictions

word, order = {word!r}, {order}
tokens = [ord(letter) - ord("A") for letter in word]
config = DecoderConfig(
    vocabulary=26, width=16, heads=2, layers={layers}, positions={encoding!r}, mask={mask!r}, length={longest}
)
generators = [torch.Generator().manual_seed(seed) for seed in range({seeds})]
model = Decoder(config, generators=generators, dtype=torch.float64)
moved = moved_predictions(model, tokens, order)  # by seed and place in the new word, relative to the spread
gap = joma.permutation_gap(model, [tokens])  # the most that any order of the earlier letters moves the last prediction
"""


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Which predictions depend on the order of the tokens?

    A decoder with random weights reads a word, letter by letter, and predicts a next letter after each. Exchange two
    letters before the last one: does the prediction after the last letter move? Attention is a weighted *sum* over what
    a position sees, and a sum does not know the order of its terms:

    $$u_i = \sum_j a_{ij} W_V x_j, \qquad a_{ij} \propto e^{q(x_i)\cdot k(x_j)}$$

    - **No encoding, full mask**: every prediction stays with its letter, at any depth.
    - **No encoding, causal mask, one layer**: the last letter sees all others, so its prediction stays.
    - **From two causal layers on**, or with any **encoding**, it moves: the first layer has written at each place what
      came before.
    """)
    return


@app.cell(hide_code=True)
def _():
    word = mo.ui.text(value="SPARSE", label="Word, 3 to 6 letters", max_length=12)
    encoding = mo.ui.dropdown([*ENCODINGS], value="none", label="Positional encoding")
    mask = mo.ui.dropdown([*MASKS], value="causal", label="Mask")
    mo.hstack([word, encoding, mask], justify="start", wrap=True, gap=1.5)
    return encoding, mask, word


@app.function(hide_code=True)
def letters(text):
    """Return the letters of a word in capitals; raise `InputError` if it is too short, too long or no word."""
    word = text.strip().upper()
    if not (word.isascii() and word.isalpha() and 3 <= len(word) <= LONGEST):
        raise InputError("word", f"3 to {LONGEST} letters from A to Z", repr(text), "type another word")
    return word


@app.cell(hide_code=True)
def _(word):
    try:
        _length = len(letters(word.value))
    except InputError:  # shown below, beside the picture
        _length = LONGEST
    layers = mo.ui.slider(steps=LAYERS, value=1, label="layers", show_value=True)
    first = mo.ui.slider(1, _length - 1, 1, value=1, label="exchange letter", show_value=True)
    second = mo.ui.slider(1, _length - 1, 1, value=2, label="with letter", show_value=True)
    mo.hstack([layers, first, second], justify="start", wrap=True, gap=2)
    return first, layers, second


@app.cell(hide_code=True)
def _(encoding, first, layers, mask, second, word):
    try:
        _word = letters(word.value)
        _order = list(range(len(_word)))
        _order[first.value - 1], _order[second.value - 1] = _order[second.value - 1], _order[first.value - 1]
        inputs, trouble = (
            SimpleNamespace(
                word=_word, order=_order, layers=int(layers.value), encoding=encoding.value, mask=mask.value
            ),
            None,
        )
    except InputError as error:
        inputs, trouble = None, error
    return inputs, trouble


@app.function(hide_code=True)
def decoder(layers, encoding, mask):
    """Return a decoder with random weights for each of three seeds."""
    config = DecoderConfig(
        vocabulary=26, width=16, heads=2, layers=layers, positions=encoding, mask=mask, length=LONGEST
    )
    generators = [torch.Generator().manual_seed(seed) for seed in range(SEEDS)]
    return Decoder(config, generators=generators, dtype=torch.float64)


@app.function(hide_code=True)
@lru_cache(maxsize=256)
def largest_change(word, layers, encoding, mask):
    """Return the most that any order of the earlier letters moves the last prediction, for each seed."""
    return joma.permutation_gap(decoder(layers, encoding, mask), [tokens_of(word)]).largest.numpy()


@app.function(hide_code=True)
def tokens_of(word):
    """Return the numbers of the letters, from 0 for A."""
    return [ord(letter) - ord("A") for letter in word]


@app.cell(hide_code=True)
def _(inputs):
    if inputs is not None:
        _model = decoder(inputs.layers, inputs.encoding, inputs.mask)
        _tokens = tokens_of(inputs.word)
        moved = moved_predictions(_model, _tokens, inputs.order).numpy()
        with torch.no_grad():
            _both = _model(torch.tensor([_tokens, [_tokens[place] for place in inputs.order]]))
        chances = _both[0, :, -1].softmax(dim=-1).numpy()
        gap = largest_change(inputs.word, inputs.layers, inputs.encoding, inputs.mask)
        code = CODE.format(**vars(inputs), longest=LONGEST, seeds=SEEDS)
    else:
        moved = chances = gap = None
        code = ""
    return chances, code, gap, moved


@app.function(hide_code=True)
@drawing.style()
def draw(inputs, moved, chances, gap):
    """Draw how far each prediction moves, the last prediction before and after, and the most that any order does."""
    figure, axes = drawing.fixed_canvas(1, 3, width=3.75, height=3.1)
    left, middle, right = axes[0]
    places, new = np.arange(len(inputs.word)), [inputs.word[place] for place in inputs.order]
    mean = np.exp(np.log(moved.clip(FLOOR)).mean(axis=0))
    colours = [drawing.COLOURS[2 if place == places[-1] else 1] for place in places]
    left.bar(places, np.log10(mean) + 17, bottom=-17, color=colours)
    left.set_yticks([-16, -12, -8, -4, 0], ["10⁻¹⁶", "10⁻¹²", "10⁻⁸", "10⁻⁴", "1"])
    left.set_xticks(places, new)
    left.set(title=f"{inputs.word} → {''.join(new)}: what moves", ylabel="change / spread", ylim=(-17, 2))
    before, after = chances
    middle.plot(np.arange(26), before, **drawing.marker(1), label=inputs.word)
    middle.plot(np.arange(26), after, **{**drawing.marker(2), "marker": "x"}, label="".join(new))
    middle.set_xticks(range(0, 26, 5), list("AFKPUZ"))
    middle.set(title="Prediction after the last letter", xlabel="next letter", ylabel="probability, seed 0")
    middle.set_ylim(0, 1.35 * float(chances.max()))
    middle.legend(loc="upper left", ncols=2)
    draw_layers(right, inputs, gap)
    return figure


@app.function(hide_code=True)
def draw_layers(panel, inputs, gap):
    """Draw the largest change over all orders at every depth, for this encoding and mask."""
    values = [largest_change(inputs.word, depth, inputs.encoding, inputs.mask) for depth in LAYERS]
    logs = np.log10(np.clip(values, FLOOR, None))
    drawing.theory(panel, LAYERS, logs.mean(axis=1), 1)
    panel.plot(np.repeat(LAYERS, SEEDS), logs.ravel(), **drawing.marker(1))
    panel.plot(np.full(SEEDS, inputs.layers), np.log10(gap.clip(FLOOR)), **{**drawing.marker(2), "markersize": 7})
    panel.set_xticks(LAYERS)
    panel.set_yticks([-16, -12, -8, -4, 0], ["10⁻¹⁶", "10⁻¹²", "10⁻⁸", "10⁻⁴", "1"])
    panel.set(title="The most that any order does", xlabel="layers", xlim=(0.7, 4.3), ylim=(-17, 2))


@app.function(hide_code=True)
def describe(inputs, moved, gap):
    """Say in one sentence whether the last prediction moved."""
    last, new = float(moved[:, -1].max()), "".join(inputs.word[place] for place in inputs.order)
    encoding = "no encoding" if inputs.encoding == "none" else f"{inputs.encoding} encoding"
    depth = "1 layer" if inputs.layers == 1 else f"{inputs.layers} layers"
    answer = "does not move, but for rounding" if last < 1e-10 else f"moves, by {last:.2g} of its spread"
    return (
        f"{inputs.mask.capitalize()} mask, {encoding}, {depth}: from {inputs.word} to {new} the prediction after the "
        f"last letter {answer}. Over all orders of the earlier letters it moves by at most {float(gap.max()):.2g}."
    )


@app.cell(hide_code=True)
def _(chances, gap, inputs, moved, trouble):
    if inputs is None:
        sentence, _view = str(trouble), presenting.problem(trouble)
    else:
        sentence = describe(inputs, moved, gap)
        _view = mo.vstack([presenting.picture(draw(inputs, moved, chances, gap), sentence), mo.md(sentence)])
    _view
    return (sentence,)


@app.cell(hide_code=True)
def _(code):
    presenting.copy_as_python(code)
    return


@app.cell(hide_code=True)
def _():
    presenting.read_on(
        functions="joma.permutation_gap joma.probes.moved_predictions joma.models.Decoder",
        documents="docs/permutation.md",
        study="permutation",
    )
    return


if __name__ == "__main__":
    app.run()
