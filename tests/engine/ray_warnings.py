"""Warnings that tests with Ray ignore: Ray leaves pipes and files of its processes to the garbage collector."""

import pytest

LEFT_TO_COLLECTOR = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
