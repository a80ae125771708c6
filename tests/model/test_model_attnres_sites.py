"""The depth as the sites walk it: the golden stack, the full form, and what K3 keeps."""

from types import SimpleNamespace

import pytest
import torch

from openk3.config import K3Config, named
from openk3.model.attnres import PlainSite, add, attention_site, ffn_site, output_site
from openk3.ops.norm import rms_norm


def weight(tensor: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(weight=tensor)


def walk(config: K3Config, sub_layer, embedding, site):
    """The blocks and the last partial sum of a net whose sub-layers are `sub_layer(name, layer, x)`; `site(class,
    name, layer)` builds each site."""
    blocks, partial = (), embedding
    for i in range(config.num_hidden_layers):
        for name, kind in (("attn", attention_site(config, i)), ("mlp", ffn_site(config))):
            x, blocks, held = site(kind, name, i)(blocks, partial)
            partial = add(held, sub_layer(name, i, x))
    return site(output_site(config), "output", 0)(blocks, partial)


@pytest.mark.row(35, 36, 38, 39, 42)
@pytest.mark.parametrize("zero_queries", [False, True])
def test_golden_stack(golden, zero_queries):
    case = golden("attnres_small")
    w = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["inputs"].items()}
    shape = case["shape"]
    block = shape["attn_res_block_size"]
    config = named("pico").replace(num_hidden_layers=shape["layers"], attn_res_block_size=block)

    def site(kind: type[PlainSite], name: str, i: int) -> PlainSite:
        query, gamma = w[f"{name}_query"], w[f"{name}_gamma"]
        query, gamma = (query, gamma) if name == "output" else (query[i], gamma[i])
        return kind(weight(query * (not zero_queries)), weight(gamma), case["constants"]["eps"])

    def sub_layer(name: str, i: int, x: torch.Tensor) -> torch.Tensor:
        norm, matrix = ("input_layernorm", "W_attn") if name == "attn" else ("post_attention_layernorm", "W_ffn")
        return rms_norm(x, w[norm][i], 1e-5) @ w[matrix][i].t()

    h, blocks, _ = walk(config, sub_layer, w["embedding"], site)
    expected = torch.tensor(case["zero_query" if zero_queries else "expected"]["h"], dtype=torch.float64)
    torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)
    assert len(blocks) == shape["blocks_at_end"] == shape["sources_at_output"] - 1
    if not zero_queries:
        stored = torch.tensor(case["expected"]["blocks"], dtype=torch.float64)
        torch.testing.assert_close(torch.stack(blocks), stored, rtol=1e-12, atol=1e-12)


def reads(config: K3Config) -> list[list[list[str]]]:
    """What every site reads, by name: the sub-layers whose outputs each source sums. The output's read is last."""
    seen = []

    def site(kind: type[PlainSite], name: str, i: int) -> PlainSite:
        built = kind(weight(torch.zeros(1)), weight(torch.ones(1)))
        built.op = lambda sources, *rest: seen.append([s.names for s in sources]) or sources[0]
        return built

    walk(config, lambda name, i, x: Named([f"{name}{i}"]), Named(["embedding"]), site)
    return seen


class Named:
    """A stand-in for a tensor that remembers what was added up in it."""

    def __init__(self, names: list[str]):
        self.names = names

    def __add__(self, other: "Named") -> "Named":
        return Named(self.names + other.names)


@pytest.mark.row(38, 41)
def test_k3_keeps_9_tensors_where_full_residuals_keep_187():
    block, full = reads(named("k3")), reads(named("k3").replace(residual="full"))
    assert len(block) == len(full) == 186  # two sites a layer, less the first, plus the output
    assert (len(block[-1]), len(full[-1])) == (9, 187)
    assert all(len(source) == 1 for source in full[-1])  # full: embedding and every sub-layer's output, unsummed
    assert [source[0] for source in full[-1][:4]] == ["embedding", "attn0", "mlp0", "attn1"]
    assert max(len(sources) for sources in block) == 9


@pytest.mark.row(39, 40)
def test_sources_of_k3():
    """Blocks of 12 layers, the last of 9; only a block's first site reads no running sum of its own."""
    block = reads(named("k3"))
    sizes = [len(source) for source in block[-1]]
    assert sizes == [1] + [24] * 7 + [18]
    for layer in range(1, 93):
        attention, ffn = block[2 * layer - 1], block[2 * layer]
        opened = 1 + layer // 12 if layer % 12 else layer // 12  # blocks finished before the attention of this layer
        assert len(attention) == opened + 1
        assert attention[-1][-1] == f"mlp{layer - 1}"
        assert len(ffn) == 1 + layer // 12 + 1
        assert ffn[-1][0] == f"attn{layer // 12 * 12}"
        assert ffn[-1][-1] == f"attn{layer}"
