"""Who rests and who serves, how many spares a promise takes, and what became of the promise."""
