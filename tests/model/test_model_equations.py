"""What a layer computes, against its equation written out by hand, token by token and head by head."""

import pytest
import torch
from torch import Tensor, nn

from openk3.config import SIZES, K3Config, named
from openk3.model.attnres import PlainSite
from openk3.model.k3 import ATTENTION, K3
from openk3.model.kda import DECAYS
from openk3.model.memory import Sequences

TINY = named("pico").replace(hidden_size=32, vocab_size=512, kda_num_heads=3, kda_head_dim=8)
T = 13
CU = torch.tensor([0, 5, T], dtype=torch.int32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(module: nn.Module, scale: float = 0.3) -> nn.Module:
    """In float64, every parameter drawn: norm weights around 1, the others around 0."""
    module = module.double()
    with torch.no_grad():
        for seed, (name, p) in enumerate(module.named_parameters()):
            p.copy_(scale * draw(*p.shape, seed=seed) + ("norm" in name and "proj" not in name))
    return module


def layer(config: K3Config, kind: str) -> nn.Module:
    return filled(ATTENTION[kind](config, 0))


def apply(module: nn.Module, x: Tensor, cu_seqlens: Tensor = CU) -> Tensor:
    with torch.no_grad():
        return module(x, Sequences.of(len(x), cu_seqlens))


@pytest.mark.row(26)
@pytest.mark.parametrize("gated", [True, False])
def test_gated_latent_attention_by_hand(gated: bool) -> None:
    """y = W_o [ sigma(W_g x) * o ] (report eq. 7): a gate of its own for every channel, and no norm on the way."""
    config = TINY.replace(mla_gate=gated)
    mla = layer(config, "mla")
    assert (dict(mla.named_parameters()).keys() >= {"g_proj.weight"}) == gated
    w = {name.removesuffix(".weight"): p.detach() for name, p in mla.named_parameters()}
    x = draw(T, 32, seed=99)
    heads, nope, latent_width = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.square().mean() + config.mla_lowrank_norm_eps).sqrt() * weight

    expected = []
    for t in range(T):
        first = 0 if t < 5 else 5
        q = w["q_b_proj"] @ norm(w["q_a_proj"] @ x[t], w["q_a_layernorm"])
        rows = [w["kv_a_proj_with_mqa"] @ x[j] for j in range(first, t + 1)]
        latents = [norm(row[:latent_width], w["kv_a_layernorm"]) for row in rows]
        outputs = []
        for h in range(heads):
            q_h = q.view(heads, -1)[h]
            w_h = w["kv_b_proj"].view(heads, -1, latent_width)[h]
            keys = [torch.cat([w_h[:nope] @ c, row[latent_width:]]) for c, row in zip(latents, rows, strict=True)]
            p = torch.softmax(torch.stack([q_h @ k for k in keys]) * config.qk_head_dim**-0.5, dim=0)
            outputs.append(sum(p_j * (w_h[nope:] @ c) for p_j, c in zip(p, latents, strict=True)))
        o = torch.cat(outputs)
        gate = 1 / (1 + torch.exp(-w["g_proj"] @ x[t])) if gated else 1
        expected.append(w["o_proj"] @ (gate * o))
    y = apply(mla, x)
    torch.testing.assert_close(y, torch.stack(expected), rtol=0, atol=1e-12)
    if gated:  # values ten times as large are seen ten times as large
        with torch.no_grad():
            mla.kv_b_proj.weight.view(heads, -1, latent_width)[:, nope:] *= 10
        torch.testing.assert_close(apply(mla, x), 10 * y, rtol=1e-12, atol=0)


@pytest.mark.row(17)
@pytest.mark.parametrize("kind", ["full_rank", "low_rank"])
def test_gated_output_of_kda_by_hand(kind: str) -> None:
    """y = W_o [ sigma(W_g x) * RMSNorm(o) ] (report eq. 6), o as the recurrence gives it."""
    kda = layer(TINY.replace(kda_gate=kind), "kda")
    seen, op = [], kda.op
    kda.op = lambda *args, **kwargs: seen.append(op(*args, **kwargs)) or seen[-1]
    x = draw(T, 32, seed=99)
    y = apply(kda, x)
    o_THV = seen[0][0]
    w = {name.removesuffix(".weight"): p.detach() for name, p in kda.named_parameters()}
    w_g = w["g_proj"] if kind == "full_rank" else w["g_proj.up"] @ w["g_proj.down"]
    for t in range(T):
        normed = [o / (o.square().mean() + TINY.rms_norm_eps).sqrt() * w["o_norm"] for o in o_THV[t]]
        expected = w["o_proj"] @ (torch.cat(normed) / (1 + torch.exp(-w_g @ x[t])))
        torch.testing.assert_close(y[t], expected, rtol=0, atol=1e-12)


