"""The histogram rule over shards and over real ranks: integer counts add up, so every rank finds the same bits."""

import math

import pytest
import torch
import torch.distributed as dist

from openk3.ops.routing import histogram, histogram_bias, route

M, N, K = 960, 12, 2


def logits_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(M, N, generator=generator) + torch.randn(N, generator=generator)


def shard_counts(rank: int, ranks: int, bias: torch.Tensor, step: int) -> torch.Tensor:
    """One rank's share of a step's counts, in two micro-batches."""
    logits = logits_of(step).chunk(ranks)[rank]
    batches = [route(x, bias, K) for x in logits.split(math.ceil(len(logits) * 0.6))]
    return sum(histogram(r.scores_TE, r.cutoff_T, bias) for r in batches)


def run_steps(counts_of) -> list[torch.Tensor]:
    """Three steps; `counts_of(bias, step)` gives the counts of all ranks."""
    biases, bias = [], torch.zeros(N)
    for step in range(3):
        bias = histogram_bias(counts_of(bias, step), bias, K)
        biases.append(bias)
    return biases


def emulated(ranks: int) -> list[torch.Tensor]:
    return run_steps(lambda bias, step: sum(shard_counts(rank, ranks, bias, step) for rank in range(ranks)))


@pytest.mark.row(69, 70)
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_shards_of_any_number_give_the_same_bits(ranks):
    whole = emulated(1)
    assert max(float(bias.abs().max()) for bias in whole) > 0.01
    assert all(torch.equal(a, b) for a, b in zip(whole, emulated(ranks), strict=True))


def _rank_main(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    sent = []

    def counts_of(bias: torch.Tensor, step: int) -> torch.Tensor:
        counts = shard_counts(rank, ranks, bias, step)
        sent.append((counts.numel(), counts.dtype))
        dist.all_reduce(counts)
        return counts

    biases = run_steps(counts_of)
    local = shard_counts(rank, ranks, torch.zeros(N), 0)
    torch.save({"biases": biases, "sent": sent, "local": local}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.row(70)
def test_two_real_ranks(tmp_path):
    """gloo: one sum of n * B integers a step, and every rank holds the bias that one process finds."""
    torch.multiprocessing.spawn(_rank_main, args=(2, str(tmp_path)), nprocs=2)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for result in results:
        assert result["sent"] == [(N * 1000, torch.int32)] * 3
        assert all(torch.equal(a, b) for a, b in zip(result["biases"], emulated(1), strict=True))
    assert not torch.equal(results[0]["local"], results[1]["local"])
