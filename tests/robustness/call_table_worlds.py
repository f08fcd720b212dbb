"""Rows of `call_table` for worlds of tokens, their optima, one-layer models and the points of sweeps."""

from __future__ import annotations

GENERATORS = "[torch.Generator().manual_seed(0)]"
KEY = "joma.noise.key(torch.tensor([0, 7]), 3)"
SOLVER = "joma.theory.integration.Solver(rtol=1e-6, atol=1e-8)"
P = "[[0.5, 0.3, 0.2], [0.25, 0.25, 0.5]]"
SOURCE = f"joma.theory.populations.Source({P}, 2)"
WORLD = f"joma.theory.populations.population([{SOURCE}])"
WEIGHTS = "[[1.0, 0.0], [0.0, 1.0], [0.5, -0.5]]"
COUNTS = "[[2, 0, 0], [1, 1, 0], [0, 1, 1]]"

_ONE_LAYER = {
    "tokens": "5",
    "outputs": "4",
    "hidden": "6",
    "queries": "2",
    "dim": "8",
    "positions": "'one'",
    "logits": "'product'",
    "embeddings": "'learned'",
    "attention": "'softmax'",
    "activation": "'relu'",
    "head_width": "3",
    "values": "2",
    "residual": "True",
    "norm": "True",
    "skip": "True",
    "scale": "0.1",
    "scale_z": "0.1",
    "scale_qk": "0.1",
    "scale_values": "0.1",
}

WORLDS: dict[str, dict[str, str]] = {
    "joma.theory.losses.soft_cross_entropy": {"posterior": "[[0.25, 0.75], [1.0, 0.0]]"},
    "joma.theory.optimum.block_logits": {"x": "[[0.5, 0.5, 0.0]]", "v": WEIGHTS, "z": "[0.0, 1.0, 2.0]"},
    "joma.theory.optimum.block_optimum": {
        "world": WORLD,
        "generator": "np.random.default_rng(0)",
        "starts": "1",
        "activation": "'linear'",
    },
    "joma.theory.optimum.gradient_flow": {
        "world": WORLD,
        "times": "[0.0, 0.5]",
        "v0": WEIGHTS,
        "z0": "[0.0, 0.1, 0.2]",
        "rate_z": "0.5",
        "solver": SOLVER,
    },
    "joma.theory.optimum.loss_gradient": {
        "world": WORLD,
        "v": WEIGHTS,
        "z": "[0.0, 1.0, 2.0]",
        "activation": "'gelu'",
    },
    "joma.theory.optimum.naive_bayes": {"p": P, "length": "3", "prior": "[0.4, 0.6]"},
    "joma.theory.optimum.planted": {
        "counts": COUNTS,
        "weight": "[0.5, 0.25, 0.25]",
        "v": WEIGHTS,
        "z": "[0.0, 1.0, 2.0]",
    },
    "joma.theory.populations.Source": {"p": P, "length": "2", "share": "0.5"},
    "joma.theory.populations.class_probabilities": {"prior": "[0.4, 0.6]", "classes": "2"},
    "joma.theory.populations.multiset_probabilities": {"counts": COUNTS, "p": P},
    "joma.theory.populations.multisets": {"tokens": "3", "length": "2"},
    "joma.theory.populations.population": {"sources": f"[{SOURCE}]", "prior": "[0.4, 0.6]"},
    "joma.data.tokens.log_normal_classes": {
        "generators": GENERATORS,
        "classes": "2",
        "distinct": "3",
        "common": "2",
        "scale": "1.5",
        "separable": "True",
    },
    "joma.data.tokens.stream_contexts": {
        "frequency": "torch.eye(2, dtype=torch.float64).expand(2, 2, 2)",
        "samples": "4",
        "length": "3",
        "key": KEY,
    },
    "joma.models.OneLayer": {
        "config": "joma.models.OneLayerConfig(tokens=3, outputs=2)",
        "generators": GENERATORS,
        "embeddings": "torch.eye(4, dtype=torch.float64)",
    },
    "joma.models.OneLayerConfig": _ONE_LAYER,
    "joma.sweeps.Draws": {"sources": "{'rate': joma.sweeps.Range(0.1, 1.0)}", "count": "3", "seed": "1"},
    "joma.sweeps.Grid": {"values": "{'steps': [500, 1000], 'rate': [0.1]}"},
    "joma.sweeps.Range": {"low": "0.1", "high": "1.0", "logarithmic": "True"},
}
