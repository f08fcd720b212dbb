"""Symmetry's probes against loops over permutations, folds, pairs of slices and triples of positions."""

from __future__ import annotations

import copy
import itertools
import math
from collections import UserDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import joma
from joma.arguments import InputError
from joma.models.transformer import Decoder, DecoderConfig
from joma.probes import symmetry
from joma.probes.symmetry import adjacency, own_location, permutation_gap, position_decodability, slice_similarity

SEEDS = st.integers(0, 2**32)


def decoder(seeds=(0,), dtype=torch.float64, **parts):
    config = DecoderConfig(**{"vocabulary": 9, "width": 8, "heads": 2, "length": 10, **parts})
    return Decoder(config, generators=[torch.Generator().manual_seed(seed) for seed in seeds], dtype=dtype)


# Permutations


def test_it_is_public():
    assert joma.permutation_gap is permutation_gap


@given(length=st.integers(2, 5), sequences=st.integers(1, 3), layers=st.integers(1, 2), seed=st.integers(0, 999))
@settings(max_examples=15)
def test_the_gap_is_that_of_a_loop_over_permutations(length, sequences, layers, seed):
    model = decoder((seed, seed + 1), layers=layers, positions="learned")
    rng = np.random.default_rng(seed)
    tokens = rng.integers(9, size=(sequences, length))
    found = permutation_gap(model, tokens, inputs=5, generator=torch.Generator().manual_seed(seed))
    assert found.permutations == math.factorial(length - 1)
    stray = torch.randint(9, (sequences, 5, length - 1), generator=torch.Generator().manual_seed(seed))
    for which in range(2):

        def y(row, which=which):
            with torch.no_grad():
                return model(torch.tensor([list(map(int, row))]))[which, 0, -1].numpy()

        change, square = [], []
        for s, row in enumerate(tokens):
            orders = itertools.permutations(row[:-1])
            change += [np.linalg.norm(y([*order, row[-1]]) - y(row)) for order in orders]
            outputs = np.stack([y([*r, row[-1]]) for r in stray[s]])
            square += [((outputs - outputs.mean(axis=0)) ** 2).sum(axis=1).mean()]
        spread = np.sqrt(np.mean(square))
        np.testing.assert_allclose(found.spread[which], spread, rtol=1e-10)
        np.testing.assert_allclose(found.largest[which], max(change) / spread, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.mean[which], np.mean(change) / spread, rtol=1e-9, atol=1e-12)


@st.composite
def decoders(draw):
    """Parts of a decoder, and tokens for it."""
    heads, part = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 6]))
    length, vocabulary = draw(st.integers(3, 9)), draw(st.integers(6, 12))
    parts = {
        "heads": heads,
        "width": heads * part,
        "vocabulary": vocabulary,
        "length": length,
        "layers": draw(st.integers(1, 3)),
        "hidden": draw(st.integers(4, 20)),
        "norm": draw(st.sampled_from(["pre", "post", "none"])),
        "activation": draw(st.sampled_from(["relu", "gelu"])),
        "residual": draw(st.booleans()),
        "mask": draw(st.sampled_from(["full", "causal"])),
        "projection": draw(st.booleans()),
    }
    rng = np.random.default_rng(draw(SEEDS))
    return parts, torch.from_numpy(rng.integers(vocabulary, size=(2, length))), draw(st.integers(0, 999))


@given(decoders())
@settings(max_examples=40)
def test_without_encoding_order_is_unknown_to_a_full_mask_and_to_one_causal_layer(case):
    parts, tokens, seed = case
    if parts["mask"] == "causal":
        parts["layers"] = 1
    found = permutation_gap(decoder((seed, seed + 1), **parts), tokens, samples=20)
    assert found.largest.shape == (2,)
    assert float((found.largest * found.spread).max()) <= 1e-12
    # A norm of two units leaves little but their signs, and layers without residuals can lose nearly all of their
    # input: there the spread is not much above rounding either.
    assert bool(((found.largest <= 1e-10) | (found.spread < 1e-4)).all())


