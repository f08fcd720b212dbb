"""Attach the probes to models that you have: while they run, while they train, and afterwards, by checkpoints."""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
