"""openk3: the whole Kimi K3 system in one readable PyTorch codebase."""

__version__ = "0.1.0"
