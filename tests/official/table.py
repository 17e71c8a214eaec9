"""Writes docs/official_code.md from the results of the comparisons; `make test-official` runs both.

    python tests/official/table.py RESULTS > docs/official_code.md

RESULTS is the folder in FEDJAX_SSL_OFFICIAL_RESULTS when the tests ran.
"""

import json
import pathlib
import sys

HEAD = """\
# Compared with official code

`make test-official` trains each method for a few rounds, once with the library's compiled round
and once with an independent float64 implementation, which follows the paper's equations in the
order of the official code (`tests/official/`). There are three clients of unequal size (FedRGD:
five), and both see the same initial numbers and batches. The network has batch normalisation,
except for FedMatch, whose code has none; FedDB, whose kind (statistics of the batch in tests, too)
the library lacks; and FedRGD, whose code normalises by groups. The table shows the largest
difference of any parameter at the end, in float32 against float64, and how far the parameters
moved. An empty cell is as above.

| method | compared | largest difference | moved | official code |
|---|---|---|---|---|
"""
TAIL = """

IsoFed is not in the table, because no code of it is public. `tests/methods/test_isofed.py` compares
it with NumPy by the paper's abstract.
"""


def table(folder: pathlib.Path) -> str:
    """The page's text."""
    lines = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    rows, before = [], {}
    for line in lines:
        new = line["method"] != before.get("method")
        method = f"`{line['method']}`" if new else ""
        code = line["code"] if new or line["code"] != before["code"] else ""
        rows.append(f"| {method} | {line['what']} | {line['difference']:.1e} | {line['moved']:.2g} | {code} |")
        before = line
    return HEAD + "\n".join(rows) + TAIL


if __name__ == "__main__":
    print(table(pathlib.Path(sys.argv[1])))
