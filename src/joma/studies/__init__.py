"""The studies, one module for each figure, table or claim, in families; `load` imports a study by its name."""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
