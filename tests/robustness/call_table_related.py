"""Rows of `call_table` for the theory of dynamics by others."""

from __future__ import annotations

from robustness.call_table_worlds import SOLVER

QUERY = "torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))"
_WORLD = "joma.theory.even_pairs.all_sequences(2)"
_LABEL = "[1, 1, 1, -1, -1, 1]"
_ODD = "np.array([False, False, False, True, True, False])"
_ORBIT = {"scores": "[0.3, 0.1, 0.0]", "logits": "[0.0, 0.1, 0.2]"}
_TOKENS = "joma.theory.rank_collapse.split([[0.1, 0.0], [0.0, 0.2], [0.3, 0.1]])"
_LAYER = {"w": "[[1.0, 0.5], [0.0, 1.0]]", "v": "[[1.0, 0.0], [0.0, 1.0]]"}
_CHAIN = {"p": "[0.5, 0.2]", "q": "[0.8, 0.3]"}
_TASK = {"spectrum": "[1.6, 1.0, 0.6]", "length": "12", "noise": "0.5"}
_KERNEL = "[[0.9, 0.1], [0.3, 0.7]]"
_CONSTRAINTS = "[[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]]]"
_SEQUENCES = "[[[1.0, 0.0], [0.0, 1.0]]]"
_SELECTION = {"x": _SEQUENCES, "g": "[[1.0, 0.0]]", "p0": "[0.0, 0.0]"}
_COVARIANCES = "[[[1.0, 0.0], [0.0, 0.5]]]"
_FLOW = {"spectrum": "[1.0, 0.5]", "length": "6", "times": "[0.0, 1.0]", "noise": "0.5", "solver": SOLVER}

