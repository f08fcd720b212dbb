"""Benchmarks: every promised number is measured and compared with its target; one module per subject, with `rows`."""

Row = tuple[str, str, str, bool]  # what is measured, the target, the result, whether the target is met
