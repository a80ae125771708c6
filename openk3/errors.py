"""The two ways a command ends badly: the input was wrong (exit code 2), or something failed (exit code 1)."""


class UserError(Exception):
    """Wrong input. Its message is one sentence: what was wrong, and what to do. Exit code 2."""


class Failure(Exception):
    """Something failed although the input was right (no room on the disk, a NaN). Exit code 1."""
