"""The inverse of I + L for a batch of strictly lower triangular L, by forward substitution.

Products of powers of L (the finite Neumann form) cancel catastrophically for near-parallel keys: the powers reach
1e3 where the inverse stays below 1. Substitution does not, at any precision (kernels.md 4.3).
"""

import torch
from torch import Tensor

BLOCK = 16


def inverse_unit_lower(L_BCC: Tensor) -> Tensor:
    """(I + L)^-1, [B, C, C]; C is 16 times a power of two. Entries on and above the diagonal of L must be zero.

    The 16 x 16 diagonal blocks are inverted by substitution, then merged in pairs:
    the block below the diagonal is -X22 L21 X11.
    """
    B, C, _ = L_BCC.shape
    n = C // BLOCK
    blocks = L_BCC.view(B, n, BLOCK, n, BLOCK).diagonal(dim1=1, dim2=3)  # [B, 16, 16, n]
    # The batch stands last here: every step of the substitution is then one long vector operation.
    last = blocks.permute(1, 2, 0, 3).contiguous().view(BLOCK, BLOCK, B * n)
    inverses = _substitute(last).view(BLOCK * BLOCK, B * n).t().contiguous().view(B, n, BLOCK, BLOCK)
    X = torch.zeros_like(L_BCC)
    for i in range(n):
        at = slice(i * BLOCK, (i + 1) * BLOCK)
        X[:, at, at] = inverses[:, i]
    size = BLOCK
    while size < C:
        for start in range(0, C, 2 * size):
            up, down = slice(start, start + size), slice(start + size, start + 2 * size)
            X[:, down, up] = torch.bmm(X[:, down, down], torch.bmm(L_BCC[:, down, up], X[:, up, up])).neg_()
        size *= 2
    return X


def _substitute(L: Tensor) -> Tensor:
    """(I + L)^-1 of [s, s, B]: once row i of the inverse is known, it is taken out of every row below."""
    X = torch.zeros_like(L)
    X.diagonal(dim1=0, dim2=1).fill_(1)
    for i in range(len(L) - 1):
        X[i + 1 :, : i + 1].addcmul_(L[i + 1 :, i, None], X[i, None, : i + 1], value=-1)
    return X
