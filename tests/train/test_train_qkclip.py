"""QK-clip on a gated MLA layer: who is clipped, by how much, and who keeps its bits."""

import pytest
import torch
from torch import nn

from openk3.config import named
from openk3.model.memory import Sequences
from openk3.model.mla import MLA
from openk3.train.qkclip import QKClip, clip_heads, largest_logit

CONFIG = named("pico").replace(num_attention_heads=4)
NOPE, ROPE, HEADS = CONFIG.qk_nope_head_dim, CONFIG.qk_rope_head_dim, 4
SCALE = (NOPE + ROPE) ** -0.5


def layer(dtype=torch.float64, loud=()):
    """A model of one MLA layer in training mode; the q rows of `loud` heads are large."""
    model = nn.Module()
    model.attention = MLA(CONFIG, 3)
    for module in model.modules():
        if hasattr(module, "reset"):
            module.reset(torch.Generator().manual_seed(1))
    for p in model.parameters():
        p.data.mul_(5)
    q_b = model.attention.q_b_proj.weight.data.view(HEADS, NOPE + ROPE, -1)
    for head in loud:
        q_b[head] *= 30 * (head + 1)
    return model.to(dtype).train()


def batch(dtype=torch.float64, lengths=(17, 1, 30)):
    x = torch.randn(sum(lengths), CONFIG.hidden_size, generator=torch.Generator().manual_seed(2), dtype=dtype)
    return x, Sequences.of(len(x), torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32), None)


def largest_by_hand(model, x, sequences):
    """[H], from the definition: every pair of one sequence, no fast path."""
    shown = []
    model.attention.observer, before = lambda *seen: shown.append(seen), model.attention.observer
    model.attention(x, sequences)
    model.attention.observer = before
    q, k_nope, k_pe, scale, cu_seqlens = shown[0]
    best = torch.full((HEADS,), -torch.inf, dtype=x.dtype)
    bounds = cu_seqlens.tolist()
    for start, stop in zip(bounds, bounds[1:], strict=False):
        for i in range(start, stop):
            for j in range(start, i + 1):
                logit = (q[i, :, :NOPE] * k_nope[j]).sum(-1) + (q[i, :, NOPE:] * k_pe[j]).sum(-1)
                best = torch.maximum(best, logit * scale)
    return best


@pytest.mark.row(97)
def test_logits_are_capped_at_tau_and_quiet_heads_keep_their_bits():
    model, (x, sequences) = layer(loud=(1, 3)), batch()
    before = largest_by_hand(model, x, sequences)
    tau = float(before[[0, 2]].max()) * 1.5
    assert (before[[1, 3]] > 2 * tau).all()
    q_before, kv_before = (
        w.detach().clone() for w in (model.attention.q_b_proj.weight, model.attention.kv_b_proj.weight)
    )
    others = {n: p.detach().clone() for n, p in model.named_parameters() if "_b_proj" not in n}

    clip = QKClip(model, tau)
    model.attention(x, sequences)
    clip.collect()
    assert clip.step() == 2

    after = largest_by_hand(model, x, sequences)
    torch.testing.assert_close(after[[1, 3]], torch.full((2,), tau, dtype=x.dtype), rtol=1e-9, atol=0)
    q, kv = (
        model.attention.q_b_proj.weight.view(HEADS, NOPE + ROPE, -1),
        model.attention.kv_b_proj.weight.view(HEADS, 64, -1),
    )
    q_was, kv_was = q_before.view_as(q), kv_before.view_as(kv)
    for head in (0, 2):
        assert torch.equal(q[head], q_was[head])
        assert torch.equal(kv[head], kv_was[head])
    for head in (1, 3):
        gamma = tau / before[head]
        torch.testing.assert_close(q[head, :NOPE], q_was[head, :NOPE] * gamma.sqrt(), rtol=1e-9, atol=0)
        torch.testing.assert_close(q[head, NOPE:], q_was[head, NOPE:] * gamma, rtol=1e-9, atol=0)
        torch.testing.assert_close(kv[head, :NOPE], kv_was[head, :NOPE] * gamma.sqrt(), rtol=1e-9, atol=0)
        assert torch.equal(kv[head, NOPE:], kv_was[head, NOPE:])  # values
    for name, p in model.named_parameters():  # the shared key part among them
        assert "_b_proj" in name or torch.equal(p, others[name])


