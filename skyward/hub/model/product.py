"""Name of the product, in each of its spellings. A fork changes these and nothing else."""

from __future__ import annotations

PREFIX = "skyward"
"""Scheme of tracking addresses (`skyward://host:port`) and prefix of the hub's own tags."""

METRIC_PREFIX = "skyward_hub_"
"""Prefix of Prometheus metrics."""

ENVIRONMENT_PREFIX = "SKYWARD_HUB_"
"""Prefix of environment variables."""

TOKEN_PREFIX = "sky_"
"""Prefix of tokens, so that secret scanners can find them."""

PORT = 8057
"""Port of the API and the pages."""

METRICS_PORT = 9090
"""Port of Prometheus metrics."""
