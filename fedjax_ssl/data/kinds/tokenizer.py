"""Texts to token ids by Hugging Face's `tokenizers`: trained on the training texts, or read from a tokenizer.json.

A tokenizer is kept as the text of its tokenizer.json. The model's id of a token is the tokenizer's plus one, since 0 is
padding.

Source: byte-pair encoding is from Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL
2016.
"""

import functools
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedjax_ssl.base.errors import UserError, first_line, say
from fedjax_ssl.data.arrays import existing_path

PADDING, UNKNOWN = 0, "[UNK]"
# A pair of tokens that occurs less often is not merged. Without a bound, short texts in a language without spaces, such
# as Chinese and Thai, become one token each.
LEAST_COUNT = 10
MOST_UNKNOWN = 0.5  # the share of unknown tokens above which a warning is printed
TOGETHER = 4096  # texts


def make_tokenizer(texts: Iterable[str], path: str, size: int) -> str:
    """The tokenizer of a data set.

    Args:
        texts: the training texts. If `path` is empty, byte pairs of their characters are merged, the most frequent
            first, within words. Before, Unicode is normalised (NFKC) and upper case made lower. The result depends
            neither on the order of the texts nor on the number of threads.
        path: `data.tokenizer`, a tokenizer.json.
        size: the largest number of tokens, if none is read.

    Raises:
        UserError: the file is missing or is no tokenizer, or the texts are empty.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    if path:
        file = existing_path(path, "data.tokenizer", "file", "a tokenizer.json")
        try:
            return str(Tokenizer.from_file(str(file)).to_str())
        except Exception as error:  # the package has no class of its own
            raise UserError(f"data.tokenizer={path} is not a tokenizer.json ({first_line(error)})") from error
    made = Tokenizer(models.BPE(unk_token=UNKNOWN))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # words, and runs of punctuation between them
    options: dict[str, Any] = {"special_tokens": [UNKNOWN], "limit_alphabet": max(size - 1, 1), "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, min_frequency=LEAST_COUNT, **options))
    if made.get_vocab_size() == 1:
        raise UserError("the training texts have no character")
    return str(made.to_str())


def num_tokens(tokenizer: str) -> int:
    """The number of ids, including the one of padding."""
    return max(_parsed(tokenizer)[0].get_vocab().values()) + 2


def tokenise(texts: Iterable[str], tokenizer: str, length: int, where: str) -> np.ndarray:
    """The first `length` tokens of each of N texts as ids: int32 [N, length].

    The padding, truncation and special tokens of `tokenizer`, the text of a tokenizer.json, are not used. Prints a
    warning if most tokens are unknown to it; `where` says where the texts are from.
    """
    parsed, unknown = _parsed(tokenizer)
    # What UTF-8 cannot encode would be an error.
    texts = [text.encode(errors="replace").decode() for text in texts]
    tokens = np.full((len(texts), length), PADDING, np.int32)
    for start in range(0, len(texts), TOGETHER):
        found = parsed.encode_batch(texts[start : start + TOGETHER], add_special_tokens=False)
        for row, ids in enumerate((encoding.ids[:length] for encoding in found), start):
            tokens[row, : len(ids)] = ids
            tokens[row, : len(ids)] += 1
    of_text = tokens != PADDING
    share = np.mean(tokens[of_text] == unknown + 1) if unknown is not None and of_text.any() else 0
    if share > MOST_UNKNOWN:
        row = int(np.argmax(np.sum(tokens == unknown + 1, axis=1)))
        say(
            f"warning: {where}: {share:.0%} of the tokens of the texts, such as {texts[row]!r:.60}, are unknown to the "
            "tokenizer; are they in the language of the training texts or of data.tokenizer?"
        )
    return tokens


@functools.lru_cache(maxsize=2)
def _parsed(tokenizer: str) -> tuple[Any, int | None]:
    """The tokenizer, and its id of unknown tokens; None if it knows every text, as one of bytes does."""
    from tokenizers import Tokenizer

    parsed = Tokenizer.from_str(tokenizer)
    parsed.no_padding()
    parsed.no_truncation()
    model = json.loads(tokenizer)["model"]
    if model.get("unk_id") is not None:
        return parsed, model["unk_id"]
    return parsed, parsed.token_to_id(model.get("unk_token") or "")
