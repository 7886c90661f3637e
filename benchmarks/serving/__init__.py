"""Services under load: requests a second and latencies of `fastbert serve` and of other services, in the same run."""
