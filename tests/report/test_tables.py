"""Tables of runs in Markdown, LaTeX and CSV; what is bold, against SciPy."""

import csv
import io

import numpy as np
import scipy.stats

import launch
from fedjax_ssl.records.runs import RunRecords, read_run
from fedjax_ssl.report.look import Look, best_cells, to_csv, to_latex, to_markdown
from fedjax_ssl.report.table import INTERVAL, NOTHING, OverSeeds, Row, make_runs_table, make_table, rounds_to


def test_tables_in_three_languages(three_runs):
    run = read_run(three_runs / "a" / "seed_0")
    rows = [Row("50 % & more_", {"data.alpha": 0.1}, [run], 3, True)]
    table = make_table(rows, 0.99)
    shown = dict(zip(table[0], to_markdown(table).splitlines()[2].strip("| ").split(" | ")))
    assert shown["method"] == "50 % & more_ (labels revealed)" and shown["seeds"] == "1 of 3"
    assert shown["rounds to 99 %"] == shown["MB to 99 %"] == "-"
    (row,) = csv.DictReader(io.StringIO(to_csv(table)))
    assert (row["seeds"], row["seeds planned"], row["rounds to 99 %"], row["MB to 99 %"]) == ("1", "3", "", "")
    (line,) = csv.DictReader(io.StringIO(to_csv(make_runs_table(rows, 0.99))))
    for cells in (row, line):  # all cells but the name are numbers or empty
        assert all(name == "method" or text == "" or np.isfinite(float(text)) for name, text in cells.items())
    assert to_markdown(table).splitlines()[1] == "| --- " * len(table[0]) + "|"
    latex = to_latex(table)
    assert r"50 \% \& more\_ (labels revealed) & 0.1 & 1 of 3" in latex and latex.count(r"\\") == 2


def over_seeds(*values, seeds=(0, 1, 2)):
    return OverSeeds(list(values), seeds)


def test_the_best_and_what_chance_may_tell_from_it_is_bold():
    """Compares with SciPy's paired t-test: p above 0.05 counts as equally good."""
    best, close, far, one = [90.0, 92.0, 95.0], [89.0, 92.5, 94.0], [80.0, 83.0, 84.5], [90.0]
    assert scipy.stats.ttest_rel(best, close).pvalue > 0.05 > scipy.stats.ttest_rel(best, far).pvalue
    rows = {"best": over_seeds(*best), "close": over_seeds(*close), "far": over_seeds(*far),
            "other seeds": over_seeds(*close, seeds=(3, 4, 5)), "one": over_seeds(*one, seeds=(0,)),
            "bound (labels revealed)": over_seeds(99.0, 99.0, 99.0)}  # fmt: skip
    low = {"best": over_seeds(1.0, 1.1, 1.2), "far": over_seeds(5.0, 5.1, 5.2)}
    nothing = over_seeds(None, None, None)
    spreads = ("spread over clients", "global model, own tests: spread over clients")
    table = [
        {"method": name, "test accuracy": cell, **dict.fromkeys(spreads, low.get(name, nothing)),
         "seconds": OverSeeds([1.0], (0,), NOTHING)}
        for name, cell in rows.items()
    ]  # fmt: skip
    assert best_cells(table) == {(0, "test accuracy"), (1, "test accuracy"), *((0, name) for name in spreads)}
    assert best_cells(table[:1]) == set()  # a single row has no best
    lines = to_markdown(table, best_cells(table)).splitlines()[2:]
    assert lines[0].startswith(f"| best | **92.33 ± 2.52** |{2 * ' **1.10 ± 0.10** |'} 1 |") and "**" not in lines[2]
    latex = to_latex(table, {(0, "test accuracy")}, r"50 \% of all", "tab:one")
    assert r"best & \textbf{92.33 ± 2.52} &" in latex
    head = [r"\begin{table}", r"\centering", r"\caption{50 \% of all}", r"\label{tab:one}"]
    assert latex.splitlines()[:4] == head and latex.endswith("\\end{tabular}\n\\end{table}\n")


