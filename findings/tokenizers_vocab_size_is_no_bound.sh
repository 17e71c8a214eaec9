#!/usr/bin/env bash
# tokenizers: `vocab_size` of BpeTrainer does not bound the vocabulary.
#
# An embedding table is often made with `vocab_size` rows. The trainer puts every character of the texts into the
# vocabulary first, and `vocab_size` only ends the merges. With many characters the tokenizer has more tokens than
# asked for, and its ids lie beyond the table. `limit_alphabet` bounds the characters.
#
# Seen with tokenizers 0.23.3. Output:
#
#     tokenizers 0.23.3
#     vocab_size=10: 27 tokens, largest id 26
#     vocab_size=10, limit_alphabet=9: 10 tokens
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet tokenizers==0.23.3
cd "$folder"
env/bin/python - <<'PYTHON'
import string

import tokenizers
from tokenizers import Tokenizer, models, trainers

print("tokenizers", tokenizers.__version__)


def trained(**options):
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    trainer = trainers.BpeTrainer(vocab_size=10, special_tokens=["[UNK]"], show_progress=False, **options)
    tokenizer.train_from_iterator([string.ascii_lowercase], trainer)
    return tokenizer


free, limited = trained(), trained(limit_alphabet=9)
largest = max(free.encode(string.ascii_lowercase).ids)
print(f"vocab_size=10: {free.get_vocab_size()} tokens, largest id {largest}")
print(f"vocab_size=10, limit_alphabet=9: {limited.get_vocab_size()} tokens")
assert (free.get_vocab_size(), largest, limited.get_vocab_size()) == (27, 26, 10)
PYTHON
