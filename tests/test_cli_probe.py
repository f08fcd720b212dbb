"""`joma probe`, and `joma report` of what it stored: results, exit codes and messages."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file

from command_line import joma
from inline_engine import InlineEngine
from joma.runs import open_run
from joma.watch import configs


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def blank(monkeypatch):
    """Draw empty figures, for tests of anything else."""
    monkeypatch.setattr("joma.report.probe.draw", lambda _: Figure(figsize=(1, 1)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Five checkpoints of a tiny model, whose weights move along one direction."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    with torch.random.fork_rng(), configs.quiet():
        torch.manual_seed(0)
        config = transformers.GPTNeoXConfig(**sizes, vocab_size=256, max_position_embeddings=32)
        model = transformers.GPTNeoXForCausalLM(config)
        moves = [torch.randn_like(weight) for weight in model.parameters()]
        for step in range(5):
            model.save_pretrained(folder / f"step{step}")
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.add_(move, alpha=0.03)
    return folder


def test_probe_a_series(checkpoints, tmp_path, capsys, monkeypatch):
    code, out, err = joma("probe", checkpoints, "--out", tmp_path, capsys=capsys)
    assert (code, err) == (0, "")
    for words in ("Entropy of attention / nats", "layers.0.attention", "Stable rank", "token embeddings"):
        assert words in out
    (folder,) = tmp_path.iterdir()
    assert out.rstrip().endswith(str(folder / "probe.html"))
    trajectory = open_run(folder)
    assert trajectory.step.values.tolist() == [0, 1, 2, 3, 4]
    assert trajectory.attrs["joma_version"]
    assert {path.suffix for path in (folder / "figures").iterdir()} == {".svg", ".pdf", ".txt"}
    monkeypatch.setattr("joma.report.probe.draw", lambda _: Figure(figsize=(1, 1)))
    code, out, _ = joma("probe", checkpoints, "--out", tmp_path, "--json", capsys=capsys)
    answer = json.loads(out)
    assert answer["faults"] == []
    assert answer["entropy"][0]["start"] == pytest.approx(float(trajectory.entropy.isel(step=0).mean()))


@pytest.mark.usefixtures("blank")
def test_probe_a_series_on_an_engine(checkpoints, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("joma.engine.LocalEngine", lambda *_, **__: InlineEngine())
    answers = []
    for options in ((), ("--jobs", "2"), ("--engine", "local", "--gpus-per-run", "0.5")):
        out = tmp_path / str(len(answers))
        code, answer, err = joma("probe", checkpoints, *options, "--out", out, "--json", capsys=capsys)
        assert (code, err) == (0, "")
        answers.append({key: value for key, value in json.loads(answer).items() if key not in ("out", "page")})
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("option", [("--address", "auto"), ("--gpus-per-run", "1.0")])
def test_options_of_engines_need_an_engine(option, checkpoints, tmp_path, capsys):
    code, _, err = joma("probe", checkpoints, *option, "--out", tmp_path, capsys=capsys)
    assert (code, err) == (
        2,
        f"joma: `{option[0]}` must be left out without --engine, got {option[1]}; "
        "add --engine local or --engine ray.\n",
    )


@pytest.mark.usefixtures("blank")
def test_probe_one_model_on_a_text(checkpoints, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Some words to attend to. " * 5)
    args = ("probe", checkpoints / "step4", "--text", tmp_path / "text.txt", "--out", tmp_path / "out", "--json")
    code, out, _ = joma(*args, capsys=capsys)
    assert code == 0
    answer = json.loads(out)
    assert answer["checkpoints"] == ["step4"]
    heads = answer["entropy"][0]
    assert 0 < heads["least_head"] <= heads["mean"] <= heads["greatest_head"] < 3.5


@pytest.mark.usefixtures("blank")
def test_probe_names_what_is_wrong_and_measures_the_rest(checkpoints, tmp_path, capsys):
    shutil.copytree(checkpoints, tmp_path / "series")
    file = tmp_path / "series" / "step2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:999])
    revisions = ["--revisions", *(f"step{step}" for step in (0, 1, 2, 3, 77))]
    code, out, err = joma("probe", tmp_path / "series", *revisions, "--out", tmp_path / "out", "--json", capsys=capsys)
    assert (code, err) == (1, "")
    answer = json.loads(out)
    assert answer["steps"] == [0, 1, 3]
    assert [(fault["kind"], fault["checkpoints"]) for fault in answer["faults"]] == [
        ("unknown", ["step77"]),
        ("unreadable", ["step2"]),
    ]
    code, out, _ = joma("probe", tmp_path / "series", "--out", tmp_path / "out", capsys=capsys)
    assert code == 1
    assert "download it again" in out


@pytest.mark.usefixtures("blank")
def test_probes_of_other_folders_and_choices_do_not_overwrite_each_other(checkpoints, tmp_path, capsys):
    series = [tmp_path / "a" / "my series", tmp_path / "b" / "my series"]
    for folder in series:
        shutil.copytree(checkpoints, folder, ignore=shutil.ignore_patterns("step[1-4]"))
    arguments = [(folder,) for folder in series] + [(series[0], "--revisions", "step0")]
    outs = [joma("probe", *args, "--out", tmp_path / "out", "--json", capsys=capsys)[1] for args in arguments]
    folders = [Path(json.loads(out)["out"]) for out in outs]
    assert len(set(folders)) == 3
    assert all((folder / "trajectory.nc").exists() for folder in folders)
    assert folders[2].parent == folders[0]  # measured once


@pytest.mark.parametrize("steps", [["step0"], ["step0", "step1"]])
@pytest.mark.parametrize("name", ["wte.weight", "mlp.fc1.weight"])
def test_probe_draws_what_there_is(steps, name, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    for step in steps:
        (tmp_path / "series" / step).mkdir(parents=True)
        weight = torch.randn(40, 8, generator=generator)
        save_file({name: weight}, tmp_path / "series" / step / "model.safetensors")
    code, out, err = joma("probe", tmp_path / "series", "--out", tmp_path / "out", "--json", capsys=capsys)
    assert (code, err) == (1, "")
    (fault,) = json.loads(out)["faults"]
    assert "a model with a config.json" in fault["message"]
    assert list((tmp_path / "out").glob("*/figures/*.svg"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nobody/nothing"], "does not answer"),
        (["no/such/folder"], "which is not a folder and not a repository's name; check the spelling."),
        (["{}", "--revisions", "step9"], "a series with the revisions step9"),
        (["{}", "--pattern", "step("], "`pattern` must be a regular expression"),
        (["{}", "--measures", "entropie"], "`measures` must be one of entropy, effective_tokens,"),
        (["{}", "--text", "nowhere.txt"], "`text` must be a readable file, got nowhere.txt"),
        (["{}", "--text", "{}/../short.txt"], "`text` must be at least two tokens long, got 1; give a longer text."),
        (["{}", "--text", "{}/step0/model.safetensors"], "`text` must be a file of UTF-8 text"),
        (["{}", "--out", "{}/../short.txt"], "Not a directory; choose a folder that you may write to."),
        (["{}", "--out", "{}/../short.txt/below"], "Not a directory"),
    ],
)
def test_probe_says_bad_input_in_one_line(args, message, checkpoints, capsys, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    (checkpoints.parent / "short.txt").write_text("a")
    monkeypatch.chdir(checkpoints.parent)
    code, out, err = joma("probe", *(arg.format(checkpoints) for arg in args), capsys=capsys)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("blank")
def test_measures_are_chosen_and_kept_apart(checkpoints, tmp_path, capsys):
    measures = ["--measures", "distance", "largest_logit"]
    code, out, err = joma("probe", checkpoints, "--out", tmp_path, *measures, "--json", capsys=capsys)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert set(answer["measures"]) == {"distance", "largest_logit"}
    data = open_run(answer["out"])
    assert {"entropy", "entropy_sd", "distance", "distance_sd", "largest_logit"} < set(data)
    assert "sink_mass" not in data
    assert data.distance.attrs["units"] == "tokens"
    page = Path(answer["page"]).read_text(encoding="utf-8")
    assert "Attended distance" in page
    code, out, _ = joma("probe", checkpoints, "--out", tmp_path, "--json", capsys=capsys)
    assert json.loads(out)["out"] != answer["out"]


@pytest.mark.usefixtures("blank")
def test_what_is_ignored_is_said_and_costs_nothing(checkpoints, tmp_path, capsys):
    shutil.copytree(checkpoints, tmp_path / "series")
    for name in ("final", "epoch_3"):
        shutil.copytree(checkpoints / "step4", tmp_path / "series" / name)
    (tmp_path / "series" / "step1" / "optimizer.pt").write_bytes(b"")
    code, out, err = joma("probe", tmp_path / "series", "--out", tmp_path / "out", capsys=capsys)
    assert (code, err) == (0, "")
    text = " ".join(out.replace("│", " ").split())
    assert "the name 'final' says no step" in text
    assert "epoch_3 counts epochs, and the series counts steps" in text
    assert "optimizer.pt in step1 hold" in text


@pytest.mark.usefixtures("blank")
def test_an_adapter_needs_its_base(checkpoints, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    with configs.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.GPTNeoXForCausalLM.from_pretrained(checkpoints / "step0")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["dense"]))
        adapted.peft_config["default"].base_model_name_or_path = "someone/base"
        adapted.save_pretrained(tmp_path / "adapter")
    code, out, err = joma("probe", tmp_path / "adapter", "--out", tmp_path / "out", capsys=capsys)
    assert (code, out) == (2, "")
    assert "the base 'someone/base', which is no folder here); give the base as `--base`" in err
    options = ["--base", checkpoints / "step0", "--out", tmp_path / "out", "--json"]
    code, out, err = joma("probe", tmp_path / "adapter", *options, capsys=capsys)
    assert (code, err) == (0, "")
    assert open_run(json.loads(out)["out"]).attrs["base"] == str(checkpoints / "step0")


@pytest.mark.usefixtures("blank")
def test_the_report_takes_probes_in_and_names_damaged_ones(checkpoints, tmp_path, capsys):
    outs = []
    for name in ("step0", "step1"):
        options = ["--out", tmp_path / "runs" / "probe", "--json"]
        outs.append(json.loads(joma("probe", checkpoints / name, *options, capsys=capsys)[1])["out"])
    code, out, err = joma("report", tmp_path / "runs", "--json", capsys=capsys)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert (answer["runs"], answer["probes"], answer["left_out"]) == (0, sorted(outs), [])
    assert "Probed models" in Path(answer["report"]).read_text(encoding="utf-8")
    (Path(outs[0]) / "audit.json").write_text("[]")
    code, out, err = joma("report", tmp_path / "runs", "--json", capsys=capsys)
    assert code == 2
    assert json.loads(out)["probes"] == [outs[1]]
    assert err.startswith(f"joma: left out: {outs[0]}/audit.json is ")
    assert err.count("\n") == 1


def test_a_probe_without_any_model_to_run_has_a_page(tmp_path, capsys):
    (tmp_path / "step0").mkdir()
    save_file({"wte.weight": torch.eye(40, 8)}, tmp_path / "step0" / "model.safetensors")
    code, out, _ = joma("probe", tmp_path, "--out", tmp_path / "out", "--json", capsys=capsys)
    assert code == 1
    page = Path(json.loads(out)["page"]).read_text(encoding="utf-8")
    assert "Token embeddings have a root mean square cosine of" in page
