"""From runs on disk to figures, tables and one self-contained HTML file."""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
