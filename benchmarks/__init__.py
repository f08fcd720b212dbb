"""Numbers that are promised, each measured and compared with its target: one module a subject, each with `rows`."""

Row = tuple[str, str, str, bool]  # what is measured, the target, the result, whether the target is met
