"""Workers' lives: planned, started as rank processes, watched, started again."""
