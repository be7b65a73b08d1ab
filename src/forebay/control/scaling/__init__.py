"""How many replicas each model has: gateways are asked, `core.scaling` decides, the store and people are told."""
