"""The embedded base agent: a tiny Qwen3 trained from scratch, so that the pipeline runs without any download."""
