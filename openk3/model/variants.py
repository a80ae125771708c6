"""Ablations that are fair to compare: the same active parameters, re-matched by the experts' inner width alone."""

from __future__ import annotations

from openk3.config import K3Config
from openk3.model.audit import audit

K2LIKE = {
    "attention": "mla",
    "mla_position": "rope",
    "mla_gate": False,
    "residual": "plain",
    "activation": "swiglu",
    "latent_moe": False,
    "num_shared_experts": 1,
}


def rematch(config: K3Config, active: int) -> K3Config:
    """`config` with the expert inner width whose active parameters come closest to `active` (decisions.md: 1 %).

    Raises ValueError if no width comes within 1 %.
    """
    low, high = (audit(config.replace(moe_intermediate_size=width)).active for width in (32, 64))
    per_unit = (high - low) / 32  # exactly linear in the width
    width = max(1, round(32 + (active - low) / per_unit))
    matched = config.replace(moe_intermediate_size=width)
    found = audit(matched).active
    if abs(found - active) > active / 100:
        raise ValueError(f"no expert inner width brings {found:,} active parameters within 1 % of {active:,}")
    return matched


def k2like(config: K3Config) -> K3Config:
    """What K3 replaced, at the active parameters of `config`: MLA with RoPE, plain residual, SwiGLU, full-width MoE."""
    return rematch(config.replace(**K2LIKE), audit(config).active)