RELATED: dict[str, dict[str, str]] = {
    "joma.theory.in_context.second_moment": _TASK,
    "joma.theory.in_context.population_loss": {"matrix": "np.eye(3)", **_TASK},
    "joma.theory.in_context.preconditioner": _TASK,
    "joma.theory.in_context.least_loss": _TASK,
    "joma.theory.in_context.plain_step": _TASK,
    "joma.theory.in_context.plateaus": _TASK,
    "joma.theory.in_context.growth_rate": {"spectrum": "[1.6, 1.0, 0.6]"},
    "joma.theory.in_context.logistic": {
        "times": "[0.0, 1.0]",
        "start": "0.01",
        "directions": "3",
        "length": "12",
        "variance": "1.5",
        "noise": "0.5",
    },
    "joma.theory.in_context.aligned_time": {"share": "[0.3, 0.5]", "start": "0.05", **_TASK},
    "joma.theory.in_context.shifted_risk": {"gain": "[0.5, 0.6, 0.7]", **_TASK},
    "joma.theory.in_context.merged_flow": {"u": "[0.1]", "U": "[[[0.1, 0.0], [0.0, 0.1]]]", **_FLOW},
    "joma.theory.in_context.separate_flow": {"u": "[0.1]", "K": "[[[0.1, 0.0]]]", "Q": "[[[0.1, 0.0]]]", **_FLOW},
    "joma.theory.in_context.rank_one_saddle": {"spectrum": "[1.6, 1.0, 0.6]", "length": "12"},
    "joma.theory.in_context_descent.sample_covariances": {
        "spectrum": "[1.0, 0.5]",
        "length": "6",
        "count": "20",
        "generator": "np.random.default_rng(0)",
    },
    "joma.theory.in_context_descent.descent_losses": {
        "steps": "[[[0.5, 0.0], [0.0, 0.5]]]",
        "covariances": _COVARIANCES,
        "spectrum": "[1.0, 0.5]",
    },
    "joma.theory.in_context_descent.best_descent": {
        "layers": "2",
        "covariances": _COVARIANCES,
        "spectrum": "[1.0, 0.5]",
        "generator": "np.random.default_rng(0)",
        "starts": "2",
    },
    "joma.theory.in_context_markov.stationary": {"transition": _KERNEL},
    "joma.theory.in_context_markov.window_chain": {"kernel": _KERNEL, "parents": "(2,)"},
    "joma.theory.in_context_markov.pair_distribution": {"kernel": _KERNEL, "lags": "[1, 2]", "parents": "(1,)"},
    "joma.theory.in_context_markov.lag_dependence": {
        "kernel": _KERNEL,
        "lags": "[1, 2]",
        "parents": "(1,)",
        "query": "1",
        "smoothing": "0.01",
    },
    "joma.theory.in_context_markov.context_dependence": {
        "tokens": "[[0, 1, 1, 0, 1, 0]]",
        "lags": "[1, 2]",
        "symbols": "2",
        "query": "1",
        "smoothing": "0.01",
        "first": "2",
    },
    "joma.theory.in_context_markov.saddle_gradients": {
        "dependence": "[[[0.1, -0.1], [-0.1, 0.1]], [[0.02, -0.02], [-0.02, 0.02]]]",
        "weights": "[0.5, 0.5]",
        "a": "[[0.1, 0.0], [0.0, 0.1]]",
    },
    "joma.theory.in_context_markov.unigram": {"tokens": "[0, 1, 1, 0]", "symbols": "2"},
    "joma.theory.in_context_markov.bayes": {
        "tokens": "[0, 1, 1, 0]",
        "symbols": "2",
        "alpha": "1.0",
        "parents": "(1,)",
    },
    "joma.theory.margins.max_margin": {"differences": "[[1.0, 0.0], [1.0, 2.0]]"},
    "joma.theory.margins.margin_multipliers": {"differences": "[[1.0, 0.0], [1.0, 2.0]]"},
    "joma.theory.margins.nuclear_max_margin": {"differences": _CONSTRAINTS},
    "joma.theory.margins.nuclear_norm": {"w": "[[3.0, 0.0], [0.0, -4.0]]"},
    "joma.theory.margins.margin_shares": {"w": "[[1.0, 0.0], [0.0, 1.0]]", "differences": _CONSTRAINTS},
    "joma.theory.margins.token_differences": {"x": _SEQUENCES, "selected": "[0]"},
    "joma.theory.margins.enforced_differences": {"x": _SEQUENCES, "g": "[[1.0, 0.0]]", "selected": "[0]"},
    "joma.theory.token_selection.attention_push": {"logits": "[[1.0, 0.0]]", "g": "[[1.0, 0.0]]"},
    "joma.theory.token_selection.attention_weights": {"x": _SEQUENCES, "p": "[1.0, 2.0]"},
    "joma.theory.token_selection.outer_tokens": {"x": _SEQUENCES, "z": "[[1.0, 2.0]]"},
    "joma.theory.token_selection.vector_path": {**_SELECTION, "lengths": "[0.0, 1.0]", "solver": SOLVER},
    "joma.theory.token_selection.vector_flow": {**_SELECTION, "times": "[0.0, 1.0]", "solver": SOLVER},
    "joma.theory.token_selection.factor_path": {
        "x": _SEQUENCES,
        "z": "[[1.0]]",
        "g": "[[1.0, 0.0]]",
        "k0": "[[0.1], [0.0]]",
        "q0": "[[0.1]]",
        "lengths": "[0.0, 1.0]",
        "solver": SOLVER,
    },
    "joma.theory.value_softmax.orbit": {**_ORBIT, "clock": "[0.0, 2.0]", "norm": "1.3", "solver": SOLVER},
    "joma.theory.value_softmax.orbit_at_margins": {**_ORBIT, "margins": "[1.0, 2.0]", "norm": "1.3", "solver": SOLVER},
    "joma.theory.value_softmax.late_error": {"clock": "[10.0, 100.0]", "tokens": "5", "norm": "1.3"},
    "joma.theory.value_softmax.two_token_invariant": {"scores": "[0.3, 0.1]", "logits": "[0.0, 0.2]", "norm": "1.3"},
    "joma.theory.value_softmax.trained_gap": {"log_time": "[10.0, 100.0]", "tokens": "5", "norm": "1.3"},
    "joma.theory.value_softmax.fixed_gap": {"scores": "[1.0, 0.0, -1.0]", "log_time": "20.0"},
    "joma.theory.value_softmax.fixed_values": {
        "scores": "[1.0, 0.0, -1.0]",
        "logits": "[0.0, 0.0, 0.0]",
        "log_times": "[0.0, 5.0]",
        "solver": SOLVER,
    },
    "joma.theory.even_pairs.all_sequences": {"max_length": "3"},
    "joma.theory.even_pairs.pair_flow": {
        "world": _WORLD,
        "label": _LABEL,
        "weight": "[0.5, 0.5, 0.25, 0.25, 0.25, 0.25]",
    },
    "joma.theory.even_pairs.pair_start": {"world": _WORLD},
    "joma.theory.even_pairs.pair_attention": {"world": _WORLD, "logits": "np.zeros((4, 4))"},
    "joma.theory.even_pairs.pair_margins": {
        "world": _WORLD,
        "label": _LABEL,
        "u": "[1.0, 1.0, -1.0, -1.0]",
        "logits": "np.zeros((4, 4))",
    },
    "joma.theory.even_pairs.pair_svm": {
        "world": _WORLD,
        "label": _LABEL,
        "logits": "[[0, 0, 0, 0], [0, 0, 0, 0], [9, -9, 0, 0], [-9, 9, 0, 0]]",
    },
    "joma.theory.even_pairs.phase_boundary": {"times": "[0.0, 1.0, 2.0]", "least_margin": "[-1.0, -0.5, 0.5]"},
    "joma.theory.even_pairs.parity_by_chain": {"world": _WORLD, "odd_pair": _ODD},
    "joma.theory.even_pairs.parity_by_pairs": {"world": _WORLD, "odd_pair": _ODD},
    "joma.theory.rank_collapse.split": {"x": "[[0.1, 0.0], [0.0, 0.2]]"},
    "joma.theory.rank_collapse.attend": {"tokens": _TOKENS, **_LAYER},
    "joma.theory.rank_collapse.add": {"tokens": _TOKENS, "update": _TOKENS},
    "joma.theory.rank_collapse.relu_mlp": {
        "tokens": _TOKENS,
        "lower": "[[1.0, 0.5, -1.0], [0.0, 1.0, 0.2]]",
        "upper": "[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]",
    },
    "joma.theory.rank_collapse.leading_term": {"tokens": _TOKENS, **_LAYER},
    "joma.theory.rank_collapse.diameter_bound": {"diameter": "[0.1, 2.0]", "w_norm": "1.5", "v_norm": "2.0"},
    "joma.theory.rank_collapse.log_diameter_bound": {"log_diameter": "[-100.0, 1.0]", "w_norm": "1.5", "v_norm": "2.0"},
    "joma.theory.rank_collapse.norm_bound": {"residual": "[[0.1, 0.0], [-0.1, 0.0]]", **_LAYER},
    "joma.theory.rank_collapse.mixed_norm": {"matrix": "[[3.0, 1.0], [0.0, 1.0]]"},
    "joma.theory.entropy_floor.row_floor": {"logit_norm": "[0.5, 4.0]", "keys": "10"},
    "joma.theory.entropy_floor.peak_entropy": {"logit_norm": "[0.5, 4.0]", "keys": "10", "peaks": "[1, 3]"},
    "joma.theory.entropy_floor.softmax_entropy": {"logits": "[[1.0, 0.0, 2.0]]"},
    "joma.theory.entropy_floor.softmax_entropy_gradient": {"logits": "[[1.0, 0.0, 2.0]]"},
    "joma.theory.entropy_floor.identity_entropy": {"spectral_norm": "[0.5, 4.0]", "keys": "3"},
    "joma.theory.entropy_floor.mean_floor": {"spectral_norm": "[0.5, 4.0]", "keys": "3"},
    "joma.theory.entropy_floor.identity_threshold": {"keys": "5"},
    "joma.theory.entropy_search.lowest_row": {
        "logit_norm": "2.0",
        "keys": "4",
        "starts": "2",
        "generator": "np.random.default_rng(0)",
    },
    "joma.theory.entropy_search.lowest_matrix": {
        "spectral_norm": "2.0",
        "keys": "3",
        "starts": "2",
        "generator": "np.random.default_rng(0)",
        "iterations": "50",
    },
    "joma.theory.markov.stationary": _CHAIN,
    "joma.theory.markov.unigram_entropy": _CHAIN,
    "joma.theory.markov.entropy_rate": _CHAIN,
    "joma.theory.markov.covariance": {**_CHAIN, "lag": "2"},
    "joma.theory.markov.kernel_logits": _CHAIN,
    "joma.theory.markov.affine_loss": {**_CHAIN, "slope": "[0.5, 1.0]", "bias": "0.1"},
    "joma.theory.markov.unigram_rates": {**_CHAIN, "tied": "False"},
    "joma.theory.markov.reduced_flow": {
        "p": "0.5",
        "q": "0.8",
        "times": "[0.0, 2.0]",
        "e0": "0.5",
        "a0": "0.3",
        "b0": "0.1",
        "solver": SOLVER,
    },
    "joma.theory.markov.unigram_hessian": {
        "p": "0.5",
        "q": "0.8",
        "states": "np.zeros((3, 2))",
        "jacobian": "np.einsum('nm,ij->nmij', np.eye(3), np.eye(2))",
    },
    "joma.theory.in_context_autoregression.best_step": {"length": "[3, 5]", "dim": "4"},
    "joma.theory.in_context_autoregression.best_loss": {"length": "[3, 5]", "dim": "4"},
    "joma.theory.in_context_autoregression.diagonal_loss": {"a": "[0.1, 0.2]", "b": "[1.0, 0.5]", "length": "5"},
    "joma.theory.in_context_autoregression.population_loss": {
        "A": "0.1 * np.eye(2)",
        "B": "np.eye(2)",
        "length": "4",
        "process": "'unitary'",
        "positions": "[0.1, 0.2, 0.3, 0.4]",
    },
    "joma.theory.in_context_autoregression.optimum": {
        "length": "3",
        "dim": "2",
        "process": "'unitary'",
        "starts": "1",
        "generator": "np.random.default_rng(0)",
    },
    "joma.theory.in_context_autoregression.rotation_basis": {"dim": "4"},
    "joma.probes.entropy_floor": {"logit_norm": "torch.tensor([0.5, 4.0])", "keys": "torch.tensor(10)"},
    "joma.probes.logit_norms": {"query": QUERY, "key": QUERY, "causal": "True", "scale": "0.5"},
}

# Results of these functions, or created by one of them.
RELATED_RESULTS = (
    "entropy_search.LowMatrices",
    "entropy_search.LowRows",
    "even_pairs.Sequences",
    "in_context.Path",
    "in_context.PlainStep",
    "in_context.RankOneSaddle",
    "in_context_autoregression.Optimum",
    "in_context_descent.BestDescent",
    "in_context_markov.SaddleGradients",
    "margins.NuclearMargin",
    "markov.ReducedPath",
    "rank_collapse.Tokens",
    "token_selection.FactorPath",
    "token_selection.VectorPath",
    "value_softmax.Orbit",
)
