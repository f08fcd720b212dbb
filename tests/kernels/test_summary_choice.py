"""Which implementation measures the rows."""

from __future__ import annotations

import torch

from joma.kernels import summary_choice
from joma.kernels.entropy_choice import PRECISIONS
from joma.kernels.entropy_scores import Rows, Scores
from joma.kernels.summary_choice import IMPLEMENTATIONS, ORDERS, Implementation, summary_sums

ONES = torch.ones(1, 1, 2, 4)


def test_every_precision_names_known_implementations_and_ends_with_one_that_takes_anything():
    assert list(ORDERS) == list(PRECISIONS)
    for order in ORDERS.values():
        assert set(order) <= set(IMPLEMENTATIONS)
        assert order[-1] == "blocked"
        assert IMPLEMENTATIONS["blocked"].fits(Scores(ONES, ONES, None, True, 1.0, 2.0, lambda *_: _[0]))


def test_the_first_that_fits_is_chosen_and_given_what_is_asked_for(monkeypatch):
    def told(scores, top=0, *, distance=False, sink=None):
        assert sink == 1
        return Rows(torch.full(scores.query.shape[:3], float(top)), None, distance=ONES[..., 0] * distance)

    ways = {
        "never": Implementation(told, lambda _: False),
        "told": Implementation(told, lambda _: True),
        "last": IMPLEMENTATIONS["blocked"],
    }
    monkeypatch.setattr(summary_choice, "IMPLEMENTATIONS", ways)
    monkeypatch.setattr(summary_choice, "ORDERS", {"highest": tuple(ways)})
    rows = summary_sums(Scores(ONES, ONES, None, True, 1.0), "highest", 5, distance=True, sink=1)
    assert rows.entropy.unique().tolist() == [5.0]
    assert rows.distance is not None
    assert rows.distance.unique().tolist() == [1.0]
