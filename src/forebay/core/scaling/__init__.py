"""How many replicas a model needs: learned capacity, forecasts, and the published rules of other autoscalers."""
