"""The permutation gap against a loop over permutations, in every dtype, and what models and tokens are refused."""

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
from joma.probes import permutation
from joma.probes.permutation import moved_predictions, permutation_gap
from toy_decoder import decoder

SEEDS = st.integers(0, 2**32)


# Permutations


def test_it_is_public():
    assert joma.permutation_gap is permutation_gap


@given(length=st.integers(2, 5), sequences=st.integers(1, 3), layers=st.integers(1, 2), seed=st.integers(0, 999))
@settings(max_examples=15)
def test_the_gap_is_that_of_a_loop_over_permutations(length, sequences, layers, seed):
    model = decoder((seed, seed + 1), layers=layers, positions="learned")
    rng = np.random.default_rng(seed)
    tokens = rng.integers(9, size=(sequences, length))
    gap = permutation_gap(model, tokens, inputs=5, generator=torch.Generator().manual_seed(seed))
    assert gap.permutations == math.factorial(length - 1)
    earlier = torch.randint(9, (sequences, 5, length - 1), generator=torch.Generator().manual_seed(seed))

    def y(row):
        with torch.no_grad():
            return model(torch.tensor([list(map(int, row))]))[:, 0, -1].numpy()

    change, square = [], []
    for s, row in enumerate(tokens):
        orders = itertools.permutations(row[:-1])
        base = y(row)
        change += [np.linalg.norm(y([*order, row[-1]]) - base, axis=-1) for order in orders]
        outputs = np.stack([y([*r, row[-1]]) for r in earlier[s]])
        square += [((outputs - outputs.mean(axis=0)) ** 2).sum(axis=-1).mean(axis=0)]
    spread = np.sqrt(np.mean(square, axis=0))
    np.testing.assert_allclose(gap.spread, spread, rtol=1e-10)
    np.testing.assert_allclose(gap.largest, np.max(change, axis=0) / spread, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gap.mean, np.mean(change, axis=0) / spread, rtol=1e-9, atol=1e-12)


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
    gap = permutation_gap(decoder((seed, seed + 1), **parts), tokens, samples=20)
    assert gap.largest.shape == (2,)
    assert float((gap.largest * gap.spread).max()) <= 1e-12
    # A norm of two units leaves little but their signs, and layers without residuals can lose nearly all of their
    # input: there the spread is not much above rounding either.
    assert bool(((gap.largest <= 1e-10) | (gap.spread < 1e-4)).all())


@given(decoders(), st.sampled_from(["none", "sinusoidal", "learned", "rotary"]))
@settings(max_examples=40)
def test_encodings_or_a_causal_mask_and_a_second_layer_break_the_symmetry(case, positions):
    parts, _, seed = case
    if positions == "none":
        parts.update(mask="causal", layers=max(2, parts["layers"]))
    # As above: too narrow, or without residuals, there may be nothing left to see.
    parts.update(positions=positions, residual=True, vocabulary=12, width=4 * parts["width"])
    tokens = torch.arange(parts["length"])[None]
    gap = permutation_gap(decoder((seed,), **parts), tokens, samples=20)
    assert float(gap.largest) > 1e-4


def test_a_batch_is_bounded_and_changes_nothing(monkeypatch):
    model, batches = decoder((0, 1), layers=2), []

    def watched(tokens):
        batches.append(len(tokens))
        return model(tokens)

    tokens = torch.tensor([[1, 2, 3, 4, 5], [5, 5, 0, 8, 7]])
    whole = permutation_gap(watched, tokens)
    assert max(batches) == 48
    batches.clear()
    monkeypatch.setattr(permutation, "MAX_LOGITS", 7 * 2 * 5 * 9)
    parts = permutation_gap(watched, tokens)
    assert max(batches) == 7
    for name in ("largest", "mean", "spread"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=0)


def test_beyond_six_earlier_tokens_permutations_are_sampled():
    shown = []

    def model(tokens):
        shown.append(tokens)
        return torch.nn.functional.one_hot(tokens, 9).double().cumsum(dim=1)

    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [8, 7, 6, 5, 4, 3, 2, 1]])
    gap = permutation_gap(model, tokens, samples=50, inputs=2)
    assert gap.permutations == 50
    assert float(gap.largest) == 0.0
    shuffled = shown[3].view(2, 50, 8)
    assert all(len({tuple(row) for row in rows.tolist()}) == 50 for rows in shuffled)
    for rows, sequence in zip(shuffled, tokens, strict=True):
        assert bool((rows[:, -1] == sequence[-1]).all())
        assert bool((rows.sort(dim=-1).values == sequence.sort().values).all())
    again = permutation_gap(model, tokens, samples=50, generator=torch.Generator().manual_seed(1))
    assert float(again.largest) == 0.0
    assert not shown[-3].equal(shuffled.flatten(0, 1))
    assert permutation_gap(model, tokens[:, :7]).permutations == 720


