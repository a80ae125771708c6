import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from openk3.chat.tokenizer import Tokenizer
from openk3.data import bpe, sources

TEXTS = [document.text for document in sources.stdlib_corpus() if document.path.startswith(("json/", "logging/"))]
VARIED = [
    "def f(x):\n    return x**2 + 1\n\n\nclass XMLHttpRequest(HTTPServer2):\n\tpass\r\n",
    "I'm sure they'LL say it's fine, don't you?   \n\n  McDonald's NASA'S",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01 abc\u4e2d\u6587abc \u4eba\u3005\u3007\u3006\u5207",
    "e\u0301 caf\u00e9 \U0001f600 \u00df \u01c5 \u00a0\u2003 x",
    "1234567 3.14159 0xdeadbeef 2024-05-01",
    "<|open|>[BOS] \u0645\u0631\u062d\u0628\u0627 \u041f\u0440\u0438\u0432\u0435\u0442",
    *TEXTS[:2],
]


@pytest.fixture(scope="module")
def trained():
    return bpe.train_merges(TEXTS, 700)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(bpe.train_bpe(TEXTS, 700))


def test_byte_alphabet():
    alphabet = bpe.byte_alphabet()
    assert set(alphabet) == set(ByteLevel.alphabet()) and sorted(alphabet.values()) == list(range(256))
    splitter = ByteLevel(add_prefix_space=False, use_regex=False)
    for text in VARIED:
        ((written, _),) = splitter.pre_tokenize_str(text)
        assert bytes(alphabet[char] for char in written) == text.encode()


def test_encoding_equals_the_trainers(trained, tokenizer):
    alphabet = bpe.byte_alphabet()
    token_of = {i: bytes(map(alphabet.get, written)) for written, i in trained.get_vocab().items()}
    for text in VARIED:
        theirs = [token_of[i] for i in trained.encode(text).ids]
        assert [tokenizer.decode_bytes([i]) for i in tokenizer.encode(text)] == theirs


def test_ranks(trained, tokenizer):
    merges = json.loads(trained.to_str())["model"]["merges"]
    assert [tokenizer.ranks[bytes([byte])] for byte in range(256)] == list(range(256))
    assert tokenizer.n_ranks == 700 == 256 + len(merges)
    in_order = [tokenizer.decode([256 + i]) for i in range(len(merges))]
    assert in_order == [(left + right).replace("\u0120", " ").replace("\u010a", "\n") for left, right in merges]
    assert len(tokenizer.encode(TEXTS[0])) < 0.5 * len(TEXTS[0].encode())


@given(st.text())
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_deterministic(tokenizer):
    assert bpe.train_bpe(iter(TEXTS), 700) == tokenizer.ranks


def test_two_merges_with_one_result():
    ranks = bpe.ranks_of_merges([["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"], ["abc", "\u0120"]])
    assert list(ranks)[256:] == [b"ab", b"bc", b"abc", b"abc "] and list(ranks.values()) == list(range(260))


def test_a_page_of_text_is_enough_for_512_ranks():
    text = TEXTS[0][:2000]
    assert Tokenizer(bpe.train_bpe([text], 512)).n_ranks == 512


def test_bytes_alone():
    assert Tokenizer(bpe.train_bpe([], 256)).encode("ab\u00e9") == list("ab\u00e9".encode())


def test_too_little_text():
    with pytest.raises(ValueError, match=r"gives 25 merges, 444 are needed for 700 ranks; .* at most 281 ranks"):
        bpe.train_bpe([string.ascii_lowercase], 700)
    with pytest.raises(ValueError, match="at least 256, the single bytes; got 255"):
        bpe.train_bpe(TEXTS, 255)
