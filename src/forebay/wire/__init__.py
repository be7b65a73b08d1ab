"""Parsing and serialisation, sans-IO: no sockets, no await."""
