"""What a run writes and shows: records, summary, progress, live curves, a profile. Each is a listener of the loop."""