def test_a_model_that_ignores_earlier_tokens_has_no_gap():
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    gap = permutation_gap(lambda tokens: table[tokens], [1, 2, 3])
    assert (float(gap.largest), float(gap.mean), float(gap.spread)) == (0.0, 0.0, 0.0)


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
    gap, exact = (permutation_gap(model, tokens, samples=20) for model in (low, high))
    error = NOISE[dtype] * size(high, tokens, 12) / float(exact.spread)
    assume(error < 0.25)  # else other tokens change less than a few roundings, and there is nothing to compare with
    assert float(gap.largest) == pytest.approx(float(exact.largest), abs=(2 + float(exact.largest)) * error)
    assert float(gap.mean) > 0.0
    assert float(gap.spread) == pytest.approx(float(exact.spread), rel=error)


@given(roomy(), FOUR)
@settings(max_examples=40, deadline=None)
def test_in_every_dtype_a_full_mask_without_encoding_knows_no_order_up_to_rounding(case, dtype):
    parts, tokens, seed = case
    model = decoder((seed,), positions="none", mask="full", **parts).to(dtype)
    gap = permutation_gap(model, tokens, samples=20)
    assert float(gap.largest * gap.spread) <= 2 * NOISE[dtype] * size(model, tokens, 12)


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
    gap = permutation_gap(model, tokens, samples=20, vocabulary=9)
    assert (float(gap.largest), float(gap.mean)) == (0.0, 0.0)


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
    """A bag of embeddings with a submodule that is never called, or with dropout rates as attributes."""

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


# Models and tokens that users have


def test_a_sequence_too_long_for_the_model_is_distinguished_from_unknown_tokens():
    table = torch.randn(16, 50, generator=torch.Generator().manual_seed(0))

    def model(tokens):
        if int(tokens.max()) >= 50:
            raise IndexError("index out of range in self")
        return torch.nn.functional.one_hot(tokens, 50).cumsum(dim=1) + table[torch.arange(tokens.shape[1])]

    assert float(permutation_gap(model, torch.arange(16)).spread) > 0
    for length in (17, 20, 40):
        expected = rf"`tokens` must be no longer than the 16 positions that the model accepts, got {length} \(index"
        with pytest.raises(InputError, match=expected):
            permutation_gap(model, torch.arange(length))
    for tokens in ([1, 2, 50], torch.arange(60)):
        with pytest.raises(InputError, match="`tokens` must be in the model's vocabulary, got"):
            permutation_gap(model, tokens)


