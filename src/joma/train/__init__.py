"""The training loop: the seed is the leading axis of the model, of its loss and of everything that is recorded."""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
