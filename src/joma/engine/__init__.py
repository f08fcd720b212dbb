"""Where work runs: processes of this machine, or a Ray cluster. There is no scheduler of our own."""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
