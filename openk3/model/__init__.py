"""The model: nn.Modules that read like the report, one idea a file. `k3.py` has the whole on one page."""

from openk3.model.k3 import K3

__all__ = ["K3"]
