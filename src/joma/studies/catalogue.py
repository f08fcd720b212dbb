"""The list of all studies, by their names on the command line."""

from __future__ import annotations

from importlib import import_module

from joma.arguments import choice
from joma.study import Study

# In the order of the papers, then dynamics by others: the order of `joma list` and of the report.
STUDIES = {
    "invariance": "joma.studies.theorems.invariance",
    "value-invariant": "joma.studies.theorems.value_invariant",
    "winner": "joma.studies.theorems.winner",
    "sparse-dense": "joma.studies.theorems.sparse_dense",
    "ladder": "joma.studies.theorems.ladder",
    "critical-points": "joma.studies.theorems.critical_points",
    "cooccurrence": "joma.studies.theorems.cooccurrence",
    "alignment": "joma.studies.hierarchy.alignment",
    "scan-snap": "joma.studies.hierarchy.scan_snap",
    "hierarchy-order": "joma.studies.hierarchy.hierarchy_order",
    "entropy-text": "joma.studies.text.entropy_text",
    "learning-rates": "joma.studies.text.learning_rates",
    "activation-control": "joma.studies.text.activation_control",
    "bounce-control": "joma.studies.text.bounce_control",
    "bounce-cause": "joma.studies.text.bounce_cause",
    "invariant-text": "joma.studies.text.invariant_text",
    "permutation": "joma.studies.symmetry.permutation",
    "addition": "joma.studies.symmetry.addition",
    "position-emergence": "joma.studies.symmetry.position_emergence",
    "pretrained": "joma.studies.pretrained",
    "polarise": "joma.studies.related.polarise",
    "icl-regression": "joma.studies.related.icl_regression",
    "max-margin": "joma.studies.related.max_margin",
    "rank-collapse": "joma.studies.related.rank_collapse",
    "entropy-floor": "joma.studies.related.entropy_floor",
    "even-pairs": "joma.studies.related.even_pairs",
    "markov-unigram": "joma.studies.related.markov_unigram",
    "icl-autoregression": "joma.studies.related.icl_autoregression",
    "induction-phases": "joma.studies.related.induction_phases",
    "panorama": "joma.studies.related.panorama",
}


def load(name: str) -> Study:
    """Import the study called `name`; an unknown name lists the known ones."""
    return import_module(choice("study", name, STUDIES)).STUDY
