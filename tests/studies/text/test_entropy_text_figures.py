"""What the figures of attention on text show, on the published curves as if they were ours."""

import numpy as np
import pytest

from joma.studies.text.entropy_text import AUTHORS_LAYOUT
from joma.studies.text.entropy_text_figures import draw_entropy, draw_highlight, draw_learning, draw_paper
from joma.studies.text.published_curves import WIKITEXT2, published


@pytest.fixture(scope="module")
def theirs():
    curves = published().assign_coords(seed=[0, 1, 2])
    entropy = curves.entropy.expand_dims(head=[0])
    rank = 2 + curves.entropy
    curves = curves.assign(entropy=entropy, window_entropy=entropy + 0.1, stable_rank=rank)
    return curves.assign_attrs(**WIKITEXT2, **AUTHORS_LAYOUT, glance=0)


def test_the_authors_curves_stand_above_ours_on_the_papers_axes(theirs):
    panels = np.reshape(draw_paper(theirs).axes, (3, 4))
    titles = [panel.get_title(loc="left") for panel in panels[:, 1]]
    assert titles == [
        "(b)  Published entropy, 2 layers",
        "(f)  Our entropy, 2 layers",
        "(j)  Validation loss, 2 layers",
    ]
    for depth, (authors, ours, loss) in zip((1, 2, 5, 10), panels.T, strict=True):
        mean = published().entropy.sel(depth=depth).mean("seed")
        for layer in range(depth):
            expected = np.stack([mean.step / 1000, mean.sel(layer=layer)], axis=-1)
            np.testing.assert_allclose(authors.lines[layer].get_xydata(), expected)
            np.testing.assert_allclose(ours.lines[layer].get_xydata(), expected + np.array([0, 0.1]))  # the window's
        assert authors.get_xscale() == "linear"
        assert authors.get_ylim() == ours.get_ylim()
        dots, line = loss.lines
        np.testing.assert_allclose(dots.get_xydata(), line.get_xydata())
        least = f"{float(published().valid_loss.sel(depth=depth).min('step').mean()):.3f}"
        labels = [text.get_text() for text in loss.get_legend().get_texts()]
        assert labels == [f"published, least {least}", f"ours, least {least}"]


def test_of_another_text_nothing_published_is_drawn(theirs):
    other = theirs.assign_attrs(types=256)
    panels = np.reshape(draw_paper(other).axes, (2, 4))
    titles = [panel.get_title(loc="left") for panel in panels[:, 0]]
    assert titles == ["(a)  Entropy, 1 layer", "(e)  Validation loss, 1 layer"]
    assert [len(panel.lines) for panel in panels[0]] == [1, 2, 5, 10]
    assert [len(panel.lines) for panel in panels[1]] == [1] * 4
    assert len(draw_highlight(other).axes[0].lines) == 1


def test_it_is_drawn_where_every_seed_diverged(theirs, tmp_path):
    diverged = theirs.assign({name: theirs[name] * np.nan for name in ("entropy", "window_entropy", "valid_loss")})
    draw_paper(diverged).savefig(tmp_path / "paper.svg")


def test_the_highlight_has_ours_as_a_line_and_the_authors_as_dots(theirs):
    panel = draw_highlight(theirs).axes[0]
    ours, dots = panel.lines
    np.testing.assert_allclose(ours.get_xydata(), dots.get_xydata() + np.array([0, 0.1]))  # the window's
    assert (ours.get_marker(), dots.get_marker()) == ("None", ".")
    assert panel.get_title() == "Attention along training, 1 layer"


def test_every_layer_is_drawn_with_the_authors_dots_on_wikitext(theirs):
    panels = draw_entropy(theirs).axes
    assert [panel.get_title(loc="left") for panel in panels] == [
        f"({letter})  Entropy by layer, {depth}"
        for letter, depth in zip("abcd", ("1 layer", "2 layers", "5 layers", "10 layers"), strict=True)
    ]
    assert [len(panel.lines) for panel in panels] == [2, 4, 10, 20]
    assert [text.get_text() for text in panels[2].get_legend().get_texts()] == ["layer 0", "layer 2", "layer 4"]
    ours, dots = panels[0].lines
    expected = np.stack([theirs.step + 1, published().entropy.sel(depth=1, layer=0).mean("seed")], axis=-1)
    np.testing.assert_allclose(ours.get_xydata(), expected)
    np.testing.assert_allclose(dots.get_xydata(), expected)
    assert dots.get_marker() == "."
    assert (panels[0].get_xscale(), panels[0].get_ylabel()) == ("log", "attention entropy (nats)")


def test_the_authors_dots_are_drawn_on_wikitext_alone(theirs):
    other_text = theirs.assign_attrs(types=256, config='{"corpus": "notwikitext.txt"}')
    assert [len(panel.lines) for panel in draw_entropy(other_text).axes] == [1, 2, 5, 10]


def test_a_model_deeper_than_any_published_is_drawn(theirs):
    deeper = theirs.reindex(depth=[1, 12], layer=range(12))
    one_layer, twelve_layers = draw_entropy(deeper).axes
    assert (len(one_layer.lines), len(twelve_layers.lines)) == (2, 24)
    assert np.isnan(twelve_layers.lines[1].get_ydata()).all()  # no dots where nothing was published


def test_loss_and_rank_are_drawn_by_depth(theirs):
    trajectory = theirs.sel(depth=[1, 2])
    loss, rank = draw_learning(trajectory).axes
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["1 layer", "2 layers"]
    curves, best = loss.lines[::2], loss.lines[1::2]
    for depth, curve, line in zip((1, 2), curves, best, strict=True):
        valid_loss = trajectory.valid_loss.sel(depth=depth)
        np.testing.assert_allclose(curve.get_ydata(), valid_loss.mean("seed"))
        np.testing.assert_allclose(line.get_ydata(), float(valid_loss.min("step").mean()))
    ranks = trajectory.stable_rank.isel(layer=0).mean("seed")
    for depth, curve in zip((1, 2), rank.lines, strict=True):
        np.testing.assert_allclose(curve.get_ydata(), ranks.sel(depth=depth))
