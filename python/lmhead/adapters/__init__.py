"""Drop-in replacements for the log-prob calls of trainers, each with its host's own signature and semantics.

Every module imports PyTorch alone; its host is needed by `install()` only. docs/integrations.md has the lines to change.
"""
