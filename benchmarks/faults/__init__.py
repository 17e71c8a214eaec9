"""The parts of `benchmarks/reliability.py`, one kind of fault per file.

A part has MINUTES, its time limit on two cores; COUNT, its default number of tries; and `run(trial)`, which tries while
`trial.goes_on()` and yields a `Row` for each fault.
"""
