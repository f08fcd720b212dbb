"""How much memory is left: by the machine, by a limit on the process, and what is refused."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from joma import memory
from joma.arguments import InputError


def test_no_more_is_available_than_the_machine_has():
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert 0 < memory.available() <= 1024 * int(total.split()[1])


def test_a_limit_on_the_address_space_lowers_what_is_available():
    code = (
        "import resource\nfrom joma import memory\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({2**31}, {2**31}))\n"
        "print(memory.available())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(answer.stdout) < 2**31
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 2**31


def test_the_limit_of_a_control_group_lowers_what_is_available(monkeypatch):
    files = {"/proc/self/cgroup": ["0::/job"], "/sys/fs/cgroup/job/memory.max": ["3000000"]}
    files["/sys/fs/cgroup/job/memory.current"] = ["1000000"]
    monkeypatch.setattr(memory, "_lines", lambda file: files.get(str(file), []))
    assert memory.available() == 2_000_000
    files["/sys/fs/cgroup/job/memory.max"] = ["max"]
    assert memory.available() > 2_000_000


def test_files_that_were_read_are_not_used_memory_and_groups_above_count(monkeypatch):
    files = {
        "/proc/self/cgroup": ["4:memory:/", "0::/slice/job"],
        "/sys/fs/cgroup/slice/job/memory.max": ["max"],
        "/sys/fs/cgroup/slice/memory.max": ["3000000"],
        "/sys/fs/cgroup/slice/memory.current": ["2900000"],
        "/sys/fs/cgroup/slice/memory.stat": ["anon 100000", "active_file 800000", "inactive_file 2000000"],
    }
    monkeypatch.setattr(memory, "_lines", lambda file: files.get(str(file), []))
    assert memory.available() == 2_900_000


def test_what_does_not_fit_is_refused_with_both_numbers():
    memory.check("seeds", 1000, "use fewer")
    with pytest.raises(InputError, match=r"`seeds` must be small enough .* 5 PB where .* are free; use fewer\."):
        memory.check("seeds", 5 * 10**15, "use fewer")


def test_sizes_have_three_digits_and_a_unit():
    sizes = (0, 999, 1000, 999_499, 999_500, 10**18, 10**22)
    assert [memory.readable(size) for size in sizes] == [
        "0 B", "999 B", "1 kB", "999 kB", "1 MB", "1 EB", "1e+04 EB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (MemoryError("Unable to allocate 7.11 PiB for an array with shape (1000000000000000,)"), "a size of 8.01 PB"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "a size of 2.15 GB"),
        (RuntimeError("Storage size calculation overflowed with sizes=[10000000000, 10]"), "a size that does not fit"),
        (ValueError("Maximum allowed dimension exceeded"), "a size that does not fit"),
    ],
)
def test_running_out_of_memory_is_bad_input_that_names_the_size(error, size):
    def fail():
        with memory.refusing("config", "use less"):
            raise error

    with pytest.raises(memory.OutOfMemory, match=rf"`config` must be small enough .* got {size}; use less\."):
        fail()


def test_other_errors_pass():
    def fail():
        with memory.refusing("config", "use less"):
            raise ValueError("`width` is odd")

    with pytest.raises(ValueError, match="`width` is odd"):
        fail()