def test_no_bold_letters_across_data_sets_or_for_what_is_no_number():
    high, low, nothing = over_seeds(90.0, 91.0), over_seeds(50.0, 51.0), over_seeds(float("nan"), 99.0)
    of = [("MNIST", high), ("MNIST", low), ("MNIST", nothing), ("CIFAR-10", low), ("CIFAR-10", over_seeds(9.0, 9.5))]
    for column in ("data set", "data.alpha"):
        table = [{"method": "a", column: name, "accuracy": cell} for name, cell in of]
        assert best_cells(table) == {(0, "accuracy"), (3, "accuracy")}


def test_names_that_markdown_or_latex_would_read_as_their_own():
    table = [{"method": name} for name in ("A | x", "*B", "[C]", "~^")]
    assert to_markdown(table).splitlines()[2:5] == [r"| A \| x |", "| *B |", "| [C] |"]
    escaped = r"\textasciitilde \textasciicircum "
    assert to_latex(table).splitlines()[4:8] == [r"A | x \\", r"{}*B \\", r"{}[C] \\", rf"{escaped} \\"]
    angles = to_latex([{"a<b": "x > 0"}], caption="$p < 1$")  # the caption is LaTeX
    assert all(text in angles for text in (r"a\textless{}b \\", r"x \textgreater{} 0 \\", "$p < 1$"))


def test_no_cell_of_a_csv_is_a_formula():
    """Spreadsheets compute a text that begins with one of four signs; numbers stay numbers."""
    named = ["=1+1", "+x", "-x", "@SUM(1)", "-1", "+1.5e3", "plain", "a=b"]
    table = [{"method": name, "=x": -2.5} for name in named]
    rows = list(csv.reader(io.StringIO(to_csv(table))))
    assert rows[0] == ["method", "'=x"] and {row[1] for row in rows[1:]} == {"-2.5"}
    assert [row[0] for row in rows[1:]] == ["'=1+1", "'+x", "'-x", "'@SUM(1)", *named[4:]]


def test_intervals_are_those_of_student():
    values = [90.0, 92.0, 95.0]
    low, high = scipy.stats.t.interval(0.95, 2, np.mean(values), scipy.stats.sem(values))
    (row,) = Look(("method", "accuracy"), True).of([{"method": "a", "accuracy": over_seeds(*values), "seconds": 1}])
    assert str(row["accuracy"]) == f"92.33 ± {(high - low) / 2:.2f}" and list(row) == ["method", "accuracy"]
    assert [str(OverSeeds(found, spread=INTERVAL)) for found in ([90.0, None], [None])] == ["90.00 (1 of 2)", "-"]


def test_a_table_of_chosen_columns(three_runs, tmp_path, undrawn):
    out, runs = tmp_path / "all.html", [str(three_runs / "a"), str(three_runs / "b")]
    words = ["--columns=method, seeds,test accuracy", "--interval", "--caption=Ours.", "--label=tab:ours"]
    assert launch.main(["report", *runs, f"--out={out}", *words]) == 0
    lines = (tmp_path / "all.md").read_text().splitlines()
    assert lines[0] == "| method | seeds | test accuracy |" and len(lines) == 4
    latex = (tmp_path / "all.tex").read_text()
    assert r"\caption{Ours.}" in latex and r"\label{tab:ours}" in latex and r"\textbf{" not in latex
    assert "half of the 95 % confidence interval over seeds" in out.read_text()
    (line, _) = csv.DictReader((tmp_path / "all.csv").open())
    assert "seconds" in line and line["method"].count("*") == 0


def test_an_accuracy_of_float32_reaches_its_decimal_number():
    for target in (0.1, 0.9):  # float32 rounds one up, the other one down
        for value in (target, float(np.float32(target))):
            run = RunRecords(None, {"data": {"validation": 0}}, [{"round": 1, "test_accuracy": value}], [], None)
            assert rounds_to(run, target) == 1 and rounds_to(run, target + 1e-6) is None
