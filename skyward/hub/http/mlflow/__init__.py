"""MLflow's REST API over the hub's services."""
