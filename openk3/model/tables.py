"""Tables for people: what a model is made of."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from openk3.config import K3Config, named
from openk3.model.audit import Audit, audit

ORDER = (
    "KDA layers", "MLA layers", "routed experts", "shared experts", "latent projections", "routers", "dense FFN",
    "input embedding", "output head", "norms and AttnRes queries", "vision tower", "projector",
)  # fmt: skip
NOTES = {
    "KDA layers": "memory of fixed size",
    "MLA layers": "a small latent a token",
    "routed experts": "a few of many a token",
    "shared experts": "always on",
    "latent projections": "to half the width, back",
    "routers": "balanced by a bias",
    "dense FFN": "the first layer's",
    "norms and AttnRes queries": "which depths to read",
    "vision tower": "MoonViT-V2",
}


def count(n: int) -> str:
    """1234567 -> 1.23 M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(n)


def parameter_table(title: str, found: Audit, config: K3Config) -> Table:
    """Parameters by part, with their share and what each part is for."""
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    table.add_column("what it is", overflow="fold")
    for part in ORDER:
        if part in found.parts:
            n = found.parts[part]
            table.add_row(part, f"{n:,}", f"{n / found.total:.2%}", NOTES.get(part, ""))
    table.add_section()
    table.add_row("all", f"{found.total:,}", "", count(found.total))
    table.add_row("active per token", f"{found.active:,}", f"{found.active / found.total:.2%}", count(found.active))
    kinds = config.layer_kinds
    table.caption = (
        f"{len(kinds)} layers: {kinds.count('kda')} KDA, {kinds.count('mla')} MLA; {config.num_experts} experts, "
        f"{config.num_experts_per_token} per token; {found.tensors:,} tensors, {found.nbytes:,} bytes on disk"
    )
    return table


def audit_table(size: str) -> None:
    """Print the parameter table of a named size; `k3` with its vision tower and packed experts, as released."""
    config = named(size)
    released = size == "k3"
    Console().print(parameter_table(f"`{size}`", audit(config, vision=released, packed=released), config))
