"""The optimum at all positions: exact targets by enumeration, and the loss against another solver."""

from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from joma.data.tokens import log_normal_classes
from joma.models import OneLayer
from joma.studies.theorems import ladder_optimum
from joma.studies.theorems.ladder_arms import ARMS
from joma.studies.theorems.ladder_optimum import next_token_probabilities, optimum
from joma.studies.theorems.ladder_task import Task, TrainedLadderConfig
from joma.studies.theorems.ladder_training import MAX_GRADIENT
from joma.study import Context

SMALL = TrainedLadderConfig(
    trained_classes=2, trained_distinct=2, trained_common=1, trained_length=4, trained_optimum=200
)


@given(seed=st.integers(0, 2**31), classes=st.integers(1, 4))
def test_the_probabilities_of_the_next_token_are_those_of_all_sequences(seed, classes):
    generators = [torch.Generator().manual_seed(seed + shift) for shift in range(2)]
    frequency = log_normal_classes(generators=generators, classes=classes, distinct=2, common=1).frequency
    sequences = list(product(range(3), repeat=3))
    token = torch.tensor(sequences).expand(2, -1, -1)
    probabilities = next_token_probabilities(frequency, token).numpy()
    for seed_number, p in enumerate(frequency.numpy()):
        joint = {s: np.prod(p[:, list(s)], axis=1).mean() for n in range(1, 5) for s in product(range(3), repeat=n)}
        for number, sequence in enumerate(sequences):
            for end in range(1, 4):
                prefix = sequence[:end]
                expected = [joint[(*prefix, following)] / joint[prefix] for following in range(3)]
                np.testing.assert_allclose(probabilities[seed_number, number, end - 1], expected, rtol=1e-10)


def test_the_optimum_is_that_of_another_solver():
    context = Context((1, 2))
    solved = optimum(SMALL, context)
    assert float(solved.trained_optimum_gradient.max()) < 1e-5
    for logits, arm in ladder_optimum.LOGITS.items():
        for seed in context.seeds:
            task = Task(SMALL, Context((seed,)), [ARMS[arm]], dtype=torch.float64)
            model = OneLayer(task.model_config, generators=Context((seed,)).generators("ladder, weights"))
            result = solved.sel(seed=seed, logits=logits)
            # The entropy is not compared: the loss of so few tokens is flat around its minimum.
            np.testing.assert_allclose(result.trained_optimum_loss, _by_scipy(task, model), atol=1e-4)


def test_the_search_arrives_where_attention_to_a_token_is_best_left_out():
    """A few sequences are partly memorised: logits grow without bound, and L-BFGS stops far above this gradient."""
    config = TrainedLadderConfig(
        trained_classes=4, trained_distinct=4, trained_common=4, trained_length=8, trained_optimum=64
    )
    solved = optimum(config, Context((1, 2)))
    assert solved.trained_optimum_gradient.dims == ("seed", "logits")
    assert float(solved.trained_optimum_gradient.max()) <= ladder_optimum.GRADIENT
    assert ladder_optimum.GRADIENT <= MAX_GRADIENT / 10


def test_a_search_that_is_cut_short_says_so(monkeypatch):
    monkeypatch.setattr(ladder_optimum, "ITERATIONS", 1)
    solved = optimum(SMALL, Context((1,)))
    assert float(solved.trained_optimum_gradient.min()) > MAX_GRADIENT


def _by_scipy(task, model):
    """Minimise the sample's loss by BFGS; return the loss on the probe."""
    sample = task.draw(ladder_optimum.SAMPLE, SMALL.trained_optimum)
    tokens = sample.token[..., :-1]
    p = task.worlds["overlap"][0]
    target = torch.zeros(*tokens.shape[1:], 3, dtype=torch.float64)
    for end in range(tokens.shape[-1]):
        weight = p[:, tokens[0, :, : end + 1]].prod(-1)
        target[:, end] = (weight / weight.sum(0)).T @ p
    parameters = list(model.parameters())

    def value(vector):
        torch.nn.utils.vector_to_parameters(torch.tensor(vector), parameters)
        outputs = model(tokens)[0]
        loss = -(target * outputs.log_softmax(-1)).sum(-1).mean()
        gradients = torch.autograd.grad(loss, parameters)
        return loss.item(), torch.cat([gradient.flatten() for gradient in gradients]).numpy()

    start = torch.nn.utils.parameters_to_vector(parameters).detach().numpy()
    result = minimize(value, start, jac=True, method="BFGS", options={"gtol": 1e-7, "maxiter": 2000})
    torch.nn.utils.vector_to_parameters(torch.tensor(result.x), parameters)
    return task.measure(model, 0)["probe_loss"].item()
