"""A workload against a described cluster: the real gateways in virtual time, in front of modelled engines."""