@given(decoders(), st.sampled_from(["none", "sinusoidal", "learned", "rotary"]))
@settings(max_examples=40)
def test_encodings_or_a_causal_mask_and_a_second_layer_break_the_symmetry(case, positions):
    parts, _, seed = case
    if positions == "none":
        parts.update(mask="causal", layers=max(2, parts["layers"]))
    # As above: too narrow, or without residuals, there may be nothing left to see.
    parts.update(positions=positions, residual=True, vocabulary=12, width=4 * parts["width"])
    tokens = torch.arange(parts["length"])[None]
    found = permutation_gap(decoder((seed,), **parts), tokens, samples=20)
    assert float(found.largest) > 1e-4


def test_a_batch_is_bounded_and_changes_nothing(monkeypatch):
    model, asked = decoder((0, 1), layers=2), []

    def watched(tokens):
        asked.append(len(tokens))
        return model(tokens)

    tokens = torch.tensor([[1, 2, 3, 4, 5], [5, 5, 0, 8, 7]])
    whole = permutation_gap(watched, tokens)
    assert max(asked) == 48
    asked.clear()
    monkeypatch.setattr(symmetry, "ELEMENTS", 7 * 2 * 5 * 9)
    parts = permutation_gap(watched, tokens)
    assert max(asked) == 7
    for name in ("largest", "mean", "spread"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=0)


def test_beyond_six_earlier_tokens_permutations_are_sampled():
    shown = []

    def model(tokens):
        shown.append(tokens)
        return torch.nn.functional.one_hot(tokens, 9).double().cumsum(dim=1)

    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [8, 7, 6, 5, 4, 3, 2, 1]])
    found = permutation_gap(model, tokens, samples=50, inputs=2)
    assert found.permutations == 50
    assert float(found.largest) == 0.0
    shuffled = shown[3].view(2, 50, 8)
    assert all(len({tuple(row) for row in own.tolist()}) == 50 for own in shuffled)
    for own, row in zip(shuffled, tokens, strict=True):
        assert bool((own[:, -1] == row[-1]).all())
        assert bool((own.sort(dim=-1).values == row.sort().values).all())
    again = permutation_gap(model, tokens, samples=50, generator=torch.Generator().manual_seed(1))
    assert float(again.largest) == 0.0
    assert not shown[-3].equal(shuffled.flatten(0, 1))
    assert permutation_gap(model, tokens[:, :7]).permutations == 720


def test_a_model_that_ignores_earlier_tokens_has_no_gap():
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    found = permutation_gap(lambda tokens: table[tokens], [1, 2, 3])
    assert (float(found.largest), float(found.mean), float(found.spread)) == (0.0, 0.0, 0.0)


# Rounding


