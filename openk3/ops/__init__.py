"""Functions on tensors: no modules, no configuration, no I/O.

Every op has a plain `reference` backend that defines it (any dtype, differentiable) and faster ones that equal it.
One flat token axis, sequences delimited by `cu_seqlens` (int32 [N + 1], zero-length sequences are legal).
"""
