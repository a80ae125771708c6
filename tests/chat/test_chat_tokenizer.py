import base64
import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from openk3.chat import tokenizer as tok
from openk3.chat.tokenizer import StreamDecoder, Tokenizer

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/tokenizer_examples.json").read_text())
XTML = json.loads((ROOT / "tests/golden/xtml_examples.json").read_text())
TEXTS = [pair["text"] for pair in GOLDEN["pairs"]]

BYTES = {bytes([byte]): byte for byte in range(256)}
# Merges that cross a marker, a character of several bytes and a run of one letter.
SMALL = Tokenizer(BYTES | {t: 256 + i for i, t in enumerate([b"aa", b"<|", b"|>", b"\xf0\x9f", b"\xe4\xb8", b"th"])})

# Text with control strings and lone surrogates in it.
CONTROL_TEXT = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(sorted(SMALL.control)))).map("".join)


@pytest.fixture(scope="module")
def released():
    path = ROOT.parent / "shared" / "data" / "tiktoken.model"
    if not path.exists():
        pytest.skip("the released rank file is not part of the repository and not beside it")
    if hashlib.sha256(path.read_bytes()).hexdigest() != GOLDEN["rank_file"]["sha256"]:
        pytest.skip("the rank file beside the repository is not the released one")
    return Tokenizer(path)


def pieces_of(engine_pattern, expected, text):
    """Whether the engine of tiktoken splits text so: with whole pieces as the only merges, a piece is
    one token exactly when the engine cuts it out."""
    whole = {piece.encode() for piece in expected} - BYTES.keys()
    ranks = BYTES | {piece: 256 + i for i, piece in enumerate(sorted(whole))}
    engine = tiktoken.Encoding("pieces", pat_str=engine_pattern, mergeable_ranks=ranks, special_tokens={})
    return [engine.decode([i]) for i in engine.encode_ordinary(text)] == expected


def test_pattern_is_the_published_one():
    assert list(tok.ALTERNATIVES) == GOLDEN["alternatives"]
    assert tok.pattern_without_intersection() == "|".join(GOLDEN["alternatives_without_class_intersection"])


@pytest.mark.parametrize("pair", GOLDEN["pairs"], ids=range(len(GOLDEN["pairs"])))
def test_pieces(pair):
    assert pieces_of(tok.PATTERN, pair["pieces"], pair["text"])
    assert regex.findall(tok.pattern_without_intersection(), pair["text"]) == pair["pieces"]


def test_wrong_pieces_are_noticed():
    wrong = GOLDEN["wrong_variants"][0]
    assert not pieces_of(tok.PATTERN, wrong["pieces"], wrong["text"])


def test_released_ids(released):
    assert released.vocab_size == GOLDEN["vocabulary"] and released.n_ranks == GOLDEN["rank_file"]["ranks"]
    for pair in GOLDEN["pairs"]:
        assert released.encode(pair["text"]) == pair["ids"]
        assert released.decode(pair["ids"]) == pair["text"]
    assert [array.tolist() for array in released.encode_batch(TEXTS)] == [pair["ids"] for pair in GOLDEN["pairs"]]
    assert released.encode("1234567") != GOLDEN["wrong_variants"][1]["ids"]


