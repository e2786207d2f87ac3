"""Results of runs: report, page, sweep."""
