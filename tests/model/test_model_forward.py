"""The whole model against itself in float64: packed = separate, any split = one forward, every mechanism trains."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.config import MECHANISMS, K3Config, named
from openk3.model.k3 import K3
from openk3.model.memory import Memory
from openk3.model.sizes import memory_sizes

TINY = named("pico").replace(hidden_size=32, vocab_size=512, kda_head_dim=16, moe_intermediate_size=32)


def cu(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def model64(config: K3Config = TINY, seed: int = 0) -> K3:
    """A float64 model whose zero-started queries and biases are drawn, so that nothing is trivially equal."""
    model = K3.initialised(config, seed, compute_dtype=torch.float64).double().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, t in model.state_dict().items():
            if "_res_" in name or name.endswith(("A_log", "correction_bias")):
                t += 0.3 * torch.randn(t.shape, generator=generator, dtype=torch.float64)
            elif "proj" in name or "embed" in name or "experts" in name:
                t *= 8
    return model


def tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


VARIANTS = [{}] + [{name: value} for name, values in MECHANISMS.items() for value in values[1:]]


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_packed_documents_never_see_each_other(change: dict) -> None:
    model = model64(TINY.replace(**change))
    a, b, c = tokens(21, 1), tokens(1, 2), tokens(34, 3)
    with torch.no_grad():
        packed = model(torch.cat([a, b, c]), cu(21, 1, 0, 34))
        apart = torch.cat([model(x, cu(len(x))) for x in (a, b, c)])
        causal = model(torch.cat([c[:20], tokens(14, 9)]), cu(34))[:20]
    assert (packed - apart).abs().max() < 1e-10
    assert (causal - packed[22:42]).abs().max() < 1e-10
    assert packed.std() > 0.01


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_every_mechanism_trains_every_parameter(change: dict) -> None:
    model = model64(TINY.replace(**change)).train()
    x = tokens(80)
    loss = torch.nn.functional.cross_entropy(model(x[:-1], cu(40, 39)), x[1:])
    loss.backward()
    unused = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0}
    first = "model.layers.0.self_attention_res_"
    assert unused <= {first + "proj.weight", first + "norm.weight"}  # shipped, never used (model.md section 7)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 2**31), st.data())
def test_prefill_in_any_split_equals_one_forward(splits: list[int], seed: int, data: st.DataObject) -> None:
    change = data.draw(st.sampled_from([{}, {"mla_position": "rope"}, {"decay": "softplus"}, {"residual": "full"}]))
    model = model64(TINY.replace(**change))
    x = tokens(sum(splits) + 3, seed)
    memory = Memory(model.config, slots=3, capacity=len(x), dtype=torch.float64).use([1])
    with torch.no_grad():
        whole = model(x, cu(len(x)))
        parts = [model(part, cu(len(part)), memory) for part in x.split([*splits, 1, 1, 1])]
    assert (torch.cat(parts) - whole).abs().max() < 1e-10
    assert memory.lengths_S.tolist() == [0, len(x), 0]


def test_prefill_and_decode_in_one_batch() -> None:
    model = model64()
    x, y = tokens(23, 4), tokens(9, 5)
    memory = Memory(model.config, slots=4, capacity=32, dtype=torch.float64)
    with torch.no_grad():
        model(x[:20], cu(20), memory.use([2]))
        mixed = model(torch.cat([y, x[20:21]]), cu(9, 1), memory.use([0, 2]))
        both = model(torch.cat([x[21:22], tokens(1, 6)]), cu(1, 1), memory.use([2, 0]))
        assert (mixed[:9] - model(y, cu(9))).abs().max() < 1e-10
        assert (torch.stack([mixed[9], both[0]]) - model(x, cu(23))[20:22]).abs().max() < 1e-10


@pytest.mark.parametrize("splits", [[5], [1, 1, 1, 1, 1], [2, 3], [0, 5]])
@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
def test_speculative_tokens_commit_as_if_never_rejected(splits: list[int], accepted: int) -> None:
    model = model64()
    x, other, draft = tokens(30, 1), tokens(12, 2), tokens(5, 3)
    memory = Memory(model.config, slots=2, capacity=64, dtype=torch.float64)
    with torch.no_grad():
        model(torch.cat([x, other]), cu(30, 12), memory)
        memory.begin()
        for part in draft.split(splits):
            model(torch.cat([part, part]), cu(len(part), len(part)), memory)
        memory.commit([accepted, 5])
        assert memory.lengths_S.tolist() == [30 + accepted, 17]
        after = model(torch.cat([x[:1], x[:1]]), cu(1, 1), memory)
        for row, text in (
            (after[0], torch.cat([x, draft[:accepted], x[:1]])),
            (after[1], torch.cat([other, draft, x[:1]])),
        ):
            assert (row - model(text, cu(len(text)))[-1]).abs().max() < 1e-10
    with pytest.raises(ValueError, match="without begin"):
        memory.rollback()


def test_memory_clones_truncates_and_travels_as_bytes() -> None:
    model = model64()
    x = tokens(25)
    memory = Memory(model.config, slots=2, capacity=40, dtype=torch.float64).use([0])
    with torch.no_grad():
        model(x[:10], cu(10), memory)
        assert memory.hold(0) == 10
        model(x[10:20], cu(10), memory)
        data = memory.to_bytes(0)
        memory.clone_slot(0, 1)
        expected = model(x[20:], cu(5), memory)
        assert torch.equal(model(x[20:], cu(5), memory.use([1])), expected)
        with pytest.raises(ValueError, match=r"no checkpoint at 7; it holds \[10\]"):
            memory.truncate(0, 7)
        memory.truncate(0, 10)
        again = model(x[10:], cu(15), memory.use([0]))
        assert (again[-5:] - expected).abs().max() < 1e-10
        other = Memory(model.config, slots=1, capacity=40, dtype=torch.float64)
        other.from_bytes(0, data)
        assert torch.equal(model(x[20:], cu(5), other), expected)
        memory.truncate(0, 0)
        assert (model(x, cu(25), memory) - model(x, cu(25))).abs().max() < 1e-10
        with pytest.raises(ValueError, match="exceeds the memory's capacity"):
            model(x, cu(25), memory)
        with pytest.raises(ValueError, match="2 sequences for 1 memory slots"):
            model(x[:2], cu(1, 1), memory)


def held(memory: Memory, slot: int = 0) -> int:
    """Bytes of the tensors that a slot really has."""
    return sum(t.nbytes for name, t in memory.read(slot).items() if name != "length")


@pytest.mark.row(19, 22)
def test_memory_bytes_follow_the_formula() -> None:
    k3 = memory_sizes(named("k3"))
    assert k3.kda == 449_372_160  # model.md section 5.4
    assert k3.token == 27_648  # section 6
    config = named("pico")
    model = K3.initialised(config, 0)
    memory = Memory(config, slots=2, capacity=400)
    sizes = []
    with torch.no_grad():
        for n in (1, 128, 257):
            model.hidden(tokens(n), cu(n), memory.use([0]))
            sizes.append(held(memory))
            assert memory.nbytes(0) == sizes[-1]
    plain = memory_sizes(config, window_dtype=torch.float32, row_dtype=torch.float32)
    row, state = plain.token, plain.kda
    assert sizes == [state + row, state + 129 * row, state + 386 * row] and memory.nbytes(1) == state


@pytest.mark.row(102)
@pytest.mark.parametrize("n", [65_536, pytest.param(1_048_576, marks=pytest.mark.slow)])
def test_all_kda_model_streams_a_long_text_with_flat_memory(n: int) -> None:
    config = TINY.replace(attention="kda", num_hidden_layers=2)
    model = K3.initialised(config, 0).eval()
    memory = Memory(config, slots=1, capacity=n)
    before = held(memory)
    with torch.no_grad():
        for part in tokens(n).split(32_768):
            assert torch.isfinite(model.hidden(part, cu(len(part)), memory)).all()
            assert held(memory) == before == memory.nbytes(0)
    assert before == 2 * 4 * (config.kda_num_heads * config.kda_head_dim**2 + 3 * 3 * config.kda_width)
    assert memory.lengths_S.tolist() == [n]


@pytest.mark.row(102)
def test_hybrid_at_16k_holds_the_bytes_of_the_formula() -> None:
    config = TINY.replace(num_hidden_layers=2, num_attention_heads=1)
    model = K3.initialised(config, 0).eval()
    memory = Memory(config, slots=1, capacity=16_384)
    with torch.no_grad():
        for part in tokens(16_384).split(2048):
            model.hidden(part, cu(2048), memory)
    assert config.layer_kinds == ("kda", "mla")
    state = config.kda_num_heads * config.kda_head_dim**2 + 3 * 3 * config.kda_width
    expected = 4 * (state + 16_384 * (config.kv_lora_rank + config.qk_rope_head_dim))
    assert held(memory) == expected == memory.nbytes(0)


@pytest.mark.row(23)
def test_mla_alone_does_not_see_the_order_of_the_past() -> None:
    x = tokens(20)
    shuffled = torch.cat([x[torch.randperm(19, generator=torch.Generator().manual_seed(0))], x[19:]])

    def last(**change: str) -> torch.Tensor:  # one layer: deeper ones see prefixes, whose order matters
        model = model64(TINY.replace(num_hidden_layers=1, first_k_dense_replace=0, **change))
        with torch.no_grad():
            return model(x, cu(20))[-1] - model(shuffled, cu(20))[-1]

    assert last(attention="mla").abs().max() < 1e-10
    assert last(attention="mla", mla_position="rope").abs().max() > 1e-3
    assert last(attention="kda").abs().max() > 1e-3


@pytest.mark.row(7, 17)
def test_decay_logits_are_low_rank_and_the_output_gate_is_not() -> None:
    model = model64(named("nano").replace(vocab_size=512))
    kda = model.model.layers[0].self_attn
    x = torch.randn(400, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.linalg.matrix_rank(kda.f_b_proj(kda.f_a_proj(x))) == 32
    assert torch.linalg.matrix_rank(kda.g_proj(x)) == 128
    assert named("k3").kda_width == 12288 != named("k3").hidden_size


@pytest.mark.row(39, 42)
def test_sources_of_every_site() -> None:
    model = model64()  # 5 layers, blocks of 2: 2 + 2 + 1
    seen: dict[str, int] = {}
    sites = {"output": model.model.output_site}
    for i, layer in enumerate(model.model.layers):
        sites |= {f"{i}.attention": layer.attention_site, f"{i}.ffn": layer.ffn_site}
    for name, site in sites.items():
        site.observer = partial(lambda name, weights: seen.update({name: weights.shape[0]}), name)
    with torch.no_grad():
        model(tokens(7), cu(7))
    attention = [seen.get(f"{i}.attention") for i in range(5)]
    ffn = [seen[f"{i}.ffn"] for i in range(5)]
    assert attention == [None, 2, 2, 3, 3]  # layer 0 has no mix; a boundary reads the sum it closes
    assert ffn == [2, 2, 3, 3, 4] and seen["output"] == 4


@pytest.mark.row(38)
def test_full_attnres_is_the_block_form_with_a_block_for_every_sublayer() -> None:
    model = model64(TINY.replace(residual="full", num_hidden_layers=3))
    kept: list[tuple[int, torch.Tensor]] = []
    model.model.output_site.op = lambda sources, *rest: kept.append((len(sources), torch.stack(sources))) or sources[0]
    with torch.no_grad():
        model(tokens(5), cu(5))
    assert kept[0][0] == 1 + 2 * 3  # the embedding and every sub-layer's output


@pytest.mark.row(47, 72)
def test_shared_experts_always_act_and_evaluation_leaves_the_bias() -> None:
    model = model64()
    moe = model.model.layers[1].block_sparse_moe
    x = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        both = moe(x)
        for w in (moe.experts.w1, moe.experts.w2, moe.experts.w3):
            w.zero_()
        assert torch.equal(moe(x), moe.shared_experts(x)) and not torch.equal(both, moe.shared_experts(x))
    seen = []
    moe.gate.observer = seen.append
    bias = moe.gate.e_score_correction_bias.clone()
    model(tokens(8), cu(8))
    assert not seen and torch.equal(moe.gate.e_score_correction_bias, bias)
    model.train()(tokens(8), cu(8))
    assert len(seen) == 1 and torch.equal(moe.gate.e_score_correction_bias, bias)


@pytest.mark.row(49)
def test_latent_norm_takes_out_the_scale() -> None:
    moe = model64().model.layers[1].block_sparse_moe
    x = 30 * torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = moe.routed(x)
        moe.experts.w2 *= 10
        assert (moe.routed(x) - before).abs().max() < 1e-3 * before.abs().max()


def test_cu_seqlens_that_do_not_fit_are_refused() -> None:
    model = model64()
    for bad, words in ((cu(4), "ends at 4, but there are 5"), (torch.tensor([1, 5]), "must rise from 0")):
        with pytest.raises(ValueError, match=words):
            model(tokens(5), bad)


def test_bf16_compute_stays_near_float32() -> None:
    config = named("pico")
    wide, narrow = K3.initialised(config, 0), K3.initialised(config, 0, compute_dtype=torch.bfloat16)
    x = tokens(50)
    a, b = wide(x, cu(50)), narrow(x, cu(50))
    assert b.dtype == torch.bfloat16
    assert (a - b.float()).pow(2).mean().sqrt() < 0.03 * a.pow(2).mean().sqrt()
