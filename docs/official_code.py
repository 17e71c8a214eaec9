"""The page about official code, from the comparisons' results in docs/official_code.csv.

    python docs/official_code.py RESULTS    # writes both; `make test-official` runs the comparisons and this

RESULTS is the folder in FEDJAX_SSL_OFFICIAL_RESULTS when the tests ran.
"""

import csv
import json
import pathlib
import sys

RESULTS = pathlib.Path(__file__).with_suffix(".csv")
HEAD = """# Compared with official code

`make test-official` trains each method for a few rounds: once with the library's compiled round,
and once with an independent float64 implementation in `tests/official/`, which follows the paper's
equations in the order of the official code. There are three clients of unequal size (FedRGD: five),
and both see the same initial numbers and batches. The network has batch normalisation. The
exceptions are FedMatch, whose code has none; FedRGD, whose code normalises by groups; and FedDB,
whose kind the library lacks. The table shows the largest difference of any parameter at the end,
float32 against float64, and how far the parameters moved. An empty cell is as above.

| method | compared | largest difference | moved | official code |
|---|---|---|---|---|
"""
TAIL = """
IsoFed is missing, because no code of it is public. `tests/methods/test_isofed.py` compares it with
NumPy by the paper's abstract. CATCHFed and BSemiFL have no public code either; their rounds are
compared with the equations of their pages.
"""


def read() -> list[dict[str, str]]:
    """The committed comparisons: method, what was compared, largest difference, movement, code."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def page() -> str:
    """The page, in Markdown."""
    rows, before = [], {"method": "", "code": ""}
    for line in read():
        new = line["method"] != before["method"]
        code = line["code"] if new or line["code"] != before["code"] else ""
        method = f"`{line['method']}`" if new else ""
        rows.append(f"| {method} | {line['compared']} | {line['difference']} | {line['moved']} | {code} |\n")
        before = line
    return HEAD + "".join(rows) + TAIL


def write(folder: pathlib.Path) -> None:
    """Replaces the committed comparisons by those in a folder of results, in the order of their files' names."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    rows = [
        [line["method"], line["what"], f"{line['difference']:.1e}", f"{line['moved']:.2g}", line["code"]]
        for line in found
    ]
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerows([["method", "compared", "difference", "moved", "code"], *rows])
    RESULTS.with_suffix(".md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
