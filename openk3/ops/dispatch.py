"""Which implementation of an op runs.

`backend="auto"` takes the op's own choice, unless the environment variable OPENK3_BACKEND says otherwise:
`OPENK3_BACKEND=reference` for every op, `OPENK3_BACKEND=kda=chunked,experts=reference` for some. A backend named in
the call wins over both, so that a comparison of two backends stays one whatever the environment says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

VARIABLE = "OPENK3_BACKEND"


def forced(op: str) -> str | None:
    """The backend that the environment names for `op`, or None. Raises ValueError if the variable is malformed."""
    value = os.environ.get(VARIABLE, "").strip()
    if "=" not in value:
        return value or None
    pairs = [item.strip().split("=") for item in value.split(",") if item.strip()]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ValueError(f"{VARIABLE}={value!r} is neither one backend nor a list op=backend,op=backend")
    return dict(pairs).get(op)


def pick(op: str, backend: str, available: Mapping[str, Callable | str], default: str) -> Callable:
    """The callable that implements `op` under the name `backend`.

    `available` maps each backend of the op to its callable or, where it cannot run here, to the reason (a phrase that
    completes "is not available: "). `default` is what "auto" means for this call. Raises ValueError with the reason
    for a backend that cannot run, and with the known names for one that does not exist.
    """
    if backend == "auto":
        backend = forced(op) or default
    chosen = available.get(backend)
    if callable(chosen):
        return chosen
    names = ", ".join(name for name, value in available.items() if callable(value))
    reason = "it does not exist" if chosen is None else chosen
    raise ValueError(f"backend {backend!r} of {op} is not available: {reason}; available are auto, {names}")
