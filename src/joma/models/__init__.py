"""Plain torch modules, each readable in one sitting; the seed is the leading axis of every parameter.

Nothing here imports the theory. Only the studies compare the two: otherwise their agreement would be circular.
"""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
