"""How many replicas a model needs: learned capacity, forecasts, and the rules that other autoscalers publish."""
