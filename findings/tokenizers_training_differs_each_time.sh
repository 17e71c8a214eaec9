#!/usr/bin/env bash
# tokenizers: training WordPiece or Unigram twice on equal texts gives two different tokenizers; BPE gives equal ones.
#
# A trainer without random numbers should give the same tokenizer for the same texts. BPE does. WordPiece differs from
# process to process in the ids of its tokens and in the tokens themselves, Unigram in its scores or their order, also
# with a single thread. So clients or restarts that train their own tokenizer from equal texts do not share ids.
#
# Seen with tokenizers 0.23.3. Output (the numbers of different files may vary, but only BPE has one):
#
#     tokenizers 0.23.3, 8 trainings each with one thread
#     BPE: 1 different tokenizer.json
#     WordPiece: 8 different tokenizer.json
#     Unigram: 8 different tokenizer.json
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet tokenizers==0.23.3
cd "$folder"
cat > train.py <<'PYTHON'
import hashlib
import random
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

kind = sys.argv[1]
draw = random.Random(0)
words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 9))) for _ in range(400)]
texts = [" ".join(draw.choices(words, k=20)) for _ in range(2000)]
options = {"unk_token": "?", "special_tokens": ["?"]} if kind == "Unigram" else {}
tokenizer = Tokenizer(getattr(models, kind.replace("Bpe", "BPE"))())
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(
    texts, getattr(trainers, f"{kind}Trainer")(vocab_size=300, show_progress=False, **options)
)
print(hashlib.sha256(tokenizer.to_str().encode()).hexdigest())
PYTHON
export RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
echo "tokenizers $(env/bin/python -c 'import tokenizers; print(tokenizers.__version__)'), 8 trainings each with one thread"
for kind in BPE WordPiece Unigram; do
  for _ in 1 2 3 4 5 6 7 8; do
    env/bin/python train.py "${kind/BPE/Bpe}"
  done | sort -u > "$kind"
  echo "$kind: $(wc -l < "$kind") different tokenizer.json"
done
test "$(wc -l < BPE)" = 1
test "$(wc -l < WordPiece)" -gt 1
test "$(wc -l < Unigram)" -gt 1
