"""Sandboxes for commands on a workspace, and the section that offers one to a model."""

__all__: list[str] = []
