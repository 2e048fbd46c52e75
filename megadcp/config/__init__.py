"""Configuration: frozen dataclasses inside (`schema`), Hydra at the edge only (`load`), cross-field checks (`check`)."""
