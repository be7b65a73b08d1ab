"""Reading what others, and our own gateways, have recorded of real traffic."""
