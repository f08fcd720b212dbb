"""Each script of the gallery runs, prints what it measured, and draws it; the page shows them all."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from joma import open_run
from joma.watch import attention

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = sorted(path.stem for path in (DOCS / "gallery").glob("*.py"))
ROW = re.compile(r"^  (?P<layer>\S+) +(?P<heads>\d+) +(?P<start>[\d.]+) ± [\d.]+ +(?P<end>[\d.]+) ± ", re.MULTILINE)
PNG = b"\x89PNG\r\n\x1a\n"


def run(script: str, out: Path) -> str:
    """Run a script without network, and return what it printed."""
    surroundings = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(DOCS / "gallery" / f"{script}.py"), str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=out, env={**os.environ, **surroundings}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def entropies(printed: str) -> dict[str, tuple[float, float]]:
    """Return the entropy of each layer at the first and at the last probe, from the table of a recorder."""
    return {row["layer"]: (float(row["start"]), float(row["end"])) for row in ROW.finditer(printed)}


def uniform_causal(length: int) -> float:
    """Return the mean entropy of attention that is uniform over all keys up to the query: (1/n) Σ_i ln i."""
    return math.lgamma(length + 1) / length


def test_a_hugging_face_trainer(tmp_path: Path) -> None:
    printed = run("trainer", tmp_path)
    measured = entropies(printed)
    assert list(measured) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for start, end in measured.values():  # small initial weights: attention is nearly uniform
        assert start == pytest.approx(uniform_causal(16), abs=0.01)
        assert end < start
    assert measured["model.layers.1.self_attn"][1] < 0.5  # the second layer finds the token to copy
    assert "steps 0 to 120" in printed
    assert "sink_mass" in printed
    assert (tmp_path / "trainer.png").read_bytes().startswith(PNG)


def test_a_lightning_module_without_forward(tmp_path: Path) -> None:
    printed = run("lightning_module", tmp_path)
    measured = entropies(printed)
    assert list(measured) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    for start, end in measured.values():  # of 12 keys, torch's initial weights hide none
        assert math.log(12) - 0.25 < start < math.log(12)
        assert end < start - 0.1
    assert "11 probes, steps 0 to 150" in printed
    assert (tmp_path / "lightning_module.png").read_bytes().startswith(PNG)


def test_a_plain_loop(tmp_path: Path) -> None:
    printed = run("plain_loop", tmp_path)
    measured = entropies(printed)
    assert list(measured) == ["h.0", "h.1"]
    for start, _ in measured.values():
        assert start == pytest.approx(uniform_causal(24), abs=0.06)
    assert measured["h.1"][1] < 0.5  # it attends to the first token alone
    logged = re.findall(r"^step (\d+): ([\d.]+) nats", printed, re.MULTILINE)
    assert [int(step) for step, _ in logged] == [*range(0, 161, 20)]
    assert (float(logged[0][1]), float(logged[-1][1])) == measured["h.1"]
    assert (tmp_path / "plain_loop.png").read_bytes().startswith(PNG)


def test_a_sharded_model_has_the_entropies_of_the_whole_one_on_the_batches_of_both_processes(tmp_path: Path) -> None:
    printed = run("fsdp2", tmp_path)
    measured = entropies(printed)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(2)))
    batches = [torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    with attention(model) as seen, torch.no_grad():
        model(torch.cat(batches))
    expected = seen.entropy.mean("head")[0]
    assert [*measured] == expected.layer.values.tolist()
    for layer, (start, _) in measured.items():
        assert start == pytest.approx(float(expected.sel(layer=layer)), abs=6e-4)
    assert printed.count("Recorder of Sequential: 7 probes, steps 0 to 60") == 1
    assert (tmp_path / "fsdp2.png").read_bytes().startswith(PNG)


def test_a_series_of_checkpoints(tmp_path: Path) -> None:
    printed = run("checkpoint_series", tmp_path)
    data = open_run(tmp_path / "probe")
    assert data.step.values.tolist() == [0, 5, 10, 20, 40, 80]
    for layer in data.layer.values:
        course = data.entropy.sel(layer=layer).mean("head").values
        assert course[0] == pytest.approx(uniform_causal(32), abs=0.01)
        assert course[-1] < 0.6 * course[0]
        assert all(f"{value:.3f}".rstrip("0") in printed for value in course)
    page = Path(re.findall(r"written: (\S+);", printed)[0])
    assert "<html" in page.read_text(encoding="utf-8")


def test_the_page_shows_every_script_with_its_picture() -> None:
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    assert sorted(["trainer", "lightning_module", "plain_loop", "fsdp2", "checkpoint_series"]) == SCRIPTS
    for script in SCRIPTS:
        source = (DOCS / "gallery" / f"{script}.py").read_text(encoding="utf-8")
        assert len(source.splitlines()) <= 60
        assert f"gallery/{script}.py" in page
        (picture,) = re.findall(rf"\]\((gallery/{script}\.(?:png|svg))\)", page)
        assert (DOCS / picture).is_file()
        assert (DOCS / picture).stat().st_size < 200_000
