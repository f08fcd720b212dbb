"""Values of each class's distinct tokens in `scan-snap`, in falling order of how often they occur."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from joma.data.tokens import SequenceClasses


def by_frequency(
    data: SequenceClasses, values: Float[np.ndarray, "seed label token"]
) -> Float[np.ndarray, "seed label rank"]:
    """Select the values of each class's distinct tokens, the most frequent token first."""
    labels, distinct = len(data.query), data.distinct.numpy()
    shape = (len(values), labels, int(distinct[0].sum()))
    selected, frequency = (array[:, distinct].reshape(shape) for array in (values, data.frequency.numpy()))
    return np.take_along_axis(selected, np.argsort(-frequency, axis=-1), axis=-1)


def distinct_logits(
    data: SequenceClasses, z: Float[np.ndarray, "seed step query token"]
) -> Float[np.ndarray, "seed step label rank"]:
    """Return the attention logits of each class's distinct tokens at every step, the most frequent token first."""
    logits_of_class = np.moveaxis(z[:, :, data.query.numpy()], 1, 0)
    return np.moveaxis(np.stack([by_frequency(data, logits) for logits in logits_of_class]), 0, 1)
