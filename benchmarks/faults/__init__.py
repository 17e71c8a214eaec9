"""The parts of `benchmarks/reliability.py`, one kind of fault a file.

A part has MINUTES, the time that it may take at most on two cores, COUNT, how many tries it makes by default, and
`run(trial)`, which makes them while `trial.goes_on()`, and yields a `Row` for each fault.
"""
