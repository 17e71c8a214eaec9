"""What a run writes down and shows: records, summary, progress, live curves, a profile. The loop knows no listener."""
