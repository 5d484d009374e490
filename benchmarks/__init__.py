"""Scripts that print ratios measured side by side in one run. Not tests: nothing here passes or fails."""
