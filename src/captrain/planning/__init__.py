"""What a configuration will cost and what a comparison can detect, before anything is spent."""
