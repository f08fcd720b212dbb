"""A laboratory for the training dynamics of Transformers.

`joma` predicts (closed forms and flows), trains (small models, many seeds at once), probes (models and checkpoints that
you have), and puts prediction and measurement side by side, claim by claim. The public names are imported on first use:
`import joma` costs nothing.

>>> import joma
>>> joma.theory.growth.linear([0.9, 0.7], 1.0)
array([1.076..., 0.769...])
"""

from joma import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

__version__ = "0.2.0.dev0"