def test_released_decoding(released):
    check = GOLDEN["decode_check"]
    for case in check["token_bytes_hex"]:
        ids = released.encode(case["text"])
        assert [released.decode_bytes([i]).hex() for i in ids] == case["bytes"]
        assert [released.token_bytes[i] for i in ids] == [len(part) // 2 for part in case["bytes"]]
    for case in check["control"]:
        assert released.decode(case["ids"]) == case["text"]


def test_released_segments(released):
    check = GOLDEN["segments_check"]
    ids = released.encode_segments(check["segments"])
    assert ids == check["ids"]
    joined = "".join(text for _, text in check["segments"])
    assert released.encode_with_control(joined) == check["joined_text_control_enabled"]["ids"] != ids
    assert released.encode(joined) == check["joined_text_control_disabled"]["ids"] != ids


def test_released_conversations_keep_user_markers_as_text(released):
    for conversation in XTML["conversations"]:
        ids = released.encode_segments(conversation["segments"])
        for name, count in conversation["control_marker_counts"].items():
            assert ids.count(released.control[name]) == count


def test_control_ids_of_the_released_vocabulary():
    names = tok.control_names(163584)
    assert len(names) == 256 and sorted(names.values()) == list(range(163584, 163840))
    assert {names[name]: name for name in tok.K3_CONTROL_NAMES.values()} == tok.K3_CONTROL_NAMES
    assert names["<|reserved_token_163606|>"] == 163606
    assert {name: names[name] for name in XTML["control_ids"]} == XTML["control_ids"]


def test_control_ids_move_with_the_vocabulary():
    shift = SMALL.n_ranks - 163584
    assert SMALL.vocab_size == SMALL.n_ranks + 256
    assert (SMALL.bos, SMALL.eos, SMALL.end_of_msg) == (163584 + shift, 163585 + shift, 163586 + shift)
    assert (SMALL.open, SMALL.close, SMALL.sep) == (163587 + shift, 163588 + shift, 163589 + shift)
    media = (SMALL.media_begin, SMALL.media_content, SMALL.media_end, SMALL.media_pad)
    assert media == tuple(i + shift for i in (163602, 163603, 163604, 163605))
    assert (SMALL.unk, SMALL.pad) == (163838 + shift, 163839 + shift) and SMALL.pad == SMALL.vocab_size - 1
    assert SMALL.is_control(SMALL.bos) and SMALL.is_control(SMALL.pad)
    assert not SMALL.is_control(SMALL.bos - 1) and not SMALL.is_control(SMALL.vocab_size)
    assert SMALL.decode([SMALL.n_ranks + 6 + 2]) == f"<|reserved_token_{SMALL.n_ranks + 8}|>"


@given(CONTROL_TEXT)
@example("<|open|>[BOS]<|reserved_token_270|>")
def test_ordinary_text_never_gives_control_ids(text):
    ids = SMALL.encode(text)
    assert all(i < SMALL.n_ranks for i in ids)
    assert SMALL.decode(ids) == text
    assert sum(SMALL.token_bytes[i] for i in ids) == len(text.encode())
    (batched,) = SMALL.encode_batch([text])
    assert batched.dtype == np.uint32 and batched.tolist() == ids


@given(CONTROL_TEXT)
def test_flagged_text_gives_one_id_for_each_control_string(text):
    found = re.findall("|".join(map(re.escape, SMALL.control)), text)
    assert [i for i in SMALL.encode_segments([(1, text)]) if SMALL.is_control(i)] == [SMALL.control[n] for n in found]
    assert SMALL.encode_segments([(0, text), (False, "x"), (True, "")]) == SMALL.encode(text) + SMALL.encode("x")
    assert SMALL.decode(SMALL.encode_with_control(text)) == text


def test_lone_surrogate_is_replaced():
    assert SMALL.decode(SMALL.encode("a\ud800b")) == "a\ufffdb"
    assert SMALL.encode_batch(["a\ud800b", ""])[0].tolist() == SMALL.encode("a\ud800b")


def plain_guard(text, max_chars, max_run):
    """The guards, character by character."""
    parts = []
    for start in range(0, len(text), max_chars):
        part, begin, run = text[start : start + max_chars], 0, 0
        for i, char in enumerate(part):
            run = run + 1 if i and char.isspace() == part[i - 1].isspace() else 1
            if run > max_run:
                parts.append(part[begin:i])
                begin, run = i, 1
        parts.append(part[begin:])
    return parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 25_000,
        "a" * 25_001,
        " " * 25_000 + "b" * 50_001,
        "\x1c\u2003\n" * 8_334 + "\u200b" * 25_001,  # the last is no white space
        "word " * 90_000,
        "x" + " y" * 187_490 + "z" * 60_000,  # a run across the cut at 400,000
    ],
    ids=["empty", "run", "long-run", "two-runs", "unicode-space", "long-text", "run-over-cut"],
)
def test_guards(text):
    parts = tok.guarded(text)
    assert parts == plain_guard(text, 400_000, 25_000)
    assert "".join(parts) == text and all(parts)


def test_guard_is_part_of_the_ids():
    text = "b" + "a" * 25_000
    aa, a = SMALL.ranks[b"aa"], ord("a")
    assert SMALL.encode(text) == [ord("b")] + [aa] * 12_499 + [a, a]
    assert SMALL.encode_batch([text])[0].tolist() == SMALL.encode(text) == SMALL.encode_with_control(text)


