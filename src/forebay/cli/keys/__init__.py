"""`forebay keys`: creates, lists, revokes and rotates API keys, locally or through an admin API."""
