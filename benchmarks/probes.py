"""Attention entropy and stable rank against plain PyTorch: speed, memory and error, on the CPU and on a CUDA device.

Plain PyTorch computes the entropy from the whole matrix: `softmax`, then `entr`. On CUDA every implementation is timed
and its error measured, so that the order in `joma.kernels.entropy_choice.PRECISIONS` can be judged.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks import Row
from benchmarks.memory import forget_peak, resident
from benchmarks.timing import synchronised
from joma.kernels.entropy_choice import IMPLEMENTATIONS, PRECISIONS, entropy_rows
from joma.kernels.entropy_scores import Scores
from joma.probes.entropy import attention_entropy
from joma.probes.rank import spectral_norm, stable_rank

MIB = 2**20
TILES = {  # queries, keys, warps, stages
    torch.bfloat16: (
        (64, 64, 4, 3), (64, 128, 4, 2), (64, 128, 4, 3), (64, 256, 4, 2), (128, 32, 4, 4), (128, 64, 4, 2),
        (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 3), (128, 128, 4, 2), (128, 128, 8, 2), (128, 128, 8, 3),
        (256, 64, 8, 3),
    ),
    torch.float32: ((64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)),
}  # fmt: skip
KINDS = ("random", "peaked", "constant", "one-hot")


def rows() -> Iterator[Row]:
    """Yield what is measured, the target, the result, and whether the target is met."""
    yield from on_cpu()
    yield from errors("cpu", torch.float32, "highest", 1024)
    yield from errors("cpu", torch.bfloat16, "highest", 1024)
    yield from ranks("cpu")
    if torch.cuda.is_available():
        yield from errors("cuda", torch.float32, "highest", 4096)
        yield from errors("cuda", torch.bfloat16, "highest", 4096)
        yield from on_cuda()
        yield from long_sequences()
        yield from tiles()
        yield from ranks("cuda")


def inputs(length: int, heads: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return random queries and keys with heads of width 64."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, length, 64, generator=generator).to(device, dtype) for _ in range(2))
    return query, key


def eager(query: Tensor, key: Tensor, *, upcast: bool = False) -> Tensor:
    """Return causal entropy from the whole matrix; `upcast` computes the softmax in float32, as models do."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    p = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1, dtype=torch.float32 if upcast else query.dtype)
    return torch.special.entr(p).sum(dim=-1)


def ours(query: Tensor, key: Tensor) -> Tensor:
    """Return causal entropy by `attention_entropy`, without the matrix."""
    return attention_entropy(query, key, causal=True)


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the best time of a call on the CPU; on CUDA the median of five series of `repeats` calls."""
    call()
    if not torch.cuda.is_available():
        return min(_timed(call, 1) for _ in range(repeats))
    _timed(call, repeats)  # the clock rate of the GPU rises under load
    return statistics.median(_timed(call, repeats) for _ in range(5))


def _timed(call: Callable[[], object], calls: int) -> float:
    start = synchronised()
    for _ in range(calls):
        call()
    return (synchronised() - start) / calls


def extra_memory(which: str) -> int:
    """Return by how many bytes a call raises the peak resident memory of this process (Linux)."""
    query, key = inputs(4096, 8, "cpu")
    call = {"eager": eager, "ours": ours}[which]
    call(query[..., :64, :], key[..., :64, :])  # loads what only the first call loads
    forget_peak()
    before = resident("VmRSS")
    call(query, key)
    return resident("VmHWM") - before


def extra_memory_in_new_process(which: str) -> int:
    """Return `extra_memory` of a new process, where no memory freed earlier can be used again."""
    code = f"from benchmarks.probes import extra_memory; print(extra_memory({which!r}))"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def on_cpu() -> Iterator[Row]:
    """Compare the best times of `eager` and `ours`, called in turn: length 4,096, causal, 8 heads of width 64, float32.

    There are many turns because other processes on a shared machine slow down computation, but hardly the waiting for
    memory, which would distort the ratio.
    """
    query, key = inputs(4096, 8, "cpu")
    slow, fast = [], []
    for _ in range(8):
        slow.append(seconds(lambda: eager(query, key), 1))
        fast.append(seconds(lambda: ours(query, key), 5))
    ratio = min(slow) / min(fast)
    what = f"entropy, CPU, 4,096 x 8 heads, float32: eager ({min(slow):.2f} s) over ours ({min(fast):.3f} s)"
    yield what, "≥ 15 x", f"{ratio:.1f} x", ratio >= 15
    plain, blocked = extra_memory_in_new_process("eager"), extra_memory_in_new_process("ours")
    what = f"the same: extra memory, ours ({blocked / MIB:.0f} MiB) in eager's ({plain / MIB:.0f} MiB)"
    yield what, "≤ 1/50", f"1/{plain / blocked:.0f}", plain >= 50 * blocked


def kinds(length: int, device: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield queries and keys of each of `KINDS`."""
    query, key = inputs(length, 2, device)
    axis = torch.nn.functional.one_hot(torch.arange(length, device=device) % 64, 64).float().expand(1, 2, -1, -1)
    pairs = ((query, key), (30 * query, key), (query, key[..., :1, :].expand_as(key)), (400 * axis, axis))
    for name, (q, k) in zip(KINDS, pairs, strict=True):
        yield name, q.to(dtype), k.to(dtype)


