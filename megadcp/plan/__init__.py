"""The plan: a value describing one optimizer step, and everything that makes, checks, scores or draws it. No torch."""
