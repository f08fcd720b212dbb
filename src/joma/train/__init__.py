"""One training loop; the seed is a leading axis of the model, of its loss and of all that is recorded."""

from joma.train.loop import fit
from joma.train.optimiser import OPTIMISERS, Optimiser
from joma.train.options import Compute, Record, Saving
from joma.train.protocol import CompiledModel

__all__ = ["OPTIMISERS", "CompiledModel", "Compute", "Optimiser", "Record", "Saving", "fit"]
