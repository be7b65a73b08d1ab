"""Readers of recorded traffic: public traces, and our own gateways' records."""
