"""Writes docs/official_code.md from what the comparisons found: `make test-official` runs them, and then this.

    python tests/official/table.py RESULTS > docs/official_code.md

RESULTS is the folder that FEDJAX_SSL_OFFICIAL_RESULTS named when the tests ran.
"""

import json
import pathlib
import sys

HEAD = """\
# Compared with official code

`make test-official` trains each method for a few rounds with the real, compiled round on three clients of
unequal size, and a second time by an independent float64 implementation. That one is written from the
paper's equations in the order of the official code (`tests/official/`). Both begin with the same numbers
and see the same batches. The table shows the largest difference of any parameter at the end, in float32
against float64, and how far the parameters moved. The command writes this page.

| method | compared | largest difference | moved | official code |
|---|---|---|---|---|
"""
TAIL = """

IsoFed is not in the table: no code of it is public, as the repository that its project page names has no files. By the
paper's abstract alone it is compared with NumPy in `tests/methods/test_isofed.py`.
"""


def table(folder: pathlib.Path) -> str:
    """The page."""
    lines = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    rows = [
        f"| `{line['method']}` | {line['what']} | {line['difference']:.1e} | {line['moved']:.2g} | {line['code']} |"
        for line in lines
    ]
    return HEAD + "\n".join(rows) + TAIL


if __name__ == "__main__":
    print(table(pathlib.Path(sys.argv[1])))
