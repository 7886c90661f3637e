"""Services under load: requests a second and latencies of `fastbert serve` and of others, in the same run."""