def test_a_tokenizers_output_is_accepted():
    plain = permutation_gap(decoder(positions="learned"), [[1, 2, 3]])
    for ids in ([[1, 2, 3]], [1, 2, 3], np.array([[1, 2, 3]], dtype=np.uint16), torch.tensor([[1, 2, 3]])):
        answer = UserDict(input_ids=ids, attention_mask=torch.ones(1, 3))  # as transformers' BatchEncoding
        assert permutation_gap(decoder(positions="learned"), answer) == plain
    with pytest.raises(InputError, match="`tokens` must be without padding"):
        permutation_gap(decoder(), {"input_ids": [[1, 2, 3], [4, 5, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hugging_face_model_needs_no_wrapper():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)  # transformers draws its weights from the global stream
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).double()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with pytest.raises(InputError, match=r"`model` must be deterministic.*model\.eval\(\)"):
        permutation_gap(model.train(), tokens)
    gap = permutation_gap(model.eval(), tokens)
    assert float(gap.largest) > 1e-3
    half = permutation_gap(copy.deepcopy(model).bfloat16(), tokens)
    torch.testing.assert_close(half.largest, gap.largest, rtol=0.1, atol=0)
    with pytest.raises(InputError, match=r"`model` must be deterministic.*model\.eval\(\)"):
        permutation_gap(copy.deepcopy(model).bfloat16().train(), tokens)
    with pytest.raises(
        InputError, match=r"`tokens` must be no longer than the 8 positions that the model accepts, got 10"
    ):
        permutation_gap(model, [list(range(10))])
    by_hand = permutation_gap(lambda tokens: model(tokens).logits, tokens)
    torch.testing.assert_close(gap.largest, by_hand.largest, rtol=1e-12, atol=0)
    with pytest.raises(InputError, match=r"`tokens` must be in the model's vocabulary, 0 to 10, got 1 to 11"):
        permutation_gap(model, [[1, 2, 11]])


class Embedded(torch.nn.Module):
    """A model that does not state its vocabulary, which has fewer tokens than outputs."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 7)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).cumsum(dim=1))


def test_the_vocabulary_is_looked_up_given_or_the_number_of_outputs():
    model = Embedded()
    with pytest.raises(InputError, match=r"`tokens` must be in the model's vocabulary, got .*give their number"):
        permutation_gap(model, [[1, 2, 3]])  # random tokens up to 6 are drawn
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
    with pytest.raises(InputError, match=f"`{name}` must .*{word}") as caught:
        permutation_gap(model, tokens)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["samples", "inputs", "vocabulary"])
def test_bad_options_are_named(option):
    with pytest.raises(InputError, match=f"`{option}`"):
        permutation_gap(decoder(), [[1, 2]], **{option: 0})


# Diverged seeds


@given(seed=st.integers(0, 999), value=st.sampled_from([torch.nan, torch.inf]), length=st.integers(3, 8))
@settings(max_examples=15)
def test_a_diverged_seed_is_nan_and_changes_no_other(seed, value, length):
    model = decoder((seed, seed + 1, seed + 2), positions="learned")
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(9, size=(2, length)))
    before = permutation_gap(model, tokens, samples=20)
    with torch.no_grad():
        model.get_parameter("layers.0.lower.weight")[1] = value
    after = permutation_gap(model, tokens, samples=20)
    for name in ("largest", "mean", "spread"):
        values, expected = getattr(after, name), getattr(before, name)
        assert values.isnan().tolist() == [False, True, False]
        torch.testing.assert_close(values[::2], expected[::2], rtol=1e-12, atol=1e-15)


def test_an_output_that_is_infinite_for_some_tokens_alone_makes_its_seed_nan():
    table = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    table[0, 8] = torch.inf  # never in the sequence, only among the random tokens
    gap = permutation_gap(lambda tokens: table[:, tokens].cumsum(dim=-2), [[1, 2, 3]], vocabulary=9)
    for values in (gap.largest, gap.mean, gap.spread):
        assert values.isnan().tolist() == [True, False]


# --- by hand ---------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(4)), layers=st.integers(1, 3))
def test_under_a_full_mask_every_prediction_moves_with_its_token(order, layers):
    model = decoder(layers=layers, mask="full", positions="none")
    assert moved_predictions(model, [3, 1, 4, 2, 5], [*order, 4]).max() < 1e-10


@pytest.mark.parametrize("layers", [1, 2])
def test_what_moves_is_what_a_plain_comparison_finds(layers):
    model, tokens, order = decoder(layers=layers, mask="causal", positions="none"), [3, 1, 4, 2, 5], [2, 0, 1, 3, 4]
    spread = permutation_gap(model, [tokens]).spread
    with torch.no_grad():
        before, after = model(torch.tensor([tokens])), model(torch.tensor([[tokens[place] for place in order]]))
    expected = torch.stack(
        [(after[..., 0, i, :] - before[..., 0, place, :]).norm(dim=-1) for i, place in enumerate(order)]
    )
    torch.testing.assert_close(moved_predictions(model, tokens, order), expected.T.double() / spread[..., None])


def test_at_a_last_token_that_stays_the_largest_move_over_all_orders_is_the_gap():
    model, tokens = decoder(layers=2, mask="causal", positions="none"), [3, 1, 4, 2]
    moves = [moved_predictions(model, tokens, [*order, 3])[..., -1] for order in itertools.permutations(range(3))]
    torch.testing.assert_close(torch.stack(moves).amax(dim=0), permutation_gap(model, [tokens]).largest)


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4], [0, 1, 2, 3.5], "0123", None])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(InputError, match="`order` must be"):
        moved_predictions(decoder(layers=1), [3, 1, 4, 2], order)


def test_only_one_sequence_is_rearranged_by_hand():
    with pytest.raises(InputError, match="`tokens` must be one sequence, got 2 of them"):
        moved_predictions(decoder(layers=1), [[3, 1], [4, 2]], [0, 1])


def test_predictions_of_a_model_that_ignores_its_context_do_not_move():
    assert (moved_predictions(lambda tokens: torch.eye(9).double()[tokens], [3, 1, 4], [1, 0, 2]) == 0).all()
