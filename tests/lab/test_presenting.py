"""What the pages share: pictures with a description, code to copy, problems as sentences."""

from joma.arguments import InputError
from joma.drawing import fixed_canvas
from joma.lab import PAGES, page_file, presenting


def test_a_picture_has_its_description():
    figure, _ = fixed_canvas()
    html = presenting.picture(figure, 'Entropy "falls" < 1').text
    assert "<img" in html
    assert "Entropy &quot;falls&quot; &lt; 1" in html


def test_code_and_problems_are_text_and_never_markup():
    assert "<script>" not in presenting.problem(InputError("text", "a word", "<script>", "write one")).text
    assert "<script>" not in presenting.copy_as_python("'<script>'").text


def test_reading_on_names_functions_documents_and_the_study():
    html = presenting.read_on(functions="joma.open_run", documents="docs/sweeps.md", study="winner").text
    for text in ("joma.open_run", "docs/sweeps.md", "joma run winner"):
        assert text in html


def test_every_page_is_a_notebook_beside_the_package():
    folder = page_file(PAGES[0]).parent
    notebooks = {path.name for path in folder.glob("*.py") if "marimo.App(" in path.read_text(encoding="utf-8")}
    assert notebooks == {page_file(name).name for name in PAGES}
