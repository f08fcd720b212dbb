"""The run-time checker of annotations in the tests: beartype, with int accepted for float as type checkers do."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
