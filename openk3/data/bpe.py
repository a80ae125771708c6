"""Train a byte-level BPE vocabulary: the merges from `tokenizers`, the result as tiktoken ranks."""

import json
from collections.abc import Iterable

from tokenizers import Regex
from tokenizers import Tokenizer as MergeTrainer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from openk3.chat.tokenizer import guarded, pattern_without_intersection


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte inside `tokenizers`: printable Latin-1 bytes are themselves,
    the other 68 are the characters from U+0100 on, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def train_merges(texts: Iterable[str], n_ranks: int, show_progress: bool = False) -> MergeTrainer:
    """A `tokenizers` tokenizer trained on texts, of at most n_ranks tokens."""
    trained = MergeTrainer(BPE())
    # `tokenizers` has no class intersection, hence the other form of the same pattern (model.md section 15).
    split = Split(Regex(pattern_without_intersection()), behavior="isolated")
    trained.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = BpeTrainer(
        vocab_size=n_ranks,
        min_frequency=1,
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=show_progress,
    )
    trained.train_from_iterator((part for text in texts for part in guarded(text)), trainer)
    return trained


def train_bpe(texts: Iterable[str], n_ranks: int, show_progress: bool = False) -> dict[bytes, int]:
    """Ranks {token bytes: rank} of a vocabulary of n_ranks: the 256 bytes, then the merges as found.

    The same texts give the same ranks. Raises ValueError when n_ranks is below 256 or the texts hold too few
    pairs.
    """
    if n_ranks < 256:
        raise ValueError(f"n_ranks must be at least 256, the single bytes; got {n_ranks}")
    trained = train_merges(texts, n_ranks, show_progress)
    ranks = ranks_of_merges(json.loads(trained.to_str())["model"]["merges"])
    if len(ranks) < n_ranks:
        raise ValueError(
            f"the corpus gives {len(ranks) - 256} merges, {n_ranks - 256} are needed for {n_ranks} ranks; "
            f"add text or ask for at most {len(ranks)} ranks"
        )
    return ranks


def ranks_of_merges(merges: list[list[str]]) -> dict[bytes, int]:
    """Merges, written in the byte alphabet, as ranks; of two merges with one result the first counts."""
    alphabet = byte_alphabet()
    ranks = {bytes([byte]): byte for byte in range(256)}
    for left, right in merges:
        ranks.setdefault(bytes(alphabet[char] for char in left + right), len(ranks))
    return ranks
