"""Ctrl-C in library calls and in commands; what it does to whole runs is in `tests/robustness/test_interrupts.py`."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress

import pytest
import torch
from torch import nn

from joma.train import Optimiser, fit
from joma.train.cuda import MAX_AHEAD_SECONDS, Throttle
from joma.train.interrupt import EXIT_CODE, LAST_LINE, StopRequest, end_interrupted, interruptible, was_interrupted
from joma.train.state import Training

NOTICE = "joma: interrupted: waiting for "
UNINTERRUPTIBLE = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', {})"  # one call of C: no handler runs in it
FOREVER = UNINTERRUPTIBLE.format(2**31 - 1)  # a quarter of an hour
TWO_SECONDS = (  # on this machine, at its present load
    "import time; start = time.perf_counter(); "
    + UNINTERRUPTIBLE.format(200_000)
    + "; iterations = int(400_000 / (time.perf_counter() - start)); "
    + UNINTERRUPTIBLE.format("iterations")
)


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_is_recorded_and_the_second_raises(number):
    before = signal.getsignal(number)
    with interruptible() as stop:
        assert not stop
        press(number)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            press(number)
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible() as stop:
        press()
        press()
        assert not stop
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_are_left_alone():
    requests = []

    def work():
        with interruptible() as stop:
            requests.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert requests == [False]


def test_the_notice_names_what_is_waited_for(monkeypatch):
    clock = iter((0.0, 10.0, 17.25))
    monkeypatch.setattr("joma.train.interrupt.time.monotonic", lambda: next(clock))
    stop = StopRequest("nothing")
    stop.begin("step {} to end and be saved", 12)
    assert stop.notice == (
        "joma: interrupted: waiting for step 12 to end and be saved (7.2 s so far); "
        "press Ctrl-C again to leave at once, without it.\n"
    )


def test_outside_of_a_command_the_last_line_is_printed_and_the_process_lives(capsys):
    assert not was_interrupted()
    assert end_interrupted() == EXIT_CODE
    assert capsys.readouterr().err == LAST_LINE


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.ones(2, 3))


def test_ctrl_c_while_a_run_is_prepared_raises_at_once(monkeypatch):
    """Compiling and capturing take up to a minute, and nothing is trained yet."""
    went_on = []

    def prepare(_, start):
        press()
        went_on.append(start)

    monkeypatch.setattr(Training, "prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        fit(Numbers(), lambda model, _: model.p.sum(-1), optimiser=Optimiser("sgd", 0.1), steps=3)
    assert went_on == []


def test_a_step_in_a_notebook_is_not_broken_off_and_nothing_is_printed(capsys):
    model = Numbers()

    def loss(model, step):
        if int(step) == 1:
            press()
        return model.p.sum(-1)

    with pytest.raises(KeyboardInterrupt):
        fit(model, loss, optimiser=Optimiser("sgd", 1.0), steps=3)
    assert torch.equal(model.p, torch.full((2, 3), -1.0))  # two whole updates
    assert capsys.readouterr().err == ""


def script(body):
    """Return a program that runs `body` as a command, where `press()` is Ctrl-C."""
    return f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from joma.train import interrupt
def press():
    os.kill(os.getpid(), signal.SIGINT)
def press_later():
    os.spawnvp(os.P_NOWAIT, "sh", ["sh", "-c", f"sleep 0.2; kill -INT {{os.getpid()}}"])
with interrupt.answering():
{textwrap.indent(textwrap.dedent(body), "    ")}
"""


def command(body):
    """Run `body` in a process of its own as a command; return its exit code, output and errors."""
    done = subprocess.run([sys.executable, "-c", script(body)], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


COMMANDS = {
    "python code": "press(); time.sleep(60)",
    "a call of C": f"press_later(); {FOREVER}",
    "swallowed": "try:\n    press()\nexcept KeyboardInterrupt:\n    time.sleep(60)",
    "turned into an error": "try:\n    press()\nexcept KeyboardInterrupt:\n    raise RuntimeError",
    "in a finaliser": (
        "class Finalised:\n    def __del__(self):\n        press()\nFinalised()\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('not swallowed')"
    ),
    "twice": "try:\n    press()\nfinally:\n    press(); time.sleep(60)",
    "raised, not pressed": "raise KeyboardInterrupt",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
}


@pytest.mark.parametrize("case", sorted(COMMANDS))
def test_a_command_leaves_with_one_last_line(case):
    code, out, err = command(COMMANDS[case])
    assert (code, out) == (EXIT_CODE, "")
    assert err == LAST_LINE


def test_a_second_ctrl_c_ends_a_step_in_c():
    code, out, err = command(f"with interrupt.interruptible():\n    press(); press_later(); {FOREVER}")
    *notices, last = err.splitlines(keepends=True)
    assert (code, out, last) == (EXIT_CODE, "", LAST_LINE)
    assert [line[: len(NOTICE)] for line in notices] in ([], [NOTICE])  # the second may come before the notice


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        ("StorageError('the disk is full.')", 2, "joma: the disk is full.\n"),  # the step was not saved: that is said
        ("RuntimeError('the compiler was killed')", EXIT_CODE, LAST_LINE),
    ],
)
def test_errors_after_ctrl_c_are_a_consequence_of_it_unless_they_are_of_the_disk(error, code, line):
    body = f"""
    from joma import cli
    from joma.files import StorageError
    def fail(args):
        with interrupt.interruptible():
            press()
        raise {error}
    cli._run_command = fail
    os._exit(cli.main([]))
    """
    assert command(body) == (code, "", line)