def exact(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal entropy and log-sum-exp from the matrix in float64."""
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1), scores.logsumexp(dim=-1)


def errors(device: str, dtype: torch.dtype, precision: str, length: int) -> Iterator[Row]:
    """Yield the largest error of the default choice, and of every implementation that takes the inputs."""
    kind = str(dtype).removeprefix("torch.")
    for order in (PRECISIONS[precision], *((name,) for name in IMPLEMENTATIONS)):
        worst, share, by_kind = 0.0, 0.0, []
        for which, query, key in kinds(length, device, dtype):
            scores = Scores(query, key, None, True, query.shape[-1] ** -0.5)
            if not any(IMPLEMENTATIONS[name].fits(scores) for name in order):
                continue
            true, lse = exact(query, key)
            error = (entropy_rows(scores, order).entropy - true).abs()
            worst = max(worst, float(error.max()))
            share = max(share, float((error / (2e-5 * (lse / 30).clamp(min=1))).max()))
            by_kind.append(f"{which} {float(error.max()):.0e}")
        if dtype == torch.float32:
            target, result, met = "≤ 1 x allowed", f"{share:.2f} x", share <= 1
        else:
            target, result, met = "≤ 0.01", f"{worst:.1e}", worst <= 0.01
        if len(order) > 1:
            yield f"entropy error, {device}, {kind} {precision}: {', '.join(by_kind)}", target, result, met
        elif by_kind:
            yield f"    {order[0]}: {', '.join(by_kind)}", "–", result, True


def peak(call: Callable[[], object]) -> int:
    """Return the bytes of CUDA memory that a call allocates at its peak, beyond what is allocated before."""
    call()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def on_cuda() -> Iterator[Row]:
    """Compare each precision with the eager form of the same dtype: length 8,192, causal, 16 heads of width 64."""
    for dtype, targets in ((torch.bfloat16, {"high": 30, "highest": 5}), (torch.float32, {"highest": 5, "high": 5})):
        query, key = inputs(8192, 16, "cuda", dtype)
        kind = str(dtype).removeprefix("torch.")
        slow = seconds(lambda q=query, k=key: eager(q, k), 10)
        upcast = seconds(lambda q=query, k=key: eager(q, k, upcast=True), 10)
        plain = peak(lambda q=query, k=key: eager(q, k))
        what = f"eager, CUDA, 8,192 x 16, {kind}: {1e3 * slow:.2f} ms, {plain / MIB:.0f} MiB; softmax in float32"
        yield what, "–", f"{1e3 * upcast:.2f} ms", True
        for precision, least in targets.items():

            def call(q: Tensor = query, k: Tensor = key, p: str = precision) -> Tensor:
                return attention_entropy(q, k, causal=True, precision=p)

            fast, extra = seconds(call, 20), peak(call)
            what = f"entropy, CUDA, 8,192 x 16, {kind} {precision} ({1e3 * fast:.3f} ms): eager over ours"
            yield what, f"≥ {least} x", f"{slow / fast:.1f} x", slow >= least * fast
            yield f"the same, softmax in float32, {kind} {precision}", "–", f"{upcast / fast:.1f} x", True
            what = f"the same: extra memory, {kind} {precision}, ours ({extra / MIB:.1f} MiB) in eager's"
            yield what, "≤ 1/150", f"1/{plain / max(extra, 1):.0f}", plain >= 150 * extra
        yield from implementations(query, key, kind, slow)


def implementations(query: Tensor, key: Tensor, kind: str, slow: float) -> Iterator[Row]:
    """Time every implementation that takes the inputs."""
    scores = Scores(query, key, None, True, query.shape[-1] ** -0.5)
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.fits(scores):
            call = partial(implementation.rows, scores)
            took = seconds(call, 20)
            what = f"    {kind}, {name}: {1e3 * took:.3f} ms, {peak(call) / MIB:.1f} MiB"
            yield what, "–", f"{slow / took:.1f} x", True


def long_sequences() -> Iterator[Row]:
    """Measure memory at 32,768 tokens, whose attention matrix fits into no GPU."""
    query, key = inputs(32768, 16, "cuda")
    extra = peak(lambda: ours(query, key)) / MIB
    took = seconds(lambda: ours(query, key), 3)
    what = f"entropy, CUDA, 32,768 x 16, float32 ({1e3 * took:.1f} ms): extra memory"
    yield what, "≤ 300 MiB", f"{extra:.1f} MiB", extra <= 300
    scores = Scores(query, key, None, True, query.shape[-1] ** -0.5)
    extra = peak(lambda: IMPLEMENTATIONS["efficient"].rows(scores)) / MIB
    yield "the same from memory-efficient attention", "–", f"{extra:.1f} MiB", True


def tiles() -> Iterator[Row]:
    """Time the Triton kernel with several tiles and kinds of product."""
    query, key = inputs(8192, 16, "cuda")
    single = Scores(query, key, None, True, 0.125)
    if not IMPLEMENTATIONS["exact"].fits(single):
        return
    from joma.kernels import entropy_triton

    half = Scores(query.bfloat16(), key.bfloat16(), None, True, 0.125)
    true = exact(query[:, :2], key[:, :2])[0]
    for scores, products in ((half, "tf32"), (single, "tf32"), (single, "tf32x3")):
        for shape in TILES[scores.query.dtype]:
            tile = entropy_triton.Tile(*shape)
            kind = str(scores.query.dtype).removeprefix("torch.")
            try:
                took = seconds(lambda s=scores, p=products, t=tile: entropy_triton.row_sums(s, p, t), 10)
                error = (entropy_triton.row_sums(scores, products, tile)[0][:, :2] - true).abs().max()
                result = f"{1e3 * took:.3f} ms"
            except Exception as cause:  # a tile may be too large for the GPU
                error, result = float("nan"), type(cause).__name__
            yield f"    kernel {kind} {products} {shape}: from float32's entropy {float(error):.0e}", "–", result, True


def ranks(device: str) -> Iterator[Row]:
    """Compare `stable_rank` with `svdvals`, for a random float32 matrix of 2,048 x 8,192 and one of a flat spectrum."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2048, 8192, generator=generator).to(device)
    fast = seconds(lambda: stable_rank(weight), 5)
    start = time.perf_counter()
    values = torch.linalg.svdvals(weight).double().cpu()
    slow = time.perf_counter() - start
    what = f"stable_rank, {device}, 2,048 x 8,192 ({fast:.3f} s): svdvals ({slow:.1f} s) over ours"
    yield what, "≥ 20 x", f"{slow / fast:.1f} x", slow >= 20 * fast
    true = float(values.square().sum() / values[0].square())
    left, right = (torch.randn(n, 1, generator=generator, dtype=torch.float64) for n in weight.shape)
    flat = torch.eye(*weight.shape, dtype=torch.float64)
    flat = flat - 2 * left @ (left.mT @ flat) / left.square().sum()  # reflections keep all singular values at 1
    flat = flat - 2 * (flat @ right) @ right.mT / right.square().sum()
    for name, matrix, expected in (("random", weight, true), ("flat", flat.float().to(device), 2048.0)):
        error = abs(float(stable_rank(matrix)) / expected - 1)
        bounds = spectral_norm(matrix)
        bound = float((bounds.upper / bounds.lower).square() - 1)
        what = f"stable_rank, {device}, {name} spectrum: relative error (bound {bound:.1e})"
        yield what, "≤ 1e-3", f"{error:.1e}", error <= 1e-3 and bound <= 2.001e-3