@pytest.mark.row(17)
def test_the_output_gate_of_kda_exceeds_the_rank_of_a_low_rank_gate() -> None:
    """Not square, and of the rank of its input: what the low-rank gate misses at best is no rounding error."""
    config = named("nano").replace(kda_num_heads=6, vocab_size=512)
    d, p, rank = config.hidden_size, config.kda_width, config.kda_head_dim
    assert rank < d < p
    assert named("k3").kda_width == 12288 and named("k3").hidden_size == 7168
    x = draw(400, d, seed=1)
    logits = {}
    for kind in ("full_rank", "low_rank"):
        model = K3.initialised(config.replace(kda_gate=kind, num_hidden_layers=2), 0).double()
        kda = model.model.layers[0].self_attn
        kda.g_proj.register_forward_hook(lambda _module, _inputs, out, kind=kind: logits.update({kind: out}))
        apply(kda, x, torch.tensor([0, len(x)]))
    assert logits["full_rank"].shape == (len(x), p)
    assert torch.linalg.matrix_rank(logits["full_rank"]) == d
    assert torch.linalg.matrix_rank(logits["low_rank"]) == rank
    singular = torch.linalg.svdvals(logits["full_rank"])
    missed = singular[rank:].square().sum() / singular.square().sum()
    assert missed > 0.3  # by the best matrix of that rank


@pytest.mark.row(30)
def test_the_last_layer_is_always_global() -> None:
    """Where the pattern of three to one would end with KDA, as it would with the 93 layers of K3, MLA stands."""
    for n in range(1, 101):
        kinds = TINY.replace(num_hidden_layers=n).layer_kinds
        assert kinds[-1] == "mla" and len(kinds) == n
        assert [i for i, kind in enumerate(kinds[:-1]) if kind == "mla"] == list(range(3, n - 1, 4))
    for n in range(1, 7):
        model = K3(TINY.replace(num_hidden_layers=n))
        assert type(model.model.layers[-1].self_attn) is ATTENTION["mla"]
    for config in SIZES.values():
        assert config.num_hidden_layers % 4 == 1 and config.layer_kinds[-2:] == ("mla", "mla")
        hf = config.to_hf()
        linear = hf["text_config"]["linear_attn_config"]
        linear["kda_layers"].append(linear["full_attn_layers"].pop())
        with pytest.raises(ValueError, match="full_attn_layers"):
            K3Config.from_hf(hf)


@pytest.mark.row(34)
def test_the_plain_residual_is_the_sum_over_depth() -> None:
    """Every sub-layer reads the normed sum of the embedding and all outputs before it, and nothing is learned there."""
    model = filled(K3(TINY.replace(residual="plain"), compute_dtype=torch.float64), 0.2).eval()
    assert not [name for name, _ in model.named_parameters() if "res" in name.split(".")[-2]]
    reads, outputs, last = [], [], []
    for block in model.model.layers:
        assert type(block.attention_site) is type(block.ffn_site) is PlainSite
        ffn = getattr(block, block.ffn_name)
        for norm, module in ((block.input_layernorm, block.self_attn), (block.post_attention_layernorm, ffn)):
            norm.register_forward_hook(lambda _module, inputs, _out: reads.append(inputs[0]))
            module.register_forward_hook(lambda _module, _inputs, out: outputs.append(out))
    model.model.norm.register_forward_hook(lambda _module, inputs, _out: last.append(inputs[0]))
    tokens = torch.randint(TINY.vocab_size, (T,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(tokens, CU)
    assert len(outputs) == 2 * TINY.num_hidden_layers
    stream = model.model.embed_tokens.weight.detach()[tokens]
    for read, out in zip(reads, outputs, strict=True):
        assert torch.equal(read, stream)
        assert out.abs().mean() > 1e-3
        stream = stream + out
    assert torch.equal(last[0], stream)
    in_any_order = reads[0] + torch.stack(outputs[::-1]).sum(0)
    torch.testing.assert_close(stream, in_any_order, rtol=0, atol=1e-12)


@pytest.mark.row(13)
@pytest.mark.parametrize("decay", ["bounded", "softplus"])
def test_a_tile_of_sixteen_tokens_as_one_bfloat16_product(decay: str) -> None:
    """(Q Gamma)(K / Gamma)^T at large logits: in bf16 the softplus map overflows, the bounded one does not."""
    z, q, k = 8 + 50 * draw(16, 1, 32).abs(), draw(16, 32, seed=1), draw(16, 32, seed=2)
    zeros = torch.zeros(1, 32, dtype=torch.float64)
    log_decay = DECAYS[decay](TINY).log_decay(z, zeros[:, 0], zeros)[:, 0]
    total = log_decay.cumsum(0)
    inverse = (-total).exp()
    narrow = (q * total.exp()).bfloat16(), (k * inverse).bfloat16()
    tile = (narrow[0] @ narrow[1].t()).tril()
    if decay == "softplus":
        assert (log_decay < -5).any()
        assert not narrow[1].isfinite().all() and not tile.isfinite().all()
        return
    assert log_decay.min() < -4.99  # the bound is reached, and Gamma of the tile is close to e^-80
    assert 1e34 < inverse.max() < 5.6e34 < torch.finfo(torch.bfloat16).max and not inverse.half().isfinite().all()
    pairs = torch.exp((total[:, None] - total[None]).clamp(max=0))
    exact = torch.einsum("ic,ijc,jc->ij", q, pairs, k).tril()
    size = torch.einsum("ic,ijc,jc->ij", q.abs(), pairs, k.abs())
    assert ((tile.double() - exact).abs() <= 2**-6 * size).all()  # three roundings to bf16