def test_a_signal_that_is_sent_twice_counts_once():
    """As by `timeout`, which sends it to the process and to its group."""
    body = """
    with interrupt.interruptible() as stop:
        press()
        press()
        print("the step ends")
    assert stop
    raise KeyboardInterrupt
    """
    assert command(body) == (EXIT_CODE, "the step ends\n", LAST_LINE)


def test_a_command_says_what_it_waits_for_while_the_main_thread_cannot():
    body = """
    with interrupt.interruptible() as stop:
        stop.begin("step {} to end", 3)
        press_later()
        CALL
        print("ended", file=sys.stderr, flush=True)
        assert stop
    raise KeyboardInterrupt
    """
    code, _, err = command(body.replace("CALL", TWO_SECONDS))
    assert code == EXIT_CODE
    first, second, third = err.splitlines(keepends=True)
    assert first.startswith(f"{NOTICE}step 3 to end (")
    assert (second, third) == ("ended\n", LAST_LINE)


def test_a_terminal_with_progress_bars_has_its_cursor_back():
    body = f"""
    from joma.progress import Bars
    bars = Bars(patience=-1.0)
    with bars.task("training", total=10) as task:
        task.advance()
        with interrupt.interruptible() as stop:
            stop.begin("step {{}} to end", 3)
            press_later()
            {TWO_SECONDS}
        press_later()
        {FOREVER}
    """
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen([sys.executable, "-c", script(body)], stderr=slave, env=environment)
    os.close(slave)
    parts = []
    with suppress(OSError):  # how the end of a terminal is reported
        while part := os.read(master, 4096):
            parts.append(part)
    os.close(master)
    shown = b"".join(parts).decode()
    assert process.wait() == EXIT_CODE
    assert "\x1b[?25l" in shown  # the bars have hidden it
    assert shown.endswith(f"\r\x1b[2K{LAST_LINE[:-1]}\r\n\x1b[?25h")
    assert f"{NOTICE}step 3 to end (" in shown
    assert shown.count("joma: ") == 2


def test_closed_standard_streams_are_not_taken_for_the_pipe():
    script = """import os, sys
from joma.train import interrupt
with interrupt.answering():
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            continue
        sys.exit(9)
"""
    command = f"exec {sys.executable} -c '{script}' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False, timeout=60).returncode == 0


def test_ctrl_c_after_the_end_of_a_command_is_too_late():
    body = "import atexit; atexit.register(lambda: (press(), print('the end')))"
    assert command(body) == (0, "the end\n", "")


class Device:
    """A device that makes one step after the other, each `seconds` long, while Python queues further ones."""

    def __init__(self, seconds, seconds_of_python):
        self.seconds, self.seconds_of_python = seconds, seconds_of_python
        self.time = self.busy_until = 0.0
        self.idle, self.ahead = 0.0, []

    def queue_step(self):
        self.time += self.seconds_of_python
        self.idle += max(0.0, self.time - self.busy_until)
        self.busy_until = max(self.time, self.busy_until) + self.seconds
        self.ahead.append(self.busy_until - self.time)

    def new_event(self):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.busy_until

    def synchronize(self):
        self.device.time = max(self.device.time, self.at)


@pytest.mark.parametrize("seconds", [2e-5, 1e-3, 0.03, 0.5])
def test_python_stays_a_second_ahead_of_the_device_and_keeps_it_busy(seconds):
    device = Device(seconds, seconds_of_python=1e-5)
    throttle = Throttle(device.new_event, lambda: device.time)  # type: ignore[arg-type]
    for _ in range(max(40, round(2 / seconds))):
        device.queue_step()
        throttle.count_step()
    assert max(device.ahead) < max(2.5 * MAX_AHEAD_SECONDS, 2.5 * seconds)
    assert device.idle < 0.01 * device.time
