"""The end of the tour, whatever the run folder has been through."""

import pytest

from openk3.errors import UserError
from openk3.train.tour import results

CORPUS = {"kind": "corpus", "hash": "0" * 64, "files": 2, "bytes": 9, "order5_bpb": 1.5}
EVAL = {"kind": "eval", "tokens": 8, "bpb": 1.25}


def test_the_last_evaluation_stands_beside_the_byte_model():
    table = results([CORPUS, EVAL | {"bpb": 2.0}, EVAL])
    assert list(table.columns[1].cells) == ["1.250", "1.500"]


@pytest.mark.parametrize("lines", [[], [CORPUS], [EVAL]])
def test_metrics_that_were_cut_short_are_told(lines):
    with pytest.raises(UserError, match=r"metrics.jsonl of this run was cut short"):
        results(lines)
