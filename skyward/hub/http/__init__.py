"""HTTP face of the hub: application, table of routes, `/v1`, MLflow's API and live events. No logic."""
