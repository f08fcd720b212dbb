"""The studies, a module for each figure, table or claim, in families. `load` imports the ones that are asked for."""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
