"""Plain functions as rewards: any framework's shape, run in worker processes."""
