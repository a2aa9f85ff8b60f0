"""The engine-free half of a worker: leases around reads, reports, orders."""
