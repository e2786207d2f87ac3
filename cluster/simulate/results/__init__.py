"""What came of runs: report, page, sweep."""
