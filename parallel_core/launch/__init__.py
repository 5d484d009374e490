"""How ranks are started. Knows nothing of what they compute."""
