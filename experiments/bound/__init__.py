"""How near plans and dispatcher are to what is possible."""
