"""Provider protocol and its adapters: who starts and stops units."""
