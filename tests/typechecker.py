"""The run-time checker of annotations in the tests: beartype, told two things that static checkers know.

An int is accepted for a float, and a tuple is a nested sequence like a list: NumPy's protocol for one asks for
`__reversed__`, which tuples lack at run time.
"""

from beartype import BeartypeConf, FrozenDict, beartype
from numpy.typing import ArrayLike

overrides = FrozenDict({ArrayLike: ArrayLike | tuple})
check = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=overrides))
