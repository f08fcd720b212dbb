"""Random one-layer Transformers for the tests of the value path, and the same network in PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from joma.theory.losses import cross_entropy
from joma.theory.value_flow import ValueArchitecture, ValueRates, value_block

ACTIVATIONS = {"tanh": torch.tanh, "gelu": functional.gelu}
SAMPLES, TOKENS, QUERIES, DIM, VALUES, HEAD, HIDDEN, OUTPUTS = 9, 6, 3, 10, 5, 4, 7, 4


def draw(
    attention, *, seed, factored=False, rates=(1.0, 1.0), activation="gelu", scale=0.4, orthonormal=True, **switches
):
    """Return a random flow with three queries and unequal sample weights, its start, and the samples' labels."""
    rng = np.random.default_rng(seed)
    x = rng.random((SAMPLES, TOKENS)) + 1e-3
    label = rng.integers(OUTPUTS, size=SAMPLES)
    columns = rng.normal(size=(DIM, DIM))
    embedding = np.linalg.qr(columns)[0][:, : TOKENS + QUERIES] if orthonormal else columns[:, : TOKENS + QUERIES] / 3
    flow = value_block(
        attention,
        activation,
        cross_entropy(label),
        x / x.sum(axis=1, keepdims=True),
        query=np.arange(SAMPLES) % QUERIES,
        weight=rng.dirichlet(np.full(SAMPLES, 3.0)),
        rates=ValueRates(*rates),
        architecture=ValueArchitecture(factored=factored, embedding=embedding, **switches),
    )
    shapes = {
        "z": (QUERIES, TOKENS), "W_Q": (DIM, HEAD), "W_K": (DIM, HEAD), "W_V": (DIM, VALUES), "W_O": (VALUES, DIM),
        "W_1": (DIM, HIDDEN), "W_2": (HIDDEN, DIM), "W_H": (DIM, OUTPUTS),
    }  # fmt: skip
    start = {name: scale * rng.normal(size=shapes[name]) for name in flow.names}
    return flow, start, label


def torch_descent(flow, start, label, samples=None):
    """Return the descent direction of each parameter by autograd, and b and −∂loss/∂b (with the samples' weights)."""
    samples = np.arange(SAMPLES) if samples is None else samples
    weight = flow.weight[samples] / flow.weight[samples].sum()
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
    x, u, u_q = (torch.tensor(value) for value in (flow.x[samples], flow.context, flow.query_embedding))
    query, options = torch.tensor(flow.query[samples]), flow.architecture
    z = leaves["z"] if not options.factored else (u_q.T @ leaves["W_Q"]) @ (u.T @ leaves["W_K"]).T
    z.retain_grad()
    scores = z[query]
    b = {"linear": x * scores, "exp": x * scores.exp()}.get(flow.attention.name)
    b = functional.softmax(x.log() + scores / options.temperature, 1) if b is None else b
    b.retain_grad()
    f = b @ u.T @ leaves["W_V"] @ leaves["W_O"] + u_q.T[query]
    seen = functional.layer_norm(f, [DIM]) if options.norm else f
    stream = ACTIVATIONS[flow.activation.name](seen @ leaves["W_1"]) @ leaves["W_2"] + (f if options.skip else 0)
    losses = functional.cross_entropy(stream @ leaves["W_H"], torch.tensor(label[samples]), reduction="none")
    (torch.tensor(weight) * losses).sum().backward()
    descent = {name: -leaf.grad.numpy() for name, leaf in leaves.items()}
    y = -b.grad.numpy()
    b = b.detach().numpy()
    averages = {
        "b_bar": weight @ b, "pull": (b * (b * y).sum(1, keepdims=True)).sum(0), "zeta": -z.grad.numpy(),
    }  # fmt: skip
    return descent, averages


def sgd(flow, start, label, *, steps, batch=None, seed=0):
    """Train by plain SGD with autograd; return the value and key vectors, the logits and the averages of each step."""
    rng, parameters = np.random.default_rng(seed), {name: value.copy() for name, value in start.items()}
    record = {name: [] for name in ("p", "k", "z", "b_bar", "pull", "zeta")}
    for step in range(steps + 1):
        record["p"].append(flow.context.T @ parameters["W_V"])
        record["z"].append(flow.logits(parameters).copy())
        if flow.architecture.factored:
            record["k"].append(flow.context.T @ parameters["W_K"])
        if step == steps:
            break
        samples = None if batch is None else rng.integers(SAMPLES, size=batch)
        descent, averages = torch_descent(flow, parameters, label, samples)
        for name, direction in descent.items():
            parameters[name] = parameters[name] + flow.rates.of(name) * direction
        for name, value in averages.items():
            record[name].append(value)
    return {name: np.array(values) for name, values in record.items()}
