"""One training loop; the seed is a leading axis of the model, of its loss and of all that is recorded."""

from joma.train.loop import fit
from joma.train.optimiser import OPTIMISERS, Optimiser

__all__ = ["OPTIMISERS", "Optimiser", "fit"]
