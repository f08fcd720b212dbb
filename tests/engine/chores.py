"""Functions of units for the tests of engines; they import nothing that takes long."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

from joma.engine import Needs, Output, Unit
from joma.train.interrupt import interruptible


def chore(name, function, /, *, out=Path("runs"), needs=None, **arguments):
    return Unit(name, f"engine.chores:{function}", arguments, Path(out), needs or Needs())


def double(out, progress, *, number):
    del out, progress
    return Output(2 * number)


def echo(out, progress, *, text):
    del out, progress
    return Output(text)


def surroundings(out, progress):
    """What a unit sees of its process."""
    del out, progress
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    values = {name: os.environ.get(name) for name in names}
    streams = [os.readlink(f"/proc/self/fd/{handle}") for handle in range(3)]
    return Output(
        values
        | {"process": os.getpid(), "session": os.getsid(0), "folder": os.getcwd(), "streams": streams}
        | {"path": sys.path, "torch": "torch" in sys.modules, "read": sys.stdin.read()}
    )


def torch_threads(out, progress, *, change=None):
    del out, progress
    import torch

    threads = torch.get_num_threads()
    if change is not None:
        torch.set_num_threads(change)
    return Output(threads)


def overlap(out, progress, *, name, seconds):
    """Note the time of begin and end, and the process."""
    del progress
    begin = time.monotonic()
    (Path(out) / f"{name}.begun").write_text(str(os.getpid()))
    time.sleep(seconds)
    return Output([begin, time.monotonic()])


def report(out, progress, *, tasks):
    del out
    for number in range(tasks):
        with progress.task(f"task {number}", total=5) as task:
            task.skip(2)
            task.say("a note")
            for _ in range(3):
                task.advance()
    return Output()


def report_often(out, progress, *, count):
    del out
    with progress.task("often", total=count) as task:
        for _ in range(count):
            task.advance()
    return Output()


def report_and_kill(out, progress):
    del out
    with progress.task("cut", total=5):
        os.kill(os.getpid(), signal.SIGKILL)


def say(out, progress, *, text):
    del out, progress
    sys.stdout.write(f"{text} on standard output\n")
    sys.stderr.write(f"{text} on standard error\n")
    subprocess.run(["echo", f"{text} of a child"], check=True)
    return Output()


def warn(out, progress, *, text):
    del out, progress
    warnings.warn(text, stacklevel=1)
    return Output()


def warn_for_ever(out, progress):
    del out, progress
    for number in itertools.count():
        warnings.warn(f"{number} {'x' * 500_000}", stacklevel=1)


def kill(out, progress, *, number=signal.SIGKILL, text=""):
    del out, progress
    sys.stderr.write(f"{text}\n")
    os.kill(os.getpid(), number)
    time.sleep(30)


def leave(out, progress, *, code):
    """End the process, but leave a child that holds its connections open."""
    del out, progress
    if os.fork() == 0:
        time.sleep(300)
    os._exit(code)


def crash(out, progress):
    del out, progress
    ctypes.string_at(0)


def connection():
    """Return the connection to the engine, which is the only socket of this process."""
    handles = [int(link.name) for link in Path("/proc/self/fd").iterdir() if link.is_socket()]
    return socket.socket(fileno=os.dup(handles[0]))


def close_connection(out, progress):
    del out, progress
    connection().shutdown(socket.SHUT_WR)
    time.sleep(30)


def garble(out, progress, *, text):
    """Write `text` into the connection to the engine."""
    del out, progress
    connection().sendall(text.encode())
    return Output()


def allocate(out, progress, *, size, in_child=False):
    """Take memory, in this process or a child."""
    del out, progress
    if in_child:
        program = f"import time; block = b'x' * {size}; time.sleep(30)"
        subprocess.run([sys.executable, "-c", program], check=True)
    else:
        block = b"x" * size
        time.sleep(30)
        del block
    return Output()


def wait(out, progress, *, name, seconds=30.0):
    """Wait, as a unit does that answers Ctrl-C by an exception."""
    del progress
    folder = Path(out)
    (folder / f"{name}.begun").write_text(str(os.getpid()))
    time.sleep(seconds)
    return Output("waited")


def save(out, progress, *, name):
    """Wait, and save when interrupted, as a training run does."""
    del progress
    folder = Path(out)
    with interruptible() as stop:
        (folder / f"{name}.begun").write_text(str(os.getpid()))
        while not stop:
            time.sleep(0.02)
        (folder / f"{name}.saved").write_text("saved")
    raise KeyboardInterrupt


def refuse_to_stop(out, progress, *, name):
    """Wait, and ignore Ctrl-C; a child waits too."""
    del progress
    folder = Path(out)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    (folder / f"{name}.child").write_text(str(child.pid))
    (folder / f"{name}.begun").write_text(str(os.getpid()))
    while True:
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            continue
