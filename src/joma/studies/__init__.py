"""One small module a figure, table or claim: config, run, claims, draw. `load` imports the ones asked for."""

from __future__ import annotations

from importlib import import_module

from joma.arguments import choice
from joma.studies.base import Study, execute, judge

__all__ = ["MODULES", "Study", "execute", "judge", "load"]

# In the order of the paper, which is the order of `joma list` and of the report.
MODULES = {
    "invariance": "joma.studies.invariance",
    "winner": "joma.studies.winner",
    "sparse-dense": "joma.studies.sparse_dense",
    "critical-points": "joma.studies.critical_points",
    "cooccurrence": "joma.studies.cooccurrence",
    "alignment": "joma.studies.alignment",
    "scan-snap": "joma.studies.scan_snap",
    "hierarchy-order": "joma.studies.hierarchy_order",
    "entropy-text": "joma.studies.entropy_text",
    "learning-rates": "joma.studies.learning_rates",
    "activation-control": "joma.studies.activation_control",
    "bounce-control": "joma.studies.bounce_control",
    "invariant-text": "joma.studies.invariant_text",
    "permutation": "joma.studies.permutation",
    "addition": "joma.studies.addition",
    "position-emergence": "joma.studies.position_emergence",
    "pretrained": "joma.studies.pretrained",
}


def load(name: str) -> Study:
    """Import the study called `name`; an unknown name lists the known ones."""
    return import_module(choice("study", name, MODULES)).STUDY
