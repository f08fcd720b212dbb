"""A fixed draw of hostile command lines, and what the harness of `make torture` counts as a failure."""

import os

import pytest

from robustness import command_lines
from robustness.command_lines import ESCAPE, Line, fault, lines, prepare, study_line, try_line
from robustness.fork_server import Ending, Limits, Streams, preload

COUNT, PARTS, SEED = 100, 2, 5
HASTY = Limits(seconds=0.2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with what the lines refer to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
        patch.setenv("COLUMNS", "120")
        for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
            patch.delenv(name, raising=False)
        preload()
        folder = tmp_path_factory.mktemp("lines")
        prepare(folder)
        yield folder


@pytest.mark.parametrize("part", range(PARTS))
def test_hostile_lines_end_with_a_code_and_one_message(part, root):
    drawn = lines(COUNT, SEED)[part::PARTS]
    endings = [(line, *try_line(line, root, number, HASTY)) for number, line in enumerate(drawn)]
    assert not [(line.text, problem, ending.err) for line, ending, problem in endings if problem]
    assert {2} <= {ending.code for _, ending, _ in endings} <= {0, 1, 2, 130}


def test_every_study_has_a_small_config_that_is_refused_by_nothing(root):
    from joma.studies import STUDIES

    assert set(command_lines.SMALL) == set(STUDIES)
    ending, problem = try_line(study_line("entropy-text"), root, 0, Limits(seconds=60, wait=300))
    assert (problem, ending.code in (0, 1)) == ("", True), ending.err


def test_memory_is_limited_and_running_out_of_it_is_one_line(root):
    small = Limits(seconds=60, wait=300, memory=3 * 10**8)
    ending, problem = try_line(study_line("winner", "samples=10000000"), root, 0, small)
    assert (ending.code, problem) == (2, "")
    assert "must be small enough for this machine's memory" in ending.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_root_s_rights_are_given_up(root):
    outs = [
        try_line(Line(("judge", "no-access"), unprivileged=unprivileged), root, 0)[0] for unprivileged in (False, True)
    ]
    assert [out.code for out in outs] == [2, 2]
    line = study_line("winner", "steps=0", options=("--out", "read-only/below"))
    assert "cannot write read-only" not in try_line(line, root, 0)[0].err
    assert "cannot write read-only" in try_line(Line(line.args, unprivileged=True), root, 0)[0].err


@pytest.mark.parametrize(
    ("code", "out", "err", "problem"),
    [
        (0, "", "", ""),
        (0, "", "joma: warning: slow\n", ""),
        (0, "", "joma: odd\n", "a message beside a result"),
        (2, "", "joma: bad\n", ""),
        (2, "", "joma: bad\njoma: worse\n", "2 messages"),
        (2, "", "", "no message that begins with joma:"),
        (2, "", "╭─ Parsing error ─╮\n│ --x │\n╰───╯\n", ""),
        (2, "", f"joma: {ESCAPE}", "control characters"),
        (3, "", "joma: internal error", "exit code 3"),
        (-11, "", "", "exit code -11"),
        (None, "", "", "did not end after Ctrl-C"),
        (130, "", "joma: interrupted\n", "exit code 130 without Ctrl-C"),
        (1, "", "Traceback (most recent call last):\n", "a traceback"),
    ],
)
def test_what_counts_as_a_failure(code, out, err, problem):
    verdict = fault(Line(("run",)), Ending(code, out, err, False, 0.0))
    assert verdict.startswith(problem)
    assert bool(verdict) == bool(problem)


def test_a_reader_that_left_standard_error_leaves_the_exit_code(root):
    line = Line(("run", "nothing"), Streams("pipe", "pipe"))
    ending, problem = try_line(line, root, 0)
    assert (ending.code, problem) == (2, "")
