"""What a study is: claims as data, the context of a run, and its execution."""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
