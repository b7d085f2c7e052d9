"""On-demand prices in USD per hour, for when the Pricing API does not answer: common types, Linux, shared tenancy.

Source: AWS, "Amazon EC2 On-Demand Pricing", us-east-1, which equals us-east-2 and us-west-2. Prices change rarely; the
last large change was a cut for P4 and P5 in June 2025. Offers priced by this table say so.
"""

from __future__ import annotations

DATE = "2025-07"
SAME_REGIONS = frozenset({"us-east-1", "us-east-2", "us-west-2"})
OTHER_REGIONS = 1.6
"""Factor for prices in other regions. It exceeds nearly every region's real factor, so that no limit is passed
unnoticed."""

# Families whose prices are proportional to size: price of `large` (2 vCPUs).
_PER_LARGE = {
    "t3": 0.0832,
    "t3a": 0.0752,
    "t4g": 0.0672,
    "m5": 0.096,
    "m6i": 0.096,
    "m6a": 0.0864,
    "m6g": 0.077,
    "m7i": 0.1008,
    "m7a": 0.11592,
    "m7g": 0.0816,
    "c5": 0.085,
    "c6i": 0.085,
    "c6a": 0.0765,
    "c6g": 0.068,
    "c7i": 0.08925,
    "c7a": 0.10264,
    "c7g": 0.0725,
    "r5": 0.126,
    "r6i": 0.126,
    "r6g": 0.1008,
    "r7i": 0.1323,
    "r7g": 0.1071,
}
_LARGES = {
    "nano": 0.0625,
    "micro": 0.125,
    "small": 0.25,
    "medium": 0.5,
    "large": 1,
    "xlarge": 2,
    "2xlarge": 4,
    "4xlarge": 8,
    "8xlarge": 16,
    "12xlarge": 24,
    "16xlarge": 32,
    "24xlarge": 48,
    "32xlarge": 64,
    "48xlarge": 96,
}
_SINGLE = {
    "g4dn.xlarge": 0.526,
    "g4dn.2xlarge": 0.752,
    "g4dn.4xlarge": 1.204,
    "g4dn.8xlarge": 2.176,
    "g4dn.12xlarge": 3.912,
    "g4dn.16xlarge": 4.352,
    "g5.xlarge": 1.006,
    "g5.2xlarge": 1.212,
    "g5.4xlarge": 1.624,
    "g5.8xlarge": 2.448,
    "g5.12xlarge": 5.672,
    "g5.16xlarge": 4.096,
    "g5.24xlarge": 8.144,
    "g5.48xlarge": 16.288,
    "g5g.xlarge": 0.42,
    "g5g.2xlarge": 0.556,
    "g6.xlarge": 0.8048,
    "g6.2xlarge": 0.9776,
    "g6.4xlarge": 1.3232,
    "g6.8xlarge": 2.0144,
    "g6.12xlarge": 4.6016,
    "g6.16xlarge": 3.3968,
    "g6.24xlarge": 6.6752,
    "g6.48xlarge": 13.3504,
    "g6e.xlarge": 1.861,
    "g6e.2xlarge": 2.24208,
    "g6e.4xlarge": 3.00424,
    "g6e.8xlarge": 4.52856,
    "g6e.12xlarge": 10.49264,
    "g6e.16xlarge": 7.57719,
    "g6e.24xlarge": 15.06559,
    "g6e.48xlarge": 30.13118,
    "p3.2xlarge": 3.06,
    "p3.8xlarge": 12.24,
    "p3.16xlarge": 24.48,
    "p4d.24xlarge": 21.957642,
    "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.296,
    "p6-b200.48xlarge": 113.9328,
    "trn1.2xlarge": 1.34375,
    "trn1.32xlarge": 21.5,
    "inf1.xlarge": 0.228,
    "inf2.xlarge": 0.7582,
    "inf2.8xlarge": 1.96786,
    "inf2.24xlarge": 6.49063,
    "inf2.48xlarge": 12.98127,
}


def on_demand(instance_type: str, region: str) -> float | None:
    """Return the table's price in USD per hour, or None if the type is not listed."""
    family, _, size = instance_type.partition(".")
    price = _SINGLE.get(instance_type)
    if price is None and family in _PER_LARGE and size in _LARGES:
        price = round(_PER_LARGE[family] * _LARGES[size], 6)
    if price is None:
        return None
    return price if region in SAME_REGIONS else round(price * OTHER_REGIONS, 6)
