"""How it is shown: JSON lines, a table, a progress line, one HTML page."""
