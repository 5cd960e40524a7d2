"""The OpenAI-compatible server over the policy in this process."""