@pytest.mark.row(97)
def test_only_heads_whose_bound_exceeds_tau_are_computed_exactly(monkeypatch):
    model, (x, sequences) = layer(loud=(1, 3)), batch()
    seen = []
    monkeypatch.setattr(
        "openk3.train.qkclip.largest_logit", lambda q, *rest: seen.append(q.shape[1]) or largest_logit(q, *rest)
    )
    largest = largest_by_hand(model, x, sequences)
    clip = QKClip(model, 1e6)
    model.attention(x, sequences)
    assert (clip.seen[0].bound() >= largest).all()
    quiet, loud = clip.seen[0].bound()[[0, 2]].max(), clip.seen[0].bound()[[1, 3]].min()
    clip.collect()
    assert not seen
    assert clip.step() == 0
    clip = QKClip(model, float(quiet + loud) / 2)
    model.attention(x, sequences)
    clip.collect()
    assert seen == [2]
    assert clip.exact_heads == 2


def test_a_head_over_the_bound_but_under_tau_is_left_alone():
    model, (x, sequences) = layer(), batch()
    largest = largest_by_hand(model, x, sequences)
    tau = float(largest.max()) * 1.001
    clip = QKClip(model, tau)
    before = [p.detach().clone() for p in model.parameters()]
    model.attention(x, sequences)
    assert (clip.seen[0].bound() > tau).any()
    clip.collect()
    assert clip.exact_heads
    assert clip.step() == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_maximum_is_over_all_micro_batches_and_forgotten_after_the_step():
    model = layer(loud=(1,))
    (x, sequences), (y, single) = batch(), batch(lengths=(1,))
    tau = float(largest_by_hand(model, x, sequences)[1]) / 4
    clip = QKClip(model, tau)
    for inputs in ((y, single), (x, sequences), (y, single)):
        model.attention(*inputs)
        clip.collect()
    assert clip.step() == 1
    assert largest_by_hand(model, x, sequences)[1].item() == pytest.approx(tau, rel=1e-9)
    assert clip.step() == 0


def test_largest_logit_in_tiles(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(40, 3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k[8::3] = 20 * q[7:-1:3]  # large where the key is one token ahead of the query
    cu_seqlens = torch.tensor([0, 7, 7, 40], dtype=torch.int32)
    whole = largest_logit(q, k, cu_seqlens, 0.5)
    expected = torch.full((3,), -torch.inf, dtype=torch.float64)
    for start, stop in ((0, 7), (7, 40)):
        logits = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) * 0.5
        past = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        expected = torch.maximum(expected, logits[:, past].amax(1))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12)
    monkeypatch.setattr("openk3.train.qkclip.LOGITS_AT_ONCE", 500)
    torch.testing.assert_close(largest_logit(q, k, cu_seqlens, 0.5), expected, rtol=0, atol=1e-12)


def test_tau_zero_watches_nothing_and_evaluation_is_not_seen():
    model, inputs = layer(loud=(0,)), batch()
    clip = QKClip(model, 0.0)
    model.attention(*inputs)
    clip.collect()
    assert clip.step() == 0
    assert model.attention.observer is None
    clip = QKClip(model, 1e-3)
    model.eval()
    model.attention(*inputs)
    clip.collect()
    assert clip.step() == 0


def test_gamma_one_keeps_the_bits():
    q_b, kv_b = torch.randn(HEADS * 48, 7), torch.randn(HEADS * 64, 5)
    before = q_b.clone(), kv_b.clone()
    clip_heads(q_b, kv_b, torch.ones(HEADS), NOPE)
    assert torch.equal(q_b, before[0])
    assert torch.equal(kv_b, before[1])
