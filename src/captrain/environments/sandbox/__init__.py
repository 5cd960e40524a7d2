"""The sandbox: environments that nobody has vouched for, run in processes that can reach nothing."""
