#!/usr/bin/env bash
# tokenizers: a BPE model without an unknown token drops characters that it does not know.
#
# A tokenizer that meets an unknown character might fail, or give a token for it. BPE does neither if it was made
# without `unk_token`: the characters are left out, and no error or warning says so. A text in another script becomes
# an empty list of tokens.
#
# Seen with tokenizers 0.23.3. Output:
#
#     tokenizers 0.23.3
#     without unk_token: ['a', 'c']
#     with unk_token: ['a', '[UNK]', 'c']
#     only unknown characters, without unk_token: []
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet tokenizers==0.23.3
cd "$folder"
env/bin/python - <<'PYTHON'
import tokenizers
from tokenizers import Tokenizer, models, trainers

print("tokenizers", tokenizers.__version__)


def trained(**options):
    tokenizer = Tokenizer(models.BPE(**options))
    special = list(options.values())
    tokenizer.train_from_iterator(["a", "c"], trainers.BpeTrainer(special_tokens=special, show_progress=False))
    return tokenizer


without, with_unknown = trained(), trained(unk_token="[UNK]")
print("without unk_token:", without.encode("abc").tokens)
print("with unk_token:", with_unknown.encode("abc").tokens)
print("only unknown characters, without unk_token:", without.encode("xyz").tokens)
assert without.encode("abc").tokens == ["a", "c"] and without.encode("xyz").tokens == []
assert with_unknown.encode("abc").tokens == ["a", "[UNK]", "c"]
PYTHON
