"""Headings of a probe: each states what the data show, and nothing that they do not."""

from __future__ import annotations

import numpy as np
import pytest

from joma.report.probe_figures import Quantity
from joma.report.probe_sentences import attention_heading, bounced_layers, cosine_heading, entropy_heading, rank_heading
from probed import series_data, single_data


def test_a_fall_and_recovery_needs_both_a_small_p_and_a_fall_beyond_noise():
    data = series_data(layer_count=3)  # p is 0.02, 0.03, 0.04
    assert entropy_heading(data) == "Attention entropy falls and recovers in 3 of 3 layers"
    data.bounce_p_value[0] = 0.06
    assert bounced_layers(data) == 2
    data.bounce_depth[1] = 0.05  # a rise alone has a small p, too
    assert entropy_heading(data) == "Attention entropy falls and recovers in 1 of 3 layers"
    data.bounce_p_value[:] = 0.5
    assert entropy_heading(data) == "Attention entropy falls in 3 of 3 layers, without a clear recovery"
    data.entropy[:] = data.entropy.values[::-1]
    assert entropy_heading(data) == "Attention entropy rises in 3 of 3 layers"


def test_few_checkpoints_are_not_tested():
    data = series_data()
    data.bounce_p_value[:] = np.nan
    assert bounced_layers(data) is None
    assert entropy_heading(data) == "Attention entropy falls from 3.05 to 1.55 nats"
    data.entropy[-1] = data.entropy[0] * 1.001
    assert entropy_heading(data) == "Attention entropy stays at 3.05 nats"


def test_a_layer_that_was_measured_later_is_compared_from_then_on():
    data = series_data().drop_vars("bounce_p_value")
    data.stable_rank[0, 1] = np.nan
    data.stable_rank[1, 1] = 1.0
    assert rank_heading(data) == "The stable rank falls in 1 of 2 matrices"


def test_one_model():
    data = single_data()
    assert entropy_heading(data) == "Attention entropy is 1.05 nats on average, least in layer 0, head 0 (0.75)"
    sinks = Quantity("attention to the first token", "")
    heading = "The first token draws 30 % of attention, most in layer 0, head 1 (35 %)"
    assert attention_heading("sink_mass", data, sinks) == heading
    assert rank_heading(data) == "The stable rank of the MLPs' lower matrices is 4 to 5"
    assert cosine_heading(data) == "Hidden vectors have a root mean square cosine of 0.61"


def test_a_series():
    data = series_data()
    sinks = Quantity("attention to the first token", "")
    heading = "The first token draws 40 % of attention at the end, and 10 % at the start"
    assert attention_heading("sink_mass", data, sinks) == heading
    heading = "Entropy is 3.05 nats at the start, 1.05 at step 8, and 1.55 at the end"
    assert attention_heading("entropy", data, Quantity("attention entropy", "nats")) == heading
    assert rank_heading(data) == "The stable rank falls in 2 of 2 matrices"
    assert cosine_heading(data) == "Hidden vectors become more alike: cosine 0.41 to 0.71"
    assert cosine_heading(data.drop_vars("hidden_cosine")) == "Token embeddings become more alike: cosine 0.2 to 0.3"


@pytest.mark.parametrize(
    ("end", "course"), [(0.2, "from 0.4 to 0.2 tokens"), (0.4, "0.4 tokens at the start and at the end")]
)
def test_any_other_measure_has_its_label_and_unit(end, course):
    data = series_data()
    values = np.array([0.4, 0.9, 0.1, end])[:, None, None]
    data["distance"] = (("step", "layer", "head"), values + np.zeros((2, 2)))
    distance = Quantity("attended distance", "tokens")
    assert attention_heading("distance", data, distance) == f"Attended distance: {course}"
    heading = "Attended distance: 0.9 tokens on average, greatest in layer 0, head 0 (0.9)"
    assert attention_heading("distance", data.isel(step=[1]), distance) == heading


def test_sinks_that_stay_as_they_are():
    data = series_data()
    data.sink_mass[-1] = data.sink_mass[0] + 0.001
    heading = "The first token draws 10 % of attention at the end, as at the start"
    assert attention_heading("sink_mass", data, Quantity("attention to the first token", "")) == heading
