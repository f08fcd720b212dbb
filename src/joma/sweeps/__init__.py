"""Sweeps: many runs of one study over values of its config, on disk and as one labelled Dataset."""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
