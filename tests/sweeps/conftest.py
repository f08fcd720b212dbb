import pytest

from offered_studies import offer


@pytest.fixture(autouse=True, scope="module")
def toy():
    with pytest.MonkeyPatch.context() as patch:
        offer(patch, {"toy": "sweep_study"})
        yield
