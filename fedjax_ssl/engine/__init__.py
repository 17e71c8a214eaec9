"""The contract of a method and the machine of a round: cohort, lanes, stages, evaluation. Knows no method."""
