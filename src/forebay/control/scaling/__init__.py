"""Numbers of replicas: gateways are polled, `core.scaling` decides, the result is stored and reported."""
