"""Byte-pair tokens of the Python sources of installed packages, as a .npy for --data: a text that uses its
vocabulary, of which bytes use 256 tokens. Needs `pip install tokenizers`.

python docs/byte_pairs.py FILE.npy
"""

import random
import sys
import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 50_304  # GPT-2's, as the steps pad it
TRAINED_TOKENS = 2000 * 8 * 1024  # of a parity study: the text is about as long, so most is seen once
BYTES = 4 * TRAINED_TOKENS  # a token of such a text is about four


def sources() -> list[str]:
    """Files of the installed packages in random order, and as many as are needed."""
    files = sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    random.Random(0).shuffle(files)
    texts, length = [], 0
    for file in files:
        if length < BYTES:
            texts.append(file.read_text(errors="replace"))
            length += len(texts[-1])
    return texts


def main() -> None:
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError as error:
        raise SystemExit(f"docs/byte_pairs.py: error: {error}: pip install tokenizers") from None
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".npy"):
        raise SystemExit("docs/byte_pairs.py: error: give a FILE.npy")
    texts, tokenizer = sources(), ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    tokens = np.concatenate([np.array(each.ids, np.uint16) for each in tokenizer.encode_batch(texts)])
    np.save(sys.argv[1], tokens)
    print(f"{len(texts):,} files, {len(tokens):,} tokens, {len(np.unique(tokens)):,} of {VOCABULARY:,} used")


if __name__ == "__main__":
    main()