NOISE = {torch.float64: 2**-45, torch.float32: 2**-16, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # of |y|, at most
FOUR = st.sampled_from(list(NOISE))


def size(model, tokens, vocabulary):
    """The root mean square of outputs |y| over random tokens before the last ones."""
    rows = torch.randint(vocabulary, (64, tokens.shape[1]), generator=torch.Generator().manual_seed(0))
    rows[:, -1] = tokens[0, -1]
    with torch.no_grad():
        return float(model(rows)[..., -1, :].double().square().sum(dim=-1).mean().sqrt())


@st.composite
def roomy(draw):
    """Parts of a decoder that is wide enough for norms not to magnify rounding, one sequence and a dtype."""
    parts = {
        "width": 16 * draw(st.integers(1, 3)),
        "vocabulary": 12,
        "length": draw(st.integers(4, 9)),
        "layers": draw(st.integers(1, 3)),
        "norm": draw(st.sampled_from(["pre", "post", "none"])),
        "residual": draw(st.booleans()),
    }
    tokens = torch.from_numpy(np.random.default_rng(draw(SEEDS)).permutation(12)[None, : parts["length"]].copy())
    return parts, tokens, draw(st.integers(0, 999))


@given(roomy(), FOUR, st.sampled_from(["learned", "sinusoidal", "rotary"]))
@settings(max_examples=40, deadline=None)
def test_in_every_dtype_the_gap_is_that_of_float64_up_to_rounding(case, dtype, positions):
    parts, tokens, seed = case
    low = decoder((seed,), positions=positions, **parts).to(dtype)
    high = decoder((seed,), positions=positions, **parts)
    high.load_state_dict({name: weight.double() for name, weight in low.state_dict().items()})
    found, exact = (permutation_gap(model, tokens, samples=20) for model in (low, high))
    error = NOISE[dtype] * size(high, tokens, 12) / float(exact.spread)
    assume(error < 0.25)  # else other tokens change less than a few roundings, and there is nothing to compare with
    assert float(found.largest) == pytest.approx(float(exact.largest), abs=(2 + float(exact.largest)) * error)
    assert float(found.mean) > 0.0
    assert float(found.spread) == pytest.approx(float(exact.spread), rel=error)


@given(roomy(), FOUR)
@settings(max_examples=40, deadline=None)
def test_in_every_dtype_a_full_mask_without_encoding_knows_no_order_up_to_rounding(case, dtype):
    parts, tokens, seed = case
    model = decoder((seed,), positions="none", mask="full", **parts).to(dtype)
    found = permutation_gap(model, tokens, samples=20)
    assert float(found.largest * found.spread) <= 2 * NOISE[dtype] * size(model, tokens, 12)


@given(dtype=FOUR, seed=st.integers(0, 999), earlier=st.integers(2, 60), layers=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_in_every_dtype_rounding_is_not_taken_for_what_earlier_tokens_change(dtype, seed, earlier, layers):
    """Attention weights depend on the earlier tokens and their order; what is read, the same everywhere, does not."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    key, place, table = draw(9, 16).to(dtype), draw(earlier + 1, 16).to(dtype), draw(9, 16).to(dtype)

    def model(tokens):
        y = table[tokens]
        for _ in range(layers):
            weights = ((key[tokens] + place) @ y.mT / 4).softmax(dim=-1)
            y = y + weights @ table[:1].expand(len(tokens), tokens.shape[1], 16) / 2
        return y

    tokens = torch.from_numpy(np.random.default_rng(seed).integers(9, size=earlier + 1))
    found = permutation_gap(model, tokens, samples=20, vocabulary=9)
    assert (float(found.largest), float(found.mean)) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", list(NOISE))
def test_in_every_dtype_noise_of_one_seed_is_noticed(dtype):
    """Five per cent of the outputs' size, beside a seed whose outputs are a thousand times as large."""
    model = decoder((0, 1)).to(dtype)
    scale, draw = torch.tensor([1.0, 1000.0], dtype=dtype)[:, None, None, None], torch.Generator().manual_seed(0)

    def noisy(tokens):
        y = model(tokens)
        return scale * y + torch.tensor([0.05, 0.0])[:, None, None, None].to(dtype) * y.abs().amax() * torch.randn(
            y.shape, generator=draw
        ).sign().to(dtype)

    with pytest.raises(InputError, match="`model` must be deterministic, got outputs that differ"):
        permutation_gap(noisy, [[1, 2, 3, 4]])


# Dropout


class Wrapped(torch.nn.Module):
    """A bag of embeddings beside a part that is never called, or a rate of its own."""

    def __init__(self, part=None, **rates):
        super().__init__()
        self.embedding, self.part = torch.nn.Embedding(9, 4), part
        for name, rate in rates.items():
            setattr(self, name, rate)

    def forward(self, tokens):
        return self.embedding(tokens).cumsum(dim=1)


@pytest.mark.parametrize(
    "model",
    [
        Wrapped(torch.nn.Dropout(0.01)),
        Wrapped(torch.nn.Sequential(torch.nn.AlphaDropout(0.01))),
        Wrapped(torch.nn.MultiheadAttention(4, 2, dropout=0.01)),
        Wrapped(torch.nn.LSTM(4, 4, num_layers=2, dropout=0.01)),
        Wrapped(Wrapped(attention_dropout=0.01)),
        Wrapped(attn_pdrop=0.01),
        Wrapped(config=SimpleNamespace(vocab_size=9, decoder_layerdrop=0.01)),
    ],
)
def test_a_module_that_drops_something_is_refused_in_training_mode_alone(model):
    with pytest.raises(InputError, match=r"`model` must be deterministic, got dropout of 0\.01 .*model\.eval\(\)"):
        permutation_gap(model.train(), [[1, 2, 3]])
    assert float(permutation_gap(model.eval(), [[1, 2, 3]]).largest) < 1e-5


@pytest.mark.parametrize(
    "model",
    [
        Wrapped(torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.LayerNorm(4))),
        Wrapped(torch.nn.MultiheadAttention(4, 2)),
        Wrapped(torch.nn.Dropout(0.5).eval()),
        Wrapped(drop_last=True, dropped=3, dropout=0.0, keep=0.5),
        Wrapped(config=SimpleNamespace(vocab_size=9, layerdrop=0.0, summary_first_dropout=0.1)),  # as GPT-2's
        decoder(dropout=0.5),  # it needs a key to drop anything
    ],
)
def test_training_mode_alone_is_no_reason_to_refuse(model):
    assert model.training
    assert float(permutation_gap(model, [[1, 2, 3]]).spread) > 0


# Models as they are


def test_a_sequence_too_long_for_the_model_is_told_from_tokens_it_does_not_know():
    table = torch.randn(16, 50, generator=torch.Generator().manual_seed(0))

    def model(tokens):
        if int(tokens.max()) >= 50:
            raise IndexError("index out of range in self")
        return torch.nn.functional.one_hot(tokens, 50).cumsum(dim=1) + table[torch.arange(tokens.shape[1])]

    assert float(permutation_gap(model, torch.arange(16)).spread) > 0
    for length in (17, 20, 40):
        expected = rf"`tokens` must be no longer than the model takes, 16 positions, got {length} \(index"
        with pytest.raises(InputError, match=expected):
            permutation_gap(model, torch.arange(length))
    for tokens in ([1, 2, 50], torch.arange(60)):
        with pytest.raises(InputError, match="`tokens` must be in the model's vocabulary, got"):
            permutation_gap(model, tokens)


def test_a_tokenizers_answer_is_taken():
    plain = permutation_gap(decoder(positions="learned"), [[1, 2, 3]])
    for ids in ([[1, 2, 3]], [1, 2, 3], np.array([[1, 2, 3]], dtype=np.uint16), torch.tensor([[1, 2, 3]])):
        answer = UserDict(input_ids=ids, attention_mask=torch.ones(1, 3))  # as transformers' BatchEncoding
        assert permutation_gap(decoder(positions="learned"), answer) == plain
    with pytest.raises(InputError, match="`tokens` must be without padding"):
        permutation_gap(decoder(), {"input_ids": [[1, 2, 3], [4, 5, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hugging_face_model_is_asked_as_it_is():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)  # transformers draws its weights from the global stream
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).double()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with pytest.raises(InputError, match=r"`model` must be deterministic.*model\.eval\(\)"):
        permutation_gap(model.train(), tokens)
    found = permutation_gap(model.eval(), tokens)
    assert float(found.largest) > 1e-3
    half = permutation_gap(copy.deepcopy(model).bfloat16(), tokens)
    torch.testing.assert_close(half.largest, found.largest, rtol=0.1, atol=0)
    with pytest.raises(InputError, match=r"`model` must be deterministic.*model\.eval\(\)"):
        permutation_gap(copy.deepcopy(model).bfloat16().train(), tokens)
    with pytest.raises(InputError, match=r"`tokens` must be no longer than the model takes, 8 positions, got 10"):
        permutation_gap(model, [list(range(10))])
    by_hand = permutation_gap(lambda tokens: model(tokens).logits, tokens)
    torch.testing.assert_close(found.largest, by_hand.largest, rtol=1e-12, atol=0)
    with pytest.raises(InputError, match=r"`tokens` must be in the model's vocabulary, 0 to 10, got 1 to 11"):
        permutation_gap(model, [[1, 2, 11]])


class Embedded(torch.nn.Module):
    """A model that says nothing of its vocabulary, which has fewer tokens than outputs."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 7)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).cumsum(dim=1))


def test_the_vocabulary_is_looked_up_given_or_the_number_of_outputs():
    model = Embedded()
    with pytest.raises(InputError, match=r"`tokens` must be in the model's vocabulary, got .*give their number"):
        permutation_gap(model, [[1, 2, 3]])  # random tokens up to 6 are asked for
    assert float(permutation_gap(model, [[1, 2, 3]], vocabulary=5).largest) < 1e-5
    with pytest.raises(InputError, match="vocabulary, 0 to 4, got 1 to 5"):
        permutation_gap(model, [[1, 2, 5]], vocabulary=5)
    model.config = SimpleNamespace(vocab_size=5)
    assert float(permutation_gap(model, [[1, 2, 3]]).largest) < 1e-5
    with pytest.raises(InputError, match="vocabulary, 0 to 8"):
        permutation_gap(decoder(), [[1, 9]])


ONE_HOT = partial(torch.nn.functional.one_hot, num_classes=9)


@pytest.mark.parametrize(
    ("model", "tokens", "name", "word"),
    [
        (lambda tokens: ONE_HOT(tokens).double().sum(dim=1), [[1, 2, 3]], "model", "no such position axis"),
        (lambda tokens: ONE_HOT(tokens).double()[:, -1:], [[1, 2, 3]], "model", "position axis.*not a classifier"),
        (lambda tokens: tokens.tolist(), [[1, 2, 3]], "model", "a list; wrap"),
        (lambda tokens: ONE_HOT(tokens).double() / 0, [[1, 2, 3]], "model", "finite"),
        (lambda tokens: torch.rand(*tokens.shape, 9), [[1, 2, 3]], "model", "deterministic.*eval"),
        (ONE_HOT, [[1, 2, 3]], "model", "floating-point type, got torch.int64.*float"),
        (decoder(), [], "tokens", "at least 2 tokens"),
        (decoder(), [[]], "tokens", "at least 2 tokens"),
        (decoder(), [[1, 2], [1, 2, 3]], "tokens", "got a list .*rows of one length"),
        (decoder(), {"ids": [1, 2]}, "tokens", "got a dict without `input_ids`"),
        (decoder(), None, "tokens", "got a NoneType .*tokenizer"),
        (decoder(), "to be or not", "tokens", "got a str .*tokenizer"),
        (decoder(), [["to", "be"]], "tokens", "got a list .*tokenizer"),
        (decoder(), [[True, False]], "tokens", "torch.bool"),
        (decoder(), [[1], [2]], "tokens", "at least 2 tokens"),
        (decoder(), [3], "tokens", "at least 2 tokens"),
        (decoder(), torch.zeros(0, 3, dtype=torch.int64), "tokens", "at least 2"),
        (decoder(), [[0.5, 1.0]], "tokens", "float32"),
        (decoder(), torch.zeros(2, 2, 2, dtype=torch.int64), "tokens", r"\(2, 2, 2\)"),
        (decoder(), [[-1, 2]], "tokens", "-1 to 2"),
        (lambda tokens: torch.eye(9)[tokens], [[1, 9]], "tokens", "in the model's vocabulary"),
    ],
)
def test_bad_models_and_tokens_are_named(model, tokens, name, word):
    with pytest.raises(InputError, match=f"`{name}` must be .*{word}") as caught:
        permutation_gap(model, tokens)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["samples", "inputs", "vocabulary"])
def test_bad_options_are_named(option):
    with pytest.raises(InputError, match=f"`{option}`"):
        permutation_gap(decoder(), [[1, 2]], **{option: 0})


# Position


def by_folds(states, folds, ridge):
    """The discriminant by explicit covariances, one state at a time."""
    samples, positions, width = states.shape
    right = np.zeros((samples, positions))
    for fold in range(folds):
        rest = np.array([i for i in range(samples) if i % folds != fold])
        rows = states[rest].reshape(-1, width)
        label = np.tile(np.arange(positions), len(rest))
        means = np.stack([rows[label == p].mean(axis=0) for p in range(positions)])
        within = np.cov((rows - means[label]).T, bias=True).reshape(width, width)
        total = np.cov(rows.T, bias=True).reshape(width, width)
        inverse = np.linalg.inv(within + ridge * np.trace(total) / width * np.eye(width))
        for i in range(fold, samples, folds):
            for p in range(positions):
                off = states[i, p] - means
                right[i, p] = np.argmin([d @ inverse @ d for d in off]) == p
    of_fold = [right[fold::folds].mean() for fold in range(folds)]
    return right.mean(), np.std(of_fold, ddof=1), right.mean(axis=0)


@given(seed=SEEDS, samples=st.integers(4, 9), positions=st.integers(2, 5), width=st.integers(1, 6))
@settings(max_examples=30)
def test_decodability_is_that_of_the_nearest_mean_fold_by_fold(seed, samples, positions, width):
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((2, 3, samples, positions, width))
    states[:, 1] += rng.standard_normal((positions, width))
    found = position_decodability(torch.from_numpy(states), folds=3, ridge=0.01)
    assert found.chance == 1 / positions
    for lead in np.ndindex(2, 3):
        accuracy, spread, by_position = by_folds(states[lead], 3, 0.01)
        np.testing.assert_allclose(found.accuracy[lead], accuracy, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.spread[lead], spread, rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.by_position[lead], by_position, rtol=0, atol=1e-12)


@given(seed=SEEDS, scale=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
@settings(max_examples=20)
def test_scales_shifts_and_rotations_do_not_change_decodability(seed, scale, shift):
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((12, 5, 4)) + 2 * rng.standard_normal((5, 4))
    turn = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    plain = position_decodability(torch.from_numpy(states))
    turned = position_decodability(torch.from_numpy(scale * states @ turn + shift))
    torch.testing.assert_close(turned.by_position, plain.by_position, rtol=0, atol=0)


def test_positions_along_a_line_are_all_found():
    """Regression on one-hot positions would answer with the first and last alone."""
    generator = torch.Generator().manual_seed(0)
    states = torch.arange(8.0)[:, None] * torch.tensor([1.0, 2.0]) + 0.1 * torch.randn(40, 8, 2, generator=generator)
    assert position_decodability(states).by_position.tolist() == [1.0] * 8


def test_states_without_position_are_at_chance_and_fixed_ones_are_found():
    generator = torch.Generator().manual_seed(0)
    alike = torch.randn(30, 1, 6, generator=generator).expand(30, 5, 6)
    fixed = torch.randn(1, 5, 6, generator=generator).expand(30, 5, 6)
    found = position_decodability(torch.stack([alike, fixed, torch.ones(30, 5, 6)]))
    np.testing.assert_allclose(found.accuracy, [0.2, 1.0, 0.2], atol=1e-12)
    noise = position_decodability(torch.randn(400, 5, 6, generator=generator))
    assert abs(float(noise.accuracy) - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 2000)


# Slices


def centred(x):
    return x - x.mean(axis=0)


def by_covariance(x, y):
    """Linear CKA by cross-covariances."""
    x, y = centred(x), centred(y)
    return np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def by_kernels(x, y):
    """Linear CKA by the independence criterion tr(K H L H) of the Gram matrices."""
    h = np.eye(len(x)) - 1 / len(x)

    def criterion(k, other):
        return np.trace(k @ h @ other @ h)

    k, other = x @ x.T, y @ y.T
    return criterion(k, other) / math.sqrt(criterion(k, k) * criterion(other, other))


def unbiased(x, y):
    """Song et al.'s estimate by its sum over distinct samples i, j, q, r, up to a common factor."""
    k, other = x @ x.T, y @ y.T
    found = 0.0
    for i, j, q, r in itertools.permutations(range(len(x)), 4):
        found += k[i, j] * (other[i, j] + other[q, r] - 2 * other[i, q])
    return found


@st.composite
def stacks(draw):
    rng = np.random.default_rng(draw(SEEDS))
    seeds, layers, samples = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(4, 6))
    shape = (seeds, layers, samples, draw(st.integers(2, 3)), draw(st.integers(1, 5)))
    return rng.standard_normal(shape) + draw(st.sampled_from([0.0, 3.0])), draw(st.integers(1, 7))


@given(stacks())
@settings(max_examples=25)
def test_similarities_are_those_of_loops_over_pairs(case):
    states, block = case
    found = slice_similarity(torch.from_numpy(states), block=block)
    fair = slice_similarity(torch.from_numpy(states), block=block, debiased=True)
    seeds, layers, _, positions, width = states.shape
    assert found.cka.shape == (seeds, layers, layers, positions, positions)
    for seed, a, b, i, j in np.ndindex(*found.cka.shape):
        x, y = states[seed, a, :, i], states[seed, b, :, j]
        np.testing.assert_allclose(found.cka[seed, a, b, i, j], by_covariance(x, y), rtol=0, atol=1e-12)
        np.testing.assert_allclose(found.cka[seed, a, b, i, j], by_kernels(x, y), rtol=0, atol=1e-10)
        units = [np.corrcoef(x[:, k], y[:, k])[0, 1] for k in range(width)]
        np.testing.assert_allclose(found.correlation[seed, a, b, i, j], np.mean(units), rtol=0, atol=1e-12)
    x, y = states[0, 0, :, 0], states[0, -1, :, 1]
    sizes = [unbiased(x, x), unbiased(y, y)]
    if min(sizes) > 1e-9:
        expected = np.clip(unbiased(x, y) / math.sqrt(sizes[0] * sizes[1]), -1, 1)
        np.testing.assert_allclose(fair.cka[0, 0, -1, 0, 1], expected, rtol=1e-8, atol=1e-8)


def test_few_samples_make_unrelated_slices_similar_unless_debiased():
    states = torch.randn(2, 40, 4, 100, generator=torch.Generator().manual_seed(0))
    plain, fair = (slice_similarity(states, debiased=debiased).cka[0, 1] for debiased in (False, True))
    assert float(plain.min()) > 0.6
    assert float(fair.abs().max()) < 0.1


def test_what_does_not_vary_is_left_out():
    states = torch.randn(2, 20, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = slice_similarity(states)
    padded = torch.cat([states, torch.full((2, 20, 3, 2), 5.0, dtype=torch.float64)], dim=-1)
    padded[..., -1] += 1e-9 * torch.rand(2, 20, 3, generator=torch.Generator().manual_seed(1))
    found = slice_similarity(padded)
    torch.testing.assert_close(found.cka, whole.cka, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.correlation, whole.correlation, rtol=0, atol=1e-14)
    states[0, :, 1] = 7.0
    fixed = slice_similarity(states)
    missing = fixed.cka.isnan()
    assert missing.equal(fixed.correlation.isnan())
    assert missing.sum() == 2 * 6 - 1
    assert bool(missing[0, :, 1].all())
    assert bool(missing[:, 0, :, 1].all())
    torch.testing.assert_close(fixed.cka[~missing], whole.cka[~missing], rtol=0, atol=0)
    left = own_location(fixed.cka[1:, :1, ::2, ::2])  # from layer 1 to layer 0, without location 1
    found = own_location(fixed.cka)
    torch.testing.assert_close(found.share[1, 0], left.share[0, 0], rtol=0, atol=0)
    torch.testing.assert_close(found.margin[1, 0], left.margin[0, 0], rtol=0, atol=0)


@given(stacks())
@settings(max_examples=25)
def test_a_location_is_its_own_if_no_other_is_as_similar(case):
    states, _ = case
    similarity = slice_similarity(torch.from_numpy(states)).correlation
    found = own_location(similarity)
    for index in np.ndindex(*similarity.shape[:-2]):
        table = similarity[index].numpy()
        margins = [table[i, i] - max(np.delete(table[i], i)) for i in range(len(table))]
        np.testing.assert_allclose(found.margin[index], np.mean(margins), rtol=0, atol=1e-12)
        assert float(found.share[index]) == pytest.approx(np.mean(np.array(margins) > 0))


def test_a_residual_stream_stays_at_its_location():
    model = decoder(layers=4, width=32, vocabulary=9)
    tokens = torch.randint(9, (200, 6), generator=torch.Generator().manual_seed(0))
    states = torch.stack(model.activations(tokens, ["residual"])["residual"], dim=-4)
    found = own_location(slice_similarity(states).cka)
    assert found.share.shape == (1, 5, 5)
    assert float(found.share.min()) == 1.0
    shuffled = states[..., torch.tensor([1, 2, 3, 4, 5, 0]), :].clone()
    moved = own_location(slice_similarity(torch.cat([states[:, :1], shuffled[:, 1:]], dim=1)).cka)
    assert float(moved.share[0, 0, 1:].max()) == 0.0


# Adjacency


@given(seed=SEEDS, positions=st.integers(3, 6), width=st.integers(1, 4))
@settings(max_examples=30)
def test_adjacency_is_a_count_of_triples(seed, positions, width):
    rng = np.random.default_rng(seed)
    states = rng.integers(-2, 3, size=(2, 3, positions, width)).astype(float)
    found = adjacency(torch.from_numpy(states), nulls=3, generator=torch.Generator().manual_seed(5))
    order = torch.Generator().manual_seed(5)
    orders = [torch.randperm(positions, generator=order).numpy() for _ in range(3)]
    for lead in range(2):
        for one, score in zip([np.arange(positions), *orders], [found.score[lead], *found.null[lead]], strict=True):
            assert float(score) == pytest.approx(count_of_triples(states[lead][:, one]), abs=1e-12)
        for distance in range(1, positions):
            pairs = [cosine(row[i], row[i + distance]) for row in states[lead] for i in range(positions - distance)]
            np.testing.assert_allclose(found.cosine[lead, distance - 1], np.mean(pairs), rtol=0, atol=1e-12)


def cosine(a, b):
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return a @ b / size if size else 0.0


def count_of_triples(states):
    points = []
    for row in states:
        for i, j, k in itertools.product(range(len(row)), repeat=3):
            if abs(i - j) == 1 and abs(i - k) > 1:
                ahead = cosine(row[i], row[j]) - cosine(row[i], row[k])
                points.append(0.5 if abs(ahead) < 1e-9 else float(ahead > 0))
    return np.mean(points)


def test_causal_layers_with_random_weights_make_neighbours_similar_and_full_ones_do_not():
    tokens = torch.randint(9, (40, 10), generator=torch.Generator().manual_seed(0))

    def scores(mask):
        model = decoder((0, 1, 2), layers=2, width=32, mask=mask, residual=False)
        return adjacency(torch.stack(model.activations(tokens, ["residual"])["residual"], dim=1))

    causal, full = scores("causal"), scores("full")
    assert causal.score.shape == (3, 3)
    assert causal.null.shape == (3, 3, 100)
    assert bool((causal.score[:, 1:] > causal.null[:, 1:].amax(dim=-1)).all())
    assert float((full.score - 0.5).abs().max()) < 0.05
    assert float((causal.score[:, 0] - 0.5).abs().max()) < 0.05


def test_arrays_and_lists_are_taken_as_tensors_are():
    array = STATES.double().numpy()[..., ::-1]
    array.flags.writeable = False
    tensor = torch.from_numpy(array.copy())
    assert position_decodability(array, folds=2).accuracy.equal(position_decodability(tensor, folds=2).accuracy)
    assert adjacency(array).score.equal(adjacency(tensor.tolist()).score)
    similar = slice_similarity(array).cka
    assert similar.equal(slice_similarity(tensor).cka)
    assert own_location(similar.numpy()).margin.equal(own_location(similar).margin)


STATES = torch.randn(2, 6, 4, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("probe", "states", "options", "name"),
    [
        (position_decodability, STATES.long(), {}, "states"),
        (position_decodability, STATES.long().numpy(), {}, "states"),
        (position_decodability, [[[1.0], [2.0, 3.0]]], {}, "states"),
        (own_location, torch.ones(1, 1, 2, 2, dtype=torch.int64), {}, "similarity"),
        (own_location, [[[[1.0, 0.5], [0.5]]]], {}, "similarity"),
        (position_decodability, STATES[0, 0], {}, "states"),
        (position_decodability, STATES[..., :1, :], {}, "states"),
        (position_decodability, STATES[..., :0], {}, "states"),
        (position_decodability, STATES / 0, {}, "states"),
        (position_decodability, STATES, {"folds": 7}, "folds"),
        (position_decodability, STATES, {"folds": 1}, "folds"),
        (position_decodability, STATES, {"ridge": 0.0}, "ridge"),
        (slice_similarity, STATES[0], {}, "states"),
        (slice_similarity, STATES[:, :1], {}, "states"),
        (slice_similarity, STATES[:, :3], {"debiased": True}, "states"),
        (slice_similarity, STATES, {"tolerance": 2.0}, "tolerance"),
        (slice_similarity, STATES, {"block": 0}, "block"),
        (own_location, STATES[0], {}, "similarity"),
        (own_location, STATES, {}, "similarity"),
        (own_location, torch.ones(2, 2, 1, 1), {}, "similarity"),
        (adjacency, STATES[..., :2, :], {}, "states"),
        (adjacency, STATES, {"nulls": 0}, "nulls"),
    ],
)
def test_bad_states_are_named(probe, states, options, name):
    with pytest.raises(InputError, match=f"`{name}` must be"):
        probe(states, **options)
