"""How a case is checked, timed and recorded."""
