"""Training a small model on sequences with a known answer, with the trainer's own optimizer and schedule.

A step is the trainer's: per-head Muon and AdamW at one rate, warm-up and cosine, a clipped gradient, QK-clip, moved
router biases. What differs is the loss, which is taken at the asked positions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openk3.config import K3Config
from openk3.evals.experiments.recall_tasks import NOT_ASKED, TaskBatch, accuracy
from openk3.model.k3 import K3
from openk3.ops.cross_entropy import linear_cross_entropy
from openk3.train.balance import Balancer
from openk3.train.evaluate import frozen
from openk3.train.optim import Optimizer
from openk3.train.qkclip import QKClip
from openk3.train.recipe import BalanceRecipe, OptimRecipe
from openk3.train.schedule import learning_rate


@dataclass(frozen=True)
class Budget:
    """How long to train, and how fast."""

    steps: int
    lr: float
    seed: int
    warmup: float = 0.05
    report_every: int = 50


def asked_loss(model: K3, batch: TaskBatch) -> Tensor:
    """Mean cross-entropy over the asked positions."""
    targets_T = batch.targets_NL.flatten()
    asked_T = targets_T != NOT_ASKED
    h_TD = model.hidden(batch.tokens_NL.flatten(), batch.cu_seqlens)[asked_T]
    return linear_cross_entropy(h_TD, model.lm_head.weight, targets_T[asked_T]) / len(h_TD)


def train_on(config: K3Config, draw: Callable[[int], TaskBatch], budget: Budget) -> tuple[K3, list[list[float]]]:
    """A model trained on `draw(step)` for each step, and [step, mean loss since the last report] along the way."""
    torch.manual_seed(budget.seed)
    model = K3.initialised(config, budget.seed).train()
    recipe = OptimRecipe(lr=budget.lr, warmup=budget.warmup)
    optimizer = Optimizer(model, config, recipe)
    balancer, clip = Balancer(model, BalanceRecipe()), QKClip(model, recipe.qk_clip_tau)
    curve, since = [], []
    for step in range(budget.steps):
        optimizer.zero_grad()
        loss = asked_loss(model, draw(step))
        loss.backward()
        clip.collect()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        rate = learning_rate(step, budget.steps, peak=recipe.lr, warmup=recipe.warmup, min_ratio=recipe.lr_min_ratio)
        optimizer.step(rate)
        clip.step()
        balancer.step()
        since.append(float(loss.detach()))
        if (step + 1) % budget.report_every == 0 or step + 1 == budget.steps:
            curve.append([step + 1, sum(since) / len(since)])
            since = []
    return model, curve


def answers(model: K3, batch: TaskBatch) -> Tensor:
    """The model's likeliest next id at every position, [N, L]."""
    with frozen(model):
        logits_TV = model(batch.tokens_NL.flatten(), batch.cu_seqlens)
    return logits_TV.argmax(-1).view_as(batch.tokens_NL)


def score_on(model: K3, batch: TaskBatch) -> float:
    """Accuracy at the asked positions."""
    return accuracy(answers(model, batch), batch)


def describe(config: K3Config) -> dict[str, Any]:
    """What a record says about a model: its layers, widths and the state a KDA layer keeps of a sequence."""
    from openk3.model.audit import audit

    return {
        "layers": "".join("K" if kind == "kda" else "M" for kind in config.layer_kinds),
        "mla_position": config.mla_position,
        "hidden_size": config.hidden_size,
        "kda_state": config.kda_num_heads * config.kda_head_dim**2,
        "parameters": audit(config).total,
    }
