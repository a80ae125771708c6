"""Quantile Balancing at work on routers: counts over micro-batches and ranks, one solve a step, nothing in between."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from openk3.config import named
from openk3.model.moe import Router
from openk3.ops.routing import quantile_bias
from openk3.train.balance import Balancer
from openk3.train.recipe import BalanceRecipe

CONFIG = named("pico")  # 8 experts, 2 a token, hidden 64


def routers(n=1, seed=0, dtype=torch.float64):
    """n routers with a strong preference for the first experts."""
    model = nn.Module()
    model.list = nn.ModuleList(Router(CONFIG) for _ in range(n))
    generator = torch.Generator().manual_seed(seed)
    for router in model.list:
        router.reset(generator)
        router.weight.data[:, 0] += torch.linspace(2, -2, CONFIG.num_experts)
    return model.to(dtype).train()


def tokens(n=512, seed=1, dtype=torch.float64):
    x = torch.randn(n, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    x[:, 0] = 1.0
    return x


def bias(model, i=0):
    return model.list[i].e_score_correction_bias


def test_micro_batches_add_up_to_the_whole_step():
    whole, parts = routers(), routers()
    balancers = [Balancer(model, BalanceRecipe()) for model in (whole, parts)]
    x = tokens()
    whole.list[0](x)
    for part in x.split([100, 1, 411]):
        parts.list[0](part)
    loads = [balancer.step() for balancer in balancers]
    assert torch.equal(bias(whole), bias(parts))
    assert loads[0] == loads[1]
    assert bias(whole).abs().max() > 0.1


@pytest.mark.row(66)
@pytest.mark.parametrize("rule", ["quantile", "sign"])
def test_a_batch_is_routed_with_the_old_bias_and_the_new_one_acts_from_the_next_step(rule):
    model, x = routers(), tokens()
    balancer = Balancer(model, BalanceRecipe(rule=rule, rate=0.05))
    unbiased = torch.sigmoid(x @ model.list[0].weight.T).topk(2).indices.sort().values
    for part in x.split(128):  # all micro-batches of the first step
        model.list[0](part)
        assert bias(model).eq(0).all()
    first = model.list[0](x[:64]).ids_TK.sort().values
    assert torch.equal(first, unbiased[:64])
    balancer.step()
    after = bias(model).clone()
    assert after.abs().max() > 0
    expected = (torch.sigmoid(x @ model.list[0].weight.T) + after).topk(2).indices.sort().values
    assert torch.equal(model.list[0](x).ids_TK.sort().values, expected)
    assert not torch.equal(expected, unbiased)


def test_the_bias_is_within_a_bin_of_the_exact_rule_and_settles_the_load():
    model, x = routers(), tokens(4096)
    balancer = Balancer(model, BalanceRecipe())
    routing = model.list[0](x)
    exact = quantile_bias(routing.scores_TE, routing.cutoff_T, 2)
    first = balancer.step()
    assert (bias(model) - exact).abs().max() < 2 * 2 / 1000  # one bin for the value, one for the centre
    violations = [max(first.max_violation)]
    for _ in range(3):
        model.list[0](x)
        violations += balancer.step().max_violation
    assert violations[0] > 1
    assert violations[-1] < 0.1
    assert first.q == 4096 * 2 / 8


@pytest.mark.row(72)
@pytest.mark.parametrize("rule", ["quantile", "sign"])
def test_evaluation_leaves_the_bias_and_the_counts_alone(rule):
    model, x = routers(), tokens()
    balancer = Balancer(model, BalanceRecipe(rule=rule))
    model.list[0](x)
    balancer.step()
    held = bias(model).clone()
    model.eval()
    for _ in range(3):
        model.list[0](tokens(seed=9))
    assert torch.equal(bias(model), held)
    assert not balancer.table_LX.any()
    model.train()
    model.list[0](x)
    counted = balancer.table_LX.clone()
    model.eval()
    model.list[0](tokens(seed=9))
    assert torch.equal(balancer.table_LX, counted)


def test_each_layer_has_its_own_counts_and_all_leave_in_one_table():
    model, x = routers(3), tokens()
    balancer = Balancer(model, BalanceRecipe(bins=50))
    assert balancer.table_LX.shape == (3, 8 + 8 * 50)
    assert balancer.table_LX.dtype == torch.int32
    for i, router in enumerate(model.list):
        router(x[: 100 * (i + 1)])
    assert balancer.loads_LE.sum(1).tolist() == [200, 400, 600]
    assert balancer.counts_LEB.sum((1, 2)).tolist() == [800, 1600, 2400]
    loads = balancer.step()
    assert not balancer.table_LX.any()
    alone = routers(3)
    single = Balancer(alone, BalanceRecipe(bins=50))
    alone.list[1](x[:200])
    single.step()
    assert torch.equal(bias(alone, 1), bias(model, 1))
    assert len(loads.max_violation) == len(loads.dead) == 3


@pytest.mark.row(62)
def test_the_sign_rule_moves_by_the_rate_and_none_by_nothing():
    model, x = routers(), tokens()
    balancer = Balancer(model, BalanceRecipe(rule="sign", rate=0.01))
    loads = torch.bincount(model.list[0](x).ids_TK.flatten(), minlength=8).double()
    report = balancer.step()
    torch.testing.assert_close(bias(model), 0.01 * torch.sign(loads.mean() - loads), rtol=0, atol=1e-15)
    assert report.max_violation == [pytest.approx((loads.max() / loads.mean() - 1).item())]
    assert report.dead == [int((loads == 0).sum())]

    still = routers()
    balancer = Balancer(still, BalanceRecipe(rule="none"))
    still.list[0](x)
    assert balancer.step() == report
    assert bias(still).eq(0).all()


def test_a_step_without_tokens_keeps_the_bias():
    model = routers()
    balancer = Balancer(model, BalanceRecipe())
    model.list[0](tokens())
    balancer.step()
    held = bias(model).clone()
    assert balancer.step().max_violation == [0.0]
    assert torch.equal(bias(model), held)


def test_a_model_without_routers_and_an_unknown_rule():
    balancer = Balancer(nn.Linear(2, 2), BalanceRecipe())
    assert balancer.step().max_violation == []
    with pytest.raises(ValueError, match="balancing rule 'greedy' is not one of quantile, sign, none"):
        Balancer(routers(), BalanceRecipe(rule="greedy"))


def one_rank(rank, store):
    """The same step on 1, 2 and 4 ranks: its biases by the number of ranks, the collectives it took, and the average
    of the biases that the four quarters would have got alone."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    groups = {n: [dist.new_group(list(range(i, i + n))) for i in range(0, 4, n)] for n in (1, 2, 4)}
    all_reduce, calls, results = dist.all_reduce, [], {}
    dist.all_reduce = lambda *args, **settings: (calls.append(1), all_reduce(*args, **settings))
    for n in groups:  # ranks that share the tokens
        model = routers(2)
        balancer = Balancer(model, BalanceRecipe(), groups[n][rank // n])
        for i, router in enumerate(model.list):
            for part in tokens(seed=5 + i).chunk(n)[rank % n].split(97):
                router(part)
        balancer.step()
        results[n] = [bias(model, i).tolist() for i in range(2)]

    model = routers()
    alone = Balancer(model, BalanceRecipe(), groups[1][rank])
    model.list[0](tokens(seed=5).chunk(4)[rank])
    alone.step()
    averaged = bias(model).clone()
    all_reduce(averaged)
    dist.destroy_process_group()
    return results, len(calls), (averaged / 4).tolist()


@pytest.mark.row(70, 71)
def test_one_two_and_four_ranks_agree_bit_for_bit_and_averaged_quantiles_do_not(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openk3.train.loop"])  # imported once for all ranks
    with context.Pool(4) as pool:
        work = [(rank, str(tmp_path / "store")) for rank in range(4)]
        ranks = pool.starmap_async(one_rank, work, chunksize=1).get(timeout=300)
    expected = ranks[0][0][1]
    for results, calls, averaged in ranks:
        assert results == {1: expected, 2: expected, 4: expected}
        assert calls == 4  # one collective a step for all layers
        difference = torch.tensor(averaged) - torch.tensor(expected[0])
        assert difference.abs().max() > 1e-3
