"""The gradient g = −∂loss/∂h that the layer above sends back to the hidden units of a block, for four losses.

Each function returns a function from the hidden units h to g, both [sample, hidden].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.special import softmax

from joma.arguments import InputError, probabilities, real, whole

Gradient = Callable[[np.ndarray], np.ndarray]
Outputs = Float[np.ndarray, "sample hidden"]


def constant(g: ArrayLike) -> Gradient:
    """Return the constant gradient g = −∂loss/∂h, broadcast to [sample, hidden].

    >>> constant(2.0)(np.zeros((1, 2)))
    array([[2., 2.]])
    """
    gradient = real("g", g)
    return lambda output: _broadcast_to_output("g", gradient, output)


def cross_entropy(label: ArrayLike) -> Gradient:
    """Return the gradient of cross entropy where the hidden units are the logits: g = 1(k = label) − softmax(h)_k.

    Args:
        label: class of each sample, [sample].

    >>> cross_entropy([1])(np.zeros((1, 2)))
    array([[-0.5,  0.5]])
    """
    classes = np.array([whole("label", number, low=0) for number in real("label", label, ndim=1)])

    def gradient(output: Outputs) -> Outputs:
        if len(classes) != len(output) or classes.max() >= output.shape[1]:
            expected = f"{len(output)} labels below {output.shape[1]}"
            raise InputError(
                "label", expected, f"{len(classes)} labels up to {classes.max()}", "match samples and units"
            )
        return np.eye(output.shape[1])[classes] - softmax(output, axis=1)

    return gradient


def soft_cross_entropy(posterior: ArrayLike) -> Gradient:
    """Return the gradient of cross entropy with a distribution over classes as the target of each sample.

        g_k = P(k | sample) − softmax(h)_k

    It is that of `cross_entropy` averaged over the classes of equal samples, which need only be listed once.

    Args:
        posterior: probability of each class, [sample, hidden].

    >>> soft_cross_entropy([[0.25, 0.75]])(np.zeros((1, 2)))
    array([[-0.25,  0.25]])
    """
    target = probabilities("posterior", posterior, ndim=2)

    def gradient(output: Outputs) -> Outputs:
        if target.shape != output.shape:
            expected = f"[sample, hidden] of shape {output.shape}"
            raise InputError("posterior", expected, target.shape, "match samples and units")
        return target - softmax(output, axis=1)

    return gradient


def squared_error(target: ArrayLike) -> Gradient:
    """Return the gradient of ½‖h − target‖²: g = target − h.

    Args:
        target: broadcast to [sample, hidden].

    >>> squared_error([[1.0, 2.0]])(np.ones((1, 2)))
    array([[0., 1.]])
    """
    goal = real("target", target)
    return lambda output: _broadcast_to_output("target", goal, output) - output


def _broadcast_to_output(name: str, array: np.ndarray, output: Outputs) -> Outputs:
    try:
        return np.broadcast_to(array, output.shape)
    except ValueError:
        expected = f"broadcastable to [sample, hidden] {output.shape}"
        raise InputError(name, expected, f"shape {array.shape}", "match `x` and `w0`") from None
