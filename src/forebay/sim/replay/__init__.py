"""A workload against a described cluster: the real gateways on virtual time, in front of modelled engines."""
