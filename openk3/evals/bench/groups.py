"""Where the time of a training step goes, by group of operations.

Modules and ops are marked with a name while the profiler runs. What a mark encloses in the forward pass belongs to
its name, the innermost mark where they nest; a node of the backward pass belongs to the mark under which its forward
ran, which the profiler's sequence numbers tell. So a group holds both directions of its operations.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from openk3.evals.bench.peer import Block, PlainTransformer
from openk3.model.attnres import PlainSite
from openk3.model.k3 import K3
from openk3.model.kda import KDA
from openk3.model.linear import RMSNorm
from openk3.model.mla import MLA
from openk3.model.mlp import MLP
from openk3.model.moe import ExpertStack, LatentMoE, MoE, Router

MARK = "group: "
NODE = "autograd::engine::evaluate_function: "
OTHER = "other"
# What a module's own work is called; what runs inside a marked child has the child's name.
MODULES: dict[type[nn.Module], str] = {
    KDA: "KDA: projections, gate, head norm",
    MLA: "MLA: projections, gate",
    MLP: "shared experts, dense FFN",
    MoE: "latent projections",
    LatentMoE: "latent projections",
    ExpertStack: "routed experts",
    Router: "router, balance",
    RMSNorm: "norms",
    nn.RMSNorm: "norms",
    Block: "projections, activation, residual",
}
OPS = {  # attribute of a module through which it calls an op
    (KDA, "op"): "KDA: recurrence",
    (KDA, "conv_op"): "KDA: short convolution",
    (MLA, "op"): "MLA: attention",
    (Block, "attend"): "attention",
}


def named(name: str, call: Callable) -> Callable:
    """`call` under a mark."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(MARK + name):
            return call(*args, **kwargs)

    return marked


@contextmanager
def replaced(owner: Any, attribute: str, name: str) -> Iterator[None]:
    """`owner.attribute`, a callable, under a mark while the context lasts."""
    before = getattr(owner, attribute)
    own = attribute in vars(owner)
    setattr(owner, attribute, named(name, before))
    try:
        yield
    finally:
        setattr(owner, attribute, before) if own else delattr(owner, attribute)


@contextmanager
def marks(model: K3 | PlainTransformer) -> Iterator[None]:
    """Marks on everything in the tables above, and on AttnRes."""
    with ExitStack() as stack:
        for module in model.modules():
            if type(module) in MODULES:
                stack.enter_context(replaced(module, "forward", MODULES[type(module)]))
            for (kind, attribute), name in OPS.items():
                if type(module) is kind:
                    stack.enter_context(replaced(module, attribute, name))
            for site in vars(module).values():
                if isinstance(site, PlainSite) and site.mixes:
                    stack.enter_context(replaced(site, "op", "AttnRes"))
        yield


def by_group(model: K3 | PlainTransformer, step: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds a step by group, the longest first. `step` may set marks of its own with `named`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells on stderr that it starts and stops
    whole = named(OTHER, step)
    with marks(model), profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            whole()
    return {name: us / steps / 1e3 for name, us in sorted(self_times(seen.events()).items(), key=lambda x: -x[1])}


def self_times(events: Any) -> dict[str, float]:
    """Microseconds by group: the self times of a tree of events add up to the time of its root."""
    totals: dict[str, float] = defaultdict(float)
    forward: dict[int, str] = {}  # group of a forward operation, by sequence number; the last one made the node

    def visit(event: Any, group: str, backward: bool) -> None:
        if event.name.startswith(MARK):
            group = event.name.removeprefix(MARK)
        elif event.name.startswith(NODE):
            group, backward = forward.get(event.sequence_nr, group), True
        elif not backward and event.sequence_nr >= 0:
            forward[event.sequence_nr] = group
        totals[group] += event.self_cpu_time_total
        for child in event.cpu_children:
            visit(child, group, backward)

    roots = [e for e in events if e.cpu_parent is None and e.name == MARK + OTHER]
    for root in sorted(roots, key=lambda e: e.time_range.start):
        visit(root, OTHER, backward=False)
    return dict(totals)