@given(st.lists(st.integers(0, SMALL.vocab_size - 1)), st.text(max_size=20))
@example([0xF0, 0x9F, SMALL.open], "\U0001f600")
@example([0xE4], "")
def test_stream_equals_whole_decoding(ids, text):
    ids = ids + SMALL.encode(text)
    stream = StreamDecoder(SMALL)
    for _ in range(2):  # flush makes it ready for the next text
        assert "".join([*map(stream.push, ids), stream.flush()]) == SMALL.decode(ids)


def test_stream_holds_an_unfinished_character_back():
    stream = StreamDecoder(SMALL)
    assert [stream.push(i) for i in SMALL.encode("\U0001f600!")] == ["", "", "\U0001f600", "!"]
    assert stream.push(0xE4) == "" and stream.flush() == "\ufffd" and stream.flush() == ""


@pytest.mark.parametrize("bad", [-1, SMALL.vocab_size, 2**40])
def test_unknown_id(bad):
    with pytest.raises(ValueError, match=f"{bad} is outside the vocabulary 0..{SMALL.vocab_size - 1}"):
        SMALL.decode([97, bad])


def test_save_and_load(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_text("an older file")
    SMALL.save(path)
    again = Tokenizer(path)
    assert again.ranks == SMALL.ranks and again.encode("aathe") == SMALL.encode("aathe")
    assert list(tmp_path.iterdir()) == [path]


def rank_lines():
    return [base64.b64encode(token) + b" %d" % rank for token, rank in SMALL.ranks.items()]


def test_rank_file_needs_no_last_newline(tmp_path):
    path = tmp_path / "crlf.model"
    path.write_bytes(b"\r\n".join(rank_lines()))
    assert Tokenizer(path).ranks == SMALL.ranks


@pytest.mark.parametrize("cut", range(1, 8))  # up to all of "dGg= 261"; a cut between lines leaves a whole file
def test_truncated_rank_file_names_the_line(tmp_path, cut):
    path = tmp_path / "cut.model"
    path.write_bytes(b"\n".join(rank_lines())[:-cut])
    with pytest.raises(ValueError, match=f"line {SMALL.n_ranks}: .*damaged or cut short"):
        Tokenizer(path)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"not base64! 100", 101),
        (b"YWI", 101),
        (b"YW*I= 100", 101),
        (b"YWI= ten", 101),
        (b"YWI= 100 1", 101),
        (b"", 101),
        (b" 100", 101),
        (b"YWI= 5", 101),  # rank 5 has come already
        (b"YWI= 999", 101),
        (b"YWI= -1", 101),
        (b"Zg== 100", 103),  # "f" comes again in its own line
    ],
)
def test_malformed_rank_line_is_named(tmp_path, line, named):
    lines = rank_lines()
    path = tmp_path / "bad.model"
    lines[100] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ValueError, match=rf"bad\.model, line {named}:"):
        Tokenizer(path)


def test_rank_tables_that_cannot_encode():
    with pytest.raises(ValueError, match="byte 7 is missing"):
        Tokenizer({token: rank for token, rank in BYTES.items() if rank != 7})
    with pytest.raises(ValueError, match=r"numbers 0\.\.256, each once"):
        Tokenizer(BYTES | {b"aa": 300})
    with pytest.raises(FileNotFoundError):
        Tokenizer("no/such/file")


def test_empty_text():
    assert SMALL.encode("") == [] and SMALL.decode([]) == "" and SMALL.encode_segments([]) == []
    assert [len(array) for array in SMALL.encode_batch(["", "a"])] == [0, 1]


def test_byte_lengths_cover_the_vocabulary():
    assert len(SMALL.token_bytes) == SMALL.vocab_size
    assert SMALL.token_bytes[:256] == [1] * 256 and not any(SMALL.token_bytes[SMALL.n_ranks :])
    ordered = [SMALL.token_bytes[rank] for rank in range(SMALL.n_ranks)]
    assert ordered == [len(token) for token, _ in sorted(SMALL.ranks.items(), key=lambda item: item[1])]
    assert all(a < b for a, b in pairwise(sorted(SMALL.control.values())))
