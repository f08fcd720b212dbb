"""The decoder in the loop: a seed's result does not depend on which others train beside it, dropout included."""

import torch

from joma import noise
from joma.models import Decoder, DecoderConfig
from joma.train import Optimiser, Record, fit

CONFIG = DecoderConfig(
    vocabulary=12, width=16, layers=2, heads=2, hidden=24, length=6, positions="learned", norm="pre", dropout=0.2
)


def trained(seeds, steps=200):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    model = Decoder(CONFIG, generators=generators)
    tokens = torch.stack([torch.randint(12, (40, 6), generator=generator) for generator in generators])
    keys = torch.tensor(seeds)

    def loss(model, step):
        some = tokens[:, (8 * step) % 40 + torch.arange(8)]
        logits = model(some, noise=noise.key(keys, step))[:, :, :-1]
        target = some[:, :, 1:]
        return -logits.log_softmax(-1).gather(-1, target[..., None]).mean((1, 2, 3))

    run = fit(model, loss, optimiser=Optimiser("adam", 1e-3, clip=0.5), steps=steps,
              record=Record(at=range(0, steps + 1, 20)))  # fmt: skip
    return model, run


def test_alone_and_together_agree_after_200_steps_with_dropout():
    together, run = trained((3, 7, 11))
    alone, seed_7 = trained((7,))
    loss = torch.tensor(run.loss.values[1])
    torch.testing.assert_close(loss, torch.tensor(seed_7.loss.values[0]), rtol=1e-5, atol=0)
    for (name, whole), (_, part) in zip(together.named_parameters(), alone.named_parameters(), strict=True):
        if not name.endswith("key.bias"):  # softmax does not see it: its gradient is rounding, which Adam normalises
            gap = (whole[1] - part[0]).norm() / part[0].norm()
            assert gap <= 1e-5, (name, float(gap))


def test_dropout_is_on_while_training():
    _, run = trained((0,), steps=20)
    model, _ = trained((0,), steps=0)
    tokens = torch.randint(12, (40, 6), generator=torch.Generator().manual_seed(0))
    quiet = model(tokens)
    noisy = model(tokens, noise=noise.key(torch.tensor([0]), 0))
    assert float((quiet - noisy).detach().abs().max()) > 0.1
    assert run.loss.values[0, -1] < run.loss.values[0, 0]
