# A cell shows its last expression, which is therefore not unused.
# pyright: reportUnusedExpression=false
"""Page *Your model*: entropy by layer and head, attention sinks and attention maps of a model on your text."""

import marimo

app = marimo.App(width="medium", app_title="Your model")

with app.setup(hide_code=True):
    import atexit
    import tempfile
    from functools import lru_cache
    from pathlib import Path
    from typing import Any

    import marimo as mo

    from joma.arguments import InputError
    from joma.files import StorageError
    from joma.lab import presenting
    from joma.progress import SILENT
    from joma.studies import pretrained
    from joma.watch import first_look

    LENGTH, WINDOW = 32, slice(0, 16)  # tokens that are read, and those of the map, all of which can be labelled
    TOY: dict[str, Any] = {"layers": 3, "width": 32, "steps": 96, "every": 96}
    TEXT = "Attention turns sparse, then dense."
    CODE = """\
from joma.watch import first_look

loaded = first_look.open_model({source!r})  # a name on the hub, the folder of a model, or of its checkpoints
look = first_look.look(loaded, {text!r}, length={length})
attention = look.recording.dataset()  # entropy and sink_mass by pass, layer and head
weights = look.recording.maps({layer}, head={head}, tokens=look.tokens)
"""
    TOY_CODE = """\
import tempfile
from pathlib import Path
from joma.progress import SILENT
from joma.studies import pretrained

folder = Path(tempfile.mkdtemp()) / "toy"
with SILENT.task("train a toy", total=1) as task:
    pretrained.train(pretrained.Config(**{toy}), 0, folder, task)
"""


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Your model

    Every head of every layer has an attention row $a_i$ for each query $i$. Its entropy says over how many keys it is
    spread, $e^H$ of them, and its *sink mass* how much of it lies on the first token:

    $$H_i = -\sum_j a_{ij} \ln a_{ij}, \qquad \textrm{sink mass} = a_{i1}$$

    Give a name on the Hugging Face hub, the folder of a model, or a folder of its checkpoints (the last one is taken).
    Without one, a toy of three layers is trained here on the bytes of Python's manual, in a few seconds. Weights are
    read without running any code of the model, and nothing is sent anywhere.
    """)
    return


@app.cell(hide_code=True)
def _():
    source = mo.ui.text(value="", placeholder="empty: the built-in toy", label="Model", full_width=True)
    text = mo.ui.text_area(value=TEXT, label=f"Text, of which the first {LENGTH} tokens are read", full_width=True)
    mo.vstack([source, text])
    return source, text


@app.function(hide_code=True)
@lru_cache(maxsize=1)
def built_in():
    """Train the toy once, and return its folder, which is removed when this process ends."""
    home = tempfile.TemporaryDirectory(prefix="joma-lab-")
    atexit.register(home.cleanup)
    folder = Path(home.name) / "toy"
    with SILENT.task("train a toy", total=1) as task:
        pretrained.train(pretrained.Config(**TOY), 0, folder, task)
    return folder


@app.function(hide_code=True)
@lru_cache(maxsize=2)
def opened(source):
    """Load a model, or the toy if there is no name."""
    return first_look.open_model(source or built_in())


@app.cell(hide_code=True)
def _(source, text):
    try:
        look, trouble = first_look.look(opened(source.value.strip()), text.value, length=LENGTH), None
    except (InputError, StorageError) as error:
        look, trouble = None, error
    return look, trouble


@app.function(hide_code=True)
def describe(data):
    """Say in one sentence which head is the sparsest, and which layer looks at the first token most."""
    entropy, sinks = data.entropy.mean("pass").values, data.sink_mass.mean(("pass", "head")).values
    layers, heads = entropy.shape
    layer, head = divmod(int(entropy.argmin()), heads)
    return (
        f"{layers} layers of {heads} heads. The sparsest is head {head} of layer {layer} ({float(entropy.min()):.2f} "
        f"nats); layer {int(sinks.argmax())} has the most on the first token ({100 * float(sinks.max()):.0f} %)."
    )


@app.cell(hide_code=True)
def _(look, trouble):
    if look is None:
        attention, sentence, _view = None, str(trouble), presenting.problem(trouble)
    else:
        attention = look.recording.dataset()
        sentence = describe(attention)
        _view = mo.vstack([presenting.picture(look.recording.plot(), sentence), mo.md(sentence)])
    _view
    return attention, sentence


@app.cell(hide_code=True)
def _(attention):
    _layers, _heads = (1, 1) if attention is None else (attention.sizes["layer"], attention.sizes["head"])
    layer = mo.ui.slider(0, max(_layers - 1, 1), 1, value=0, label="attention map of layer", show_value=True)
    head = mo.ui.slider(0, max(_heads - 1, 1), 1, value=0, label="head", show_value=True)
    mo.hstack([layer, head], justify="start", wrap=True, gap=2)
    return head, layer


@app.cell(hide_code=True)
def _(head, layer, look, source, text):
    _options = {"layer": int(layer.value), "head": int(head.value), "length": LENGTH, "text": text.value}
    _toy = "" if source.value.strip() else TOY_CODE.format(toy=TOY)
    code = _toy + CODE.format(source=source.value.strip() or "FOLDER", **_options).replace("'FOLDER'", "folder")
    if look is not None:
        try:
            _figure = look.recording.plot_map(
                _options["layer"], _options["head"], queries=WINDOW, keys=WINDOW, tokens=look.tokens
            )
            _map = presenting.picture(_figure, f"Attention map of layer {layer.value}, head {head.value}")
        except InputError as error:
            _map = presenting.problem(error)
    else:
        _map = mo.md("")
    _map
    return (code,)


@app.cell(hide_code=True)
def _(code):
    presenting.copy_as_python(code)
    return


@app.cell(hide_code=True)
def _():
    presenting.read_on(
        functions="joma.watch.first_look.open_model joma.watch.attention joma.attention_summary",
        documents="docs/probing.md docs/gallery.md docs/families.md",
        study="pretrained",
    )
    return


if __name__ == "__main__":
    app.run()
