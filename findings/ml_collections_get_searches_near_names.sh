#!/usr/bin/env bash
# ml_collections: `config.get(name)` of a missing key compares all keys with difflib.
#
# `dict.get` of a missing key costs as much as of a present one, so code uses it freely for optional fields. ConfigDict
# first makes the error with "Did you mean ...?" and then drops it: one run of `difflib.get_close_matches` over all keys
# for each call.
#
# Seen with ml_collections 1.1.0. Output:
#
#     ml_collections 1.1.0
#     100 times get of a missing key: 100 searches of difflib; 100 times `in`: 0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet ml_collections==1.1.0
cd "$folder"
env/bin/python - <<'PYTHON'
import difflib
from importlib.metadata import version

import ml_collections

print("ml_collections", version("ml_collections"))
searches = []
search = difflib.get_close_matches
difflib.get_close_matches = lambda *arguments, **options: searches.append(1) or search(*arguments, **options)
config = ml_collections.ConfigDict({f"field_{number}": number for number in range(300)})
assert all(config.get("missing") is None for _ in range(100))
by_get = len(searches)
assert not any("missing" in config for _ in range(100))
print(f"100 times get of a missing key: {by_get} searches of difflib; 100 times `in`: {len(searches) - by_get}")
assert (by_get, len(searches)) == (100, 100)
PYTHON
