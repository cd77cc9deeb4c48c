"""The state of an agent: slices, their events, memory, and the contract of a transaction.

May know: ``core``, ``serde`` and results. Must not go here: files, prompts, how a call runs.
``weakincentives.runtime`` exports what users need.
"""

__all__: list[str] = []
