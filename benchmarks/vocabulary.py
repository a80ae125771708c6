"""How many bytes a token stands for, by the size of the vocabulary, on Python's standard library.

    python benchmarks/vocabulary.py [--json FILE]

One vocabulary is trained on the training files. Merges are found in a fixed order, so its first ranks are the smaller
vocabularies. Counted on the held-out files.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

from openk3.chat.tokenizer import Tokenizer
from openk3.data.bpe import train_bpe
from openk3.data.sources import corpus_hash, load_corpus, split

RANKS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the record here")
    options = parser.parse_args()
    corpus = load_corpus("stdlib")
    train, held_out = split(corpus)
    ranks = train_bpe((document.text for document in train), max(RANKS))
    n_bytes = sum(len(document.text.encode()) for document in held_out)
    rows = []
    for n in RANKS:
        tokenizer = Tokenizer({token: rank for token, rank in ranks.items() if rank < n})
        tokens = sum(len(tokenizer.encode(document.text)) for document in held_out)
        rows.append({"ranks": n, "tokens": tokens, "bytes_per_token": n_bytes / tokens})
        print(f"{n:6d} ranks  {n_bytes / tokens:.3f} bytes a token")
    record = {
        "command": "python benchmarks/vocabulary.py",
        "versions": {"python": platform.python_version()},
        "corpus": corpus_hash(corpus)[:12],
        "held_out_bytes": n_bytes,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
