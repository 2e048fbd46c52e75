"""Runs a StepPlan."""
