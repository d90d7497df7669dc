"""Messages between actors: frozen, tagged, grouped by receiver. Nothing here runs."""
